"""Dataset and functions on their way to the workers: pickled once, loaded by each.

Under fork nothing is pickled: the child has the objects. Under spawn and forkserver torch
pickles everything once a worker, one after the other, through a pipe that each child reads when
it is ready. Here the bytes lie in shared memory; a worker gets a handle and some descriptors, and
all of them load side by side. Arrays and tensors leave the pickle's stream for a place of their
own, and a worker has views of it, mapped copy-on-write: they are there once, and yet each worker's
own.

A worker gets these as it is started, but for the first under spawn, which is started before
anything is pickled and gets them through its socket: it has torch to import meanwhile. Where the
kernel does not take them at once, the pool starts it again, as the others.
"""

import contextlib
import errno
import functools
import io
import multiprocessing.context
import os
import pickle
import socket
import sys
from collections import ChainMap
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch

from shmloader.memory.bulk import (
    BufferTable,
    load_with_buffers,
    reduce_memory_map,
    stays_in_band,
    write_buffers,
)
from shmloader.memory.encoder import OutOfBand, reduce_data
from shmloader.memory.segment import SealedSegment, SegmentWriter
from shmloader.messages import RECEIVE_BYTES
from shmloader.process_state import PROCESS
from shmloader.shared.arrays import reduce_tensor

#: What pickling raises for an object that cannot be pickled.
PICKLE_ERRORS = (TypeError, AttributeError, pickle.PicklingError)

# Linux takes 253 by one message (SCM_MAX_FD, <linux/net/scm.h>).
_MESSAGE_DESCRIPTORS = 250

# Before the handle come descriptors that did not fit beside it.
_MORE = b"."


class _Descriptor:
    """A descriptor within a payload. What multiprocessing's reducers take from the other side."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Its number in this process; whoever asks owns it."""
        return PROCESS.received[self._place]


class _Recorder:
    """Poses as the child that multiprocessing pickles for, and notes which descriptors it needs.

    A lock, queue or tensor that is shared with the workers pickles to a descriptor; here to its
    place among them, which is the same for every worker, however they come there.
    """

    DupFd = _Descriptor

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return len(self.descriptors) - 1


@contextlib.contextmanager
def _spawning(popen: Any) -> Iterator[None]:
    """Let multiprocessing's reducers see that something is pickled for a child."""
    before = multiprocessing.context.get_spawning_popen()
    multiprocessing.context.set_spawning_popen(popen)
    try:
        yield
    finally:
        multiprocessing.context.set_spawning_popen(before)


def _reduce_bulk(value: Any, parts: OutOfBand) -> Any:
    """The reduction of an array or tensor whose data leave the stream; NotImplemented of others.

    A tensor that its user has moved to shared memory stays there, as with torch's loader: all see
    what is written to it.
    """
    if type(value) is np.memmap:
        return reduce_memory_map(value)
    if isinstance(value, torch.Tensor):
        if value.requires_grad and not value.is_leaf:
            return NotImplemented  # torch says what is wrong with it
        if value.layout is torch.strided and (value.is_shared() or value.device.type != "cpu"):
            return NotImplemented
        return reduce_tensor(value) or reduce_data(value, parts)
    storage = value._untyped_storage if isinstance(value, torch.TypedStorage) else value
    if isinstance(storage, torch.UntypedStorage) and storage.is_shared():
        return NotImplemented
    return reduce_data(value, parts)


class _PlainPickler(ForkingPickler):
    """Standard pickle with multiprocessing's reducers; bulk leaves the stream."""

    def __init__(self, file: io.BytesIO, parts: OutOfBand) -> None:
        stays = functools.partial(stays_in_band, out_of_band=parts)
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, stays)
        self._parts = parts

    def reducer_override(self, value: Any) -> Any:
        return _reduce_bulk(value, self._parts)


