"""Carries the dataset and the functions to other processes: pickled once, loaded by each.

Under fork nothing is pickled: the child has the objects. Otherwise the pickle lies in shared
memory. Each worker gets a handle and some descriptors. As many of them load at the same time as
there are cores, so that the first of many is ready soon. Arrays and tensors lie beside the pickle,
and workers map them copy-on-write: their memory is shared until a worker writes to it.
:func:`shmloader.share_on_host` sends its objects to the other ranks of the host in the same way.

The processes of an executor may be on this machine or on others, and only bytes are sure to reach
them. So a :class:`PortablePayload` is named by the digest of its contents. The processes of this
machine open its segment through ``/proc``. A process that cannot open it raises
:class:`MissingPayloadError`, gets the contents as bytes, and makes its own segment of them.
"""

import contextlib
import errno
import functools
import hashlib
import multiprocessing.context
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.errors import SharedMemoryError
from shmloader.memory.limits import at_most_one_a_core
from shmloader.memory.pickled import (
    PICKLE_ERRORS,
    OutOfBand,
    dump,
    reduce_data,
    reducers_of_multiprocessing,
)
from shmloader.memory.segment import (
    BULK_BYTES,
    TOKEN_BYTES,
    BufferTable,
    SealedSegment,
    Segment,
    SegmentWriter,
    load_with_buffers,
    write_buffers,
)
from shmloader.memory_maps import reduce_memory_map
from shmloader.messages import RECEIVE_BYTES
from shmloader.process_state import PROCESS
from shmloader.shared.containers import reduce_array, reduce_tensor

# The most descriptors in one message. Linux takes 253 (SCM_MAX_FD, <linux/net/scm.h>).
_MESSAGE_DESCRIPTORS = 250

# Sent before the handle, with descriptors that do not fit beside the handle.
_MORE = b"."

# Descriptors ------------------------------------------------------------------------------


class _Descriptor:
    """A descriptor in a payload. Multiprocessing's reducers call its ``detach`` in a child."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._received: list[int] = []

    def __getstate__(self) -> int:
        return self._index

    def __setstate__(self, index: int) -> None:
        # Kept, since an object may open its descriptor only when it is first used.
        self._index, self._received = index, PROCESS.received

    def detach(self) -> int:
        """Return the descriptor's number in this process. The caller owns it."""
        return self._received[self._index]


class Recorder:
    """Stands for the child that multiprocessing pickles for, and keeps the child's descriptors.

    Here a lock, queue or tensor that is shared with the workers pickles to an index into them.
    """

    DupFd = _Descriptor

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Add a descriptor; return its index."""
        self.descriptors.append(fd)
        return len(self.descriptors) - 1


@contextlib.contextmanager
def spawning(popen: Any) -> Iterator[None]:
    """Make multiprocessing's reducers work in this block as if a child were being started."""
    before = multiprocessing.context.get_spawning_popen()
    multiprocessing.context.set_spawning_popen(popen)
    try:
        yield
    finally:
        multiprocessing.context.set_spawning_popen(before)


# Pickles in segments ----------------------------------------------------------------------


