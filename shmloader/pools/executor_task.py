"""The part of an executor's pool that runs in the executor's processes.

:func:`make_batch` makes the batch of one task. The first task of a loader in a process loads the
dataset and calls ``worker_init_fn``; both are kept for later tasks, until the loader sends another
dataset, or until more loaders than :data:`KEPT` have used the process since.

The process is not ours: it may run other tasks of the user's, before, after and at the same time.
So one batch is made at a time, and some settings that a worker process of ours keeps for its whole
life are set only while a task runs: the worker info, one thread for torch's computations, and the
states of the random number generators.

The answer is the message that a worker process would send, and the contents of the slot that this
message describes, as an array. Any executor can send an array, and Dask and Ray do so without
pickling it.
"""

import contextlib
import ctypes
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.portable import (
    MissingPayloadError,
    PayloadHandle,
    explain_missing,
    load_portable,
)
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.seeds import seed_worker
from shmloader.memory.arena import Arena, Slot
from shmloader.memory.collate import install
from shmloader.messages import BatchFailed, Spilled, Task, pack
from shmloader.pools.batch_server import BatchServer
from shmloader.pools.worker_dataset import introduce
from shmloader.process_state import PROCESS
from shmloader.sampling.rng import GlobalState

#: The most loaders whose datasets a process keeps.
KEPT = 8


# Parameters of mallopt, <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The most that glibc raises its threshold to by itself, on 64-bit systems.
_MMAP_BYTES = 32 << 20


class Shared(NamedTuple):
    """What all tasks of an iterator have in common. It is pickled once.

    Attributes:
        loader: Identifies the loader.
        payload: The handle of the pickled dataset and functions.
        home: The token of the process that has the loader.
        base_seed: Seeds a process's random generators for this loader, together with its number.
    """

    loader: bytes
    payload: PayloadHandle
    home: bytes
    base_seed: int

    def dumps(self) -> bytes:
        """Pickle the fields, as plain tuples."""
        plain = (self.loader, tuple(self.payload), self.home, self.base_seed)
        return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> "Shared":
        """Return what :meth:`dumps` has written."""
        loader, payload, home, base_seed = pickle.loads(data)
        return cls(loader, PayloadHandle(*payload), home, base_seed)


class Own(NamedTuple):
    """The part of a task that differs from other tasks of the iterator.

    Attributes:
        number: The worker number that the process gets, if it has none for this payload.
        seq: Number of the batch in its epoch.
        epoch: Number of the epoch within the iterator.
        slot_id: Number of the batch's slot in the main process.
        dataset_epoch: The number for the dataset's ``set_epoch()``; -1 for no call.
        indices: The pickled indices.
    """

    number: int
    seq: int
    epoch: int
    slot_id: int
    dataset_epoch: int
    indices: bytes

    def dumps(self) -> bytes:
        """Pack the fields. A struct takes a fraction of the time that a second pickle would."""
        return _NUMBERS.pack(*self[:-1]) + self.indices

    @classmethod
    def loads(cls, data: bytes) -> "Own":
        """Return what :meth:`dumps` has written."""
        number, seq, epoch, slot_id, dataset_epoch = _NUMBERS.unpack_from(data)
        return cls(number, seq, epoch, slot_id, dataset_epoch, data[_NUMBERS.size :])


# The numbers of a task, before its indices.
_NUMBERS = struct.Struct("<5q")


class Result(NamedTuple):
    """What a task returns, as a plain tuple. All versions of shmloader have the first two fields.

    Attributes:
        pid: Id of the process that ran it, on its machine.
        refusal: Why the process cannot make batches; "" if it can.
        number: The worker number of that process; -1 if it made no batch.
        message: The packed message for the main process; b"" if the process has no payload.
        contents: The slot's contents, of shape (bytes,); None if nothing was written to the slot.
    """

    pid: int
    refusal: str = ""
    number: int = -1
    message: bytes = b""
    contents: "np.ndarray[Any, np.dtype[np.uint8]] | None" = None


def this_version() -> str:
    """Return the version of shmloader in this process."""
    return str(sys.modules["shmloader"].__version__)


def make_batch(
    version: str,
    shared: bytes,
    own: bytes,
    attempt: int,  # noqa: ARG001 - or else Dask would not run a task that equals an earlier one
    contents: Any = None,
) -> tuple[Any, ...]:
    """Make the batch of a task. This function is submitted to the executor.

    Args:
        version: Version of shmloader in the main process.
        shared: A packed :class:`Shared`.
        own: A packed :class:`Own`.
        attempt: Number of the call.
        contents: The payload, for a process that cannot open it by its handle; else None.

    Returns:
        The fields of a :class:`Result`. An exception of the user's code is in its message.
    """
    pid = os.getpid()
    if version != this_version():
        text = f"shmloader {this_version()} is installed on {socket.gethostname()}, and the loader "
        text += f"has {version}: install the same version there"
        return (*Result(pid, text),)
    common = Shared.loads(shared)
    if common.home == PROCESS.tasks.token:
        text = "the executor runs tasks in the process that has the loader: use thread_pool=True, "
        text += "whose threads make batches without copies"
        return (*Result(pid, text),)
    with PROCESS.tasks.lock, _one_thread():
        number, message, array = _make(common, Own.loads(own), contents)
    return (*Result(pid, "", number, message, array),)