class _ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle, with multiprocessing's reducers for what is shared with a child."""

    # On the class: the pickler reads it while it is made.
    dispatch_table: ClassVar[Any] = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(self, file: io.BytesIO, parts: OutOfBand) -> None:
        stays = functools.partial(stays_in_band, out_of_band=parts)
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=stays)
        self._parts = parts

    def reducer_override(self, value: Any) -> Any:
        reduced = _reduce_bulk(value, self._parts)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def main_is_importable() -> bool:
    """Whether a child started afresh can import ``__main__``: not so in a notebook or ``-c``."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:
        return True
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).exists()


@contextlib.contextmanager
def unimportable_main_hidden() -> Iterator[None]:
    """Keep a child from running a ``__main__`` that is no file, as that of ``python < program``.

    multiprocessing hands the name on, "<stdin>", and every child would fail to find it.
    """
    main: Any = sys.modules.get("__main__")
    if main_is_importable() or not hasattr(main, "__file__"):
        yield
        return
    file = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class Payload:
    """What all workers of a pool get, in shared memory. The pool owns it.

    Standard pickle comes first: it knows objects by their names, as a spawned child does.
    cloudpickle takes over where pickle cannot (lambdas, closures), and comes first where
    ``__main__`` has no file.

    Attributes:
        by_value: Whether cloudpickle did it; answers may then need it, too.
    """

    def __init__(self, objects: object) -> None:
        """Pickle ``objects``.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If neither way can.
        """
        recorder = _Recorder()
        self.by_value = False
        with _spawning(recorder):
            body, parts = self._dump(objects, recorder)
        with SegmentWriter() as writer:
            outside = writer.append(pickle.dumps(write_buffers(parts, writer)))
            places = (outside, writer.append(body), body.nbytes)
            self._segment: SealedSegment = writer.seal()
        with _spawning(recorder):
            self._handle = pickle.dumps((self._segment, places, self.by_value))
        self._descriptors = recorder.descriptors

    def _dump(self, objects: object, recorder: _Recorder) -> tuple[memoryview, OutOfBand]:
        first_error: Exception | None = None
        if main_is_importable():
            file, parts = io.BytesIO(), OutOfBand()
            try:
                _PlainPickler(file, parts).dump(objects)
            except PICKLE_ERRORS as error:
                first_error = error
                recorder.descriptors.clear()
            else:
                return file.getbuffer(), parts
        self.by_value = True
        file, parts = io.BytesIO(), OutOfBand()
        try:
            _ClosurePickler(file, parts).dump(objects)
        except PICKLE_ERRORS as error:
            raise (first_error or error) from error
        finally:
            # It has this frame, and all before it: what they have would stay until a collection.
            first_error = None
        return file.getbuffer(), parts

    def __reduce__(self) -> tuple[Any, ...]:
        """Become a worker's, which multiprocessing starts with this as an argument."""
        return _received, (self._handle, [*map(reduction.DupFd, self._descriptors)])

    def messages(self) -> Iterator[tuple[bytes, list[int]]]:
        """What to send to a worker that was started before, with the descriptors of each part.

        :func:`receive_payload` takes it there.
        """
        for at in range(0, len(self._descriptors), _MESSAGE_DESCRIPTORS):
            end = at + _MESSAGE_DESCRIPTORS
            is_last = end >= len(self._descriptors)
            yield self._handle if is_last else _MORE, self._descriptors[at:end]

    def close(self) -> None:
        """Close the descriptor; may be called again. Workers that started keep theirs."""
        self._segment.close()


class ForkedPayload:
    """The objects themselves, for a forked worker."""

    by_value = False

    def __init__(self, objects: object) -> None:
        self._objects = objects

    def load(self) -> Any:
        """The objects."""
        return self._objects

    def close(self) -> None:
        """Nothing to do."""


def _received(handle: bytes, descriptors: list[Any]) -> "ReceivedPayload":
    """Unpickles a payload: in a process that multiprocessing has started with it."""
    return ReceivedPayload(handle, [descriptor.detach() for descriptor in descriptors])


def receive_payload(channel: socket.socket) -> "ReceivedPayload":
    """In a worker: wait for its payload, which is being pickled. Its first messages.

    Raises:
        OSError: If there are too few descriptors left.
        ConnectionResetError: If the main process is gone, or does not want the worker any more.
    """
    descriptors: list[int] = []
    is_short = False
    while True:
        data, some, flags, _ = socket.recv_fds(
            channel, RECEIVE_BYTES, _MESSAGE_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise ConnectionResetError("the loader was closed while its workers started")
        descriptors += some
        is_short = is_short or bool(flags & socket.MSG_CTRUNC)
        if data != _MORE:
            break
    if is_short:
        # It goes on, to say so.
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(
            errno.EMFILE,
            "a DataLoader worker has too few file descriptors for what the dataset shares; "
            "raise `ulimit -n`",
        )
    return ReceivedPayload(data, descriptors)


class ReceivedPayload:
    """A payload in a worker, not read yet.

    Attributes:
        by_value: See :class:`Payload`; known when it was loaded.
    """

    def __init__(self, handle: bytes, descriptors: list[int]) -> None:
        self._handle = handle
        self._descriptors = descriptors
        self.by_value = False

    def load(self) -> Any:
        """Unpickle the objects. Once, in the worker.

        Raises:
            Exception: Whatever unpickling the user's objects raises.
        """
        # They stay: an object may open its own when it is first used.
        PROCESS.received = self._descriptors
        segment, (outside_at, body_at, nbytes), self.by_value = pickle.loads(self._handle)
        whole = memoryview(segment)
        outside: BufferTable = pickle.loads(whole[outside_at:body_at])
        return load_with_buffers(whole[body_at : body_at + nbytes], outside, segment)