def main_is_importable() -> bool:
    """Whether a fresh interpreter can import ``__main__``: False in a notebook or with ``-c``."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:
        return True
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).exists()


@contextlib.contextmanager
def unimportable_main_hidden() -> Iterator[None]:
    """Keep children started in this block from importing a ``__main__`` such as "<stdin>"."""
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


def reduce_bulk(value: Any, parts: OutOfBand, *, is_portable: bool = False) -> Any:
    """Reduce an array or tensor so that its data lie beside the pickle.

    Args:
        value: Any object. The result is NotImplemented if it is neither an array nor a tensor.
        parts: Gets the data.
        is_portable: Whether the pickle may go to another machine. Then tensors in torch's shared
            memory are copied. Otherwise they stay there, as with torch's loader: all processes see
            what is written to them.
    """
    if type(value) is np.memmap:
        return reduce_memory_map(value)
    if isinstance(value, torch.Tensor):
        if value.requires_grad and not value.is_leaf:
            return NotImplemented  # torch raises an error for it
        if not is_portable:
            if value.layout is torch.strided and (value.is_shared() or value.device.type != "cpu"):
                return NotImplemented
            return reduce_tensor(value) or reduce_data(value, parts)
    if not is_portable and isinstance(value, torch.UntypedStorage) and value.is_shared():
        return NotImplemented
    is_array = type(value) is np.ndarray and not is_portable
    return (is_array and reduce_array(value)) or reduce_data(value, parts)


def seal(objects: object, recorder: Recorder | None) -> tuple[SealedSegment, tuple[int, int, int]]:
    """Pickle objects into a segment.

    Standard pickle is tried first: it refers to functions and classes by name. cloudpickle is used
    if standard pickle fails (lambdas, closures), and if ``__main__`` is not a file.

    Args:
        objects: The objects.
        recorder: Gets the descriptors of the pickle. None if it must have none, and is for
            processes with another main file, so that what is defined in ours is pickled by value.

    Returns:
        The segment; and the offsets of the table of buffers and of the pickle, and the pickle's
        length, in bytes.
    """
    reduce = functools.partial(reduce_bulk, is_portable=recorder is None)
    reducers = {} if recorder is None else reducers_of_multiprocessing(with_torch=True)
    body: bytes | None = None
    if main_is_importable():
        with contextlib.suppress(*PICKLE_ERRORS):
            body, parts = dump(objects, reduce, reducers, least_bytes=BULK_BYTES)
    if body is None or (recorder is None and b"__main__" in body):
        if recorder is not None:
            recorder.descriptors.clear()
        body, parts = dump(objects, reduce, reducers, by_value=True, least_bytes=BULK_BYTES)
    with SegmentWriter() as writer:
        table_at = writer.append(pickle.dumps(write_buffers(parts, writer)))
        spans = (table_at, writer.append(body), len(body))
        return writer.seal(), spans


def unseal(segment: Segment, spans: tuple[int, int, int]) -> Any:
    """Unpickle the objects of a segment, as new copies."""
    table_at, body_at, nbytes = spans
    whole = memoryview(segment)
    table: BufferTable = pickle.loads(whole[table_at:body_at])
    return load_with_buffers(whole[body_at : body_at + nbytes], table, segment)


# Payloads for processes that this one starts, or has a socket to ---------------------------


class Payload:
    """The objects that all workers of a pool get, pickled in shared memory. Its owner closes it.

    Attributes:
        descriptors: What it refers to by descriptors, which its owner keeps open.
        nbytes: Bytes of the pickle, and of the arrays and tensors beside it.
    """

    def __init__(self, objects: object) -> None:
        recorder = Recorder()
        with spawning(recorder):
            sealed = seal(objects, recorder)
            self._segment = sealed[0]
            self._handle = pickle.dumps(sealed)
        self.descriptors, self.nbytes = recorder.descriptors, self._segment.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker that multiprocessing starts with this payload as an argument."""
        return _received, (self._handle, [*map(reduction.DupFd, self.descriptors)])

    def messages(self) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the messages, with their descriptors, for :func:`receive_payload`."""
        for at in range(0, max(1, len(self.descriptors)), _MESSAGE_DESCRIPTORS):
            end = at + _MESSAGE_DESCRIPTORS
            is_last = end >= len(self.descriptors)
            yield self._handle if is_last else _MORE, self.descriptors[at:end]

    def send(self, channel: socket.socket) -> None:
        """Send it to a process that is already running. Waits while the kernel has no room."""
        for data, descriptors in self.messages():
            socket.send_fds(channel, [data], descriptors)

    def close(self) -> None:
        """Close the descriptor. May be called again. Workers that have started keep theirs."""
        self._segment.close()


class ForkedPayload:
    """The payload of forked workers: the objects themselves."""

    def __init__(self, objects: object) -> None:
        self._objects = objects

    def load(self, **_: bool) -> Any:
        """Return the objects. Waits for nothing."""
        return self._objects

    def close(self) -> None:
        """Do nothing."""


class ReceivedPayload:
    """A payload in a worker."""

    def __init__(self, handle: bytes, descriptors: list[int]) -> None:
        self._handle, self._descriptors = handle, descriptors

    def load(self, *, waits: bool = False) -> Any:
        """Unpickle the objects. Called once. Raises what the user's objects raise.

        With ``waits``, waits for its turn while as many processes load them as there are cores.
        """
        with PROCESS.opening:
            before, PROCESS.received = PROCESS.received, self._descriptors
            try:
                segment, spans = pickle.loads(self._handle)
                turn = at_most_one_a_core(segment.sealed.file.fileno())
                with turn if waits else contextlib.nullcontext():
                    return unseal(segment, spans)
            finally:
                PROCESS.received = before

    def close(self) -> None:
        """Close the descriptors instead of loading."""
        for descriptor in self._descriptors:
            os.close(descriptor)


def _received(handle: bytes, descriptors: list[Any]) -> ReceivedPayload:
    """Unpickle a payload in a process that multiprocessing has started with it."""
    return ReceivedPayload(handle, [descriptor.detach() for descriptor in descriptors])


def receive_payload(channel: socket.socket) -> ReceivedPayload:
    """Wait for a payload that is sent by :meth:`Payload.send`.

    Raises:
        OSError: If this process has too few descriptors left.
        ConnectionResetError: If the sender is gone, or has closed the loader.
    """
    descriptors: list[int] = []
    data, is_short = _MORE, False
    while data == _MORE:
        data, some, flags, _ = socket.recv_fds(
            channel, RECEIVE_BYTES, _MESSAGE_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise ConnectionResetError("the loader was closed while its workers started")
        descriptors += some
        is_short = is_short or bool(flags & socket.MSG_CTRUNC)
    payload = ReceivedPayload(data, descriptors)
    if is_short:
        payload.close()  # the process continues, to report this error
        text = f"process {os.getpid()} has too few file descriptors for what the dataset shares"
        raise OSError(errno.EMFILE, f"{text}; raise `ulimit -n`")
    return payload


# Payloads for an executor's processes -------------------------------------------------------


class MissingPayloadError(Exception):
    """A process cannot open a payload's segment, and got no contents. Never reaches the user."""