def _keep_freed_memory() -> None:
    """Make glibc's ``malloc`` keep memory that samples free, for the samples of the next batch.

    Dask starts its workers with ``MALLOC_TRIM_THRESHOLD_=65536``. With it, the memory of each
    decoded image comes from the kernel page by page, and goes back. The thresholds set here are
    those that glibc reaches by itself without that variable. With JPEG files on two such workers,
    three rounds in turns on two cores (AMD EPYC, 2026-11-25) gave 1,102 samples a second
    (942–1,137), and 660 (614–674) without this function. Does nothing with another libc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_BYTES)


def _make(
    common: Shared, own: Own, contents: Any
) -> "tuple[int, bytes, np.ndarray[Any, np.dtype[np.uint8]] | None]":
    """Make a task's batch. Returns the fields ``number``, ``message`` and ``contents``."""
    kept = PROCESS.tasks.makers
    maker = kept.get(common.loader)
    if maker is None or maker.digest != common.payload.digest:
        kept.pop(common.loader, None)
        _keep_freed_memory()
        where = f"in a process of the executor (pid {os.getpid()} on {socket.gethostname()})"
        try:
            maker = _Maker(common, own.number, where, contents)
        except MissingPayloadError:
            return -1, b"", None
        except Exception:  # noqa: BLE001 - it is the answer
            # The failed maker is not kept: the next task tries again.
            error = RemoteError.caught(where)
            message = BatchFailed(own.seq, own.epoch, own.slot_id, error.dumps())
            return -1, pack(message), None
        kept[common.loader] = maker
        while len(kept) > KEPT:
            kept.popitem(last=False)[1].close()
    kept.move_to_end(common.loader)
    return (maker.number, *maker.make(own))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch use one thread for computations in the block, as torch's own workers do."""
    count = torch.get_num_threads()
    if count != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if count != 1:
            torch.set_num_threads(count)


class _BatchServer(BatchServer):
    """Makes batches where files and modules of the main process may be missing."""

    def _load(self, slot: Slot, indices: bytes | Spilled) -> bytes | Spilled | None:
        try:
            return super()._load(slot, indices)
        except (FileNotFoundError, ModuleNotFoundError) as error:
            explain_missing(error)
            raise


class _Maker:
    """The dataset of one loader in this process, and what makes its batches.

    Attributes:
        digest: Digest of the payload.
        number: Number of this process among those that make batches for the loader.

    Args:
        common: What the loader's tasks have in common.
        number: Number of this process.
        where: Where this runs, in words, for the texts of errors.
        contents: The payload, if it was sent.

    Raises:
        MissingPayloadError: If the payload cannot be opened here.
        Exception: What loading the user's objects raises, or ``worker_init_fn``.
    """

    def __init__(self, common: Shared, number: int, where: str, contents: Any) -> None:
        handle = common.payload
        self.digest, self.number = handle.digest, number
        self._touched_bytes = 0
        self._info: torch_worker.WorkerInfo | None = None
        self._rng: GlobalState | None = None
        with self._as_worker():
            objects = load_portable(handle, contents)
            dataset, collate_fn, init_fn, on_error, config, worker_count, slot_bytes = objects
            self._arena = Arena.create(slot_bytes, 1)
            seed = seed_worker(common.base_seed, number)
            introduce(number, worker_count, seed, dataset, init_fn)
            self._info = torch_worker._worker_info
            self._server = _BatchServer(
                FetchConfig(*config), number, where, self._arena, _publish_nothing
            )
            self._server.open(dataset, collate_fn, on_error, by_value=handle.by_value)

    @contextlib.contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Make this process a worker of the loader inside the block."""
        own, info = GlobalState(), torch_worker._worker_info
        if self._rng is not None:
            self._rng.restore()
        torch_worker._worker_info = self._info
        try:
            yield
        finally:
            torch_worker._worker_info = info
            self._rng = GlobalState()
            own.restore()

    def make(self, own: Own) -> tuple[bytes, "np.ndarray[Any, np.dtype[np.uint8]] | None"]:
        """Make a task's batch. Returns the packed answer, and the contents of the slot."""
        slot, server = self._arena.slots[0], self._server
        _, seq, epoch, slot_id, told, indices = own
        dataset_epoch = None if told < 0 else told
        install(server.writer)
        # For the main process, the last layout of a worker may be that of another process.
        server.answers.repeat_layout()
        try:
            with self._as_worker():
                task = Task(seq, epoch, slot_id, indices, self._touched_bytes, dataset_epoch)
                answer = server.serve(task, slot)
            return pack(answer), self._contents(slot)
        finally:
            self._touched_bytes = max(self._touched_bytes, server.writer.touched_bytes)
            server.writer.close()

    def _contents(self, slot: Slot) -> "np.ndarray[Any, np.dtype[np.uint8]] | None":
        """Return a copy of the slot's contents, since the next task overwrites the slot."""
        nbytes = self._server.writer.touched_bytes
        if not nbytes:
            return None
        self._arena.reach(slot, nbytes)  # the user's code may have kept the mapping
        return np.frombuffer(slot.memory, np.uint8, nbytes).copy()

    def close(self) -> None:
        """Free the slot."""
        self._arena.close()


def _publish_nothing(number: int, deadline_ns: int) -> None:
    """Show the main process nothing: it cannot see this process."""
