"""Dataset and functions on their way to the workers: pickled once, loaded by each.

Under fork nothing is pickled: the child has the objects. Under spawn and forkserver torch
pickles everything once a worker, one after the other, through a pipe that each child reads when
it is ready. Here the bytes lie in shared memory; a worker gets a descriptor, and all of them
load side by side. Arrays and tensors leave the pickle's stream for a place of their own, and a
worker has views of it, mapped copy-on-write: they are there once, and yet each worker's own.
"""

import contextlib
import functools
import io
import multiprocessing.context
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterator
from multiprocessing import popen_forkserver, popen_spawn_posix
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch

from shmloader.memory.encoder import Parts, reduce_data
from shmloader.memory.mapped_file import reduce_memory_map
from shmloader.memory.outside import Outside, read_with_parts, stays_inside, write_parts
from shmloader.memory.segment import SealedSegment, Segment, SegmentWriter
from shmloader.shared.arrays import reduce_tensor

#: What pickling raises for an object that cannot be pickled.
PICKLE_ERRORS = (TypeError, AttributeError, pickle.PicklingError)


class _DescriptorRecorder:
    """Poses as the child that multiprocessing pickles for, and notes which descriptors it needs.

    A lock, queue or tensor that is shared with the workers pickles to a descriptor: under spawn
    its number, which the child inherits; under forkserver its place in the list that the child
    is sent. Both are the same for every worker if each is given the same list, first of all.
    """

    def __init__(self, start_method: str) -> None:
        self.descriptors: list[int] = []
        self._by_place = start_method == "forkserver"
        self.DupFd: Any = (popen_forkserver if self._by_place else popen_spawn_posix)._DupFd

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return len(self.descriptors) - 1 if self._by_place else fd


@contextlib.contextmanager
def _spawning(popen: Any) -> Iterator[None]:
    """Let multiprocessing's reducers see that something is pickled for a child."""
    before = multiprocessing.context.get_spawning_popen()
    multiprocessing.context.set_spawning_popen(popen)
    try:
        yield
    finally:
        multiprocessing.context.set_spawning_popen(before)


def _reduce_bulk(value: Any, parts: Parts) -> Any:
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

    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        stays = functools.partial(stays_inside, parts=parts)
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

    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        stays = functools.partial(stays_inside, parts=parts)
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

    def __init__(self, objects: object, start_method: str) -> None:
        """Pickle ``objects``.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If neither way can.
        """
        self._recorder = _DescriptorRecorder(start_method)
        self.by_value = False
        with _spawning(self._recorder):
            body, parts = self._dump(objects)
        with SegmentWriter() as writer:
            outside = writer.append(pickle.dumps(write_parts(parts, writer)))
            self._places = (outside, writer.append(body), body.nbytes)
            self._segment: SealedSegment = writer.seal()

    def _dump(self, objects: object) -> tuple[memoryview, Parts]:
        first_error: Exception | None = None
        if main_is_importable():
            file, parts = io.BytesIO(), Parts()
            try:
                _PlainPickler(file, parts).dump(objects)
            except PICKLE_ERRORS as error:
                first_error = error
                self._recorder.descriptors.clear()
            else:
                return file.getbuffer(), parts
        self.by_value = True
        file, parts = io.BytesIO(), Parts()
        try:
            _ClosurePickler(file, parts).dump(objects)
        except PICKLE_ERRORS as error:
            raise (first_error or error) from error
        return file.getbuffer(), parts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a handle: multiprocessing calls this once for each worker it starts."""
        popen: Any = multiprocessing.context.get_spawning_popen()
        for fd in self._recorder.descriptors:
            popen.duplicate_for_child(fd)
        return ReceivedPayload, (self._segment, self._places, self.by_value)

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


class ReceivedPayload:
    """A payload in a worker, not read yet."""

    def __init__(self, segment: Segment, places: tuple[int, int, int], by_value: bool) -> None:
        self._segment: Segment | None = segment
        self._places = places
        self.by_value = by_value

    def load(self) -> Any:
        """Unpickle the objects. Once, in the worker.

        Raises:
            Exception: Whatever unpickling the user's objects raises.
        """
        segment, self._segment = self._segment, None
        assert segment is not None
        outside_at, body_at, nbytes = self._places
        whole = memoryview(segment)
        outside: Outside = pickle.loads(whole[outside_at:body_at])
        return read_with_parts(whole[body_at : body_at + nbytes], outside, segment)