class PayloadHandle(NamedTuple):
    """Names a payload in each task. It takes some hundred bytes.

    Attributes:
        digest: Digest of the contents.
        segment: A pickled handle of the segment, for processes of the same machine.
        spans: Where the table of buffers and the pickle lie in the segment.
    """

    digest: bytes
    segment: bytes
    spans: tuple[int, int, int]


class PortablePayload:
    """Objects pickled for any process. Its owner closes it; each task carries its ``handle``."""

    def __init__(self, objects: object) -> None:
        self._segment, spans = seal(objects, None)
        self.nbytes = self._segment.nbytes
        self._path = f"/proc/self/fd/{self._segment.file.fileno()}"
        with Path(self._path).open("rb") as file:
            file.seek(TOKEN_BYTES)
            digest = hashlib.file_digest(file, "blake2b").digest()
        self.handle = PayloadHandle(digest, pickle.dumps(self._segment), spans)

    def contents(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return a copy of the segment's bytes, which can be sent to another machine."""
        return np.fromfile(self._path, np.uint8)

    def close(self) -> None:
        """Close the segment. May be called again. Processes that have mapped it keep it."""
        self._segment.close()


def load_portable(handle: PayloadHandle, contents: Any = None) -> Any:
    """Unpickle the objects of a payload, as new copies.

    Raises:
        MissingPayloadError: If no contents were sent, and the segment cannot be opened.
        Exception: What unpickling the user's objects raises.
    """
    segment: Segment
    if contents is not None:
        segment = Segment.of_contents(contents)
    else:
        try:
            segment = pickle.loads(handle.segment)
        except (SharedMemoryError, OSError) as error:
            raise MissingPayloadError from error
    with explained_missing():
        return unseal(segment, handle.spans)


@contextlib.contextmanager
def explained_missing() -> Iterator[None]:
    """Add a note that files and modules have to exist where an executor's processes run."""
    try:
        yield
    except (FileNotFoundError, ModuleNotFoundError) as error:
        error.add_note(
            f"With executor=, this has to exist on each machine that makes batches, for "
            f"{sys.executable}."
        )
        raise
