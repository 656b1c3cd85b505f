"""The part of an executor's pool that runs in the executor's processes.

:func:`make_batch` makes the batch of one task. The first task of a loader in a process loads the
dataset and calls ``worker_init_fn``; both are kept for later tasks, until the loader sends another
dataset, or until more loaders than :data:`KEPT` have used the process since.

The process is not ours: it may run other tasks of the user's, before, after and at the same time.
So one batch is made at a time, and what a worker of ours has for its whole life is set for a task
only: the worker info, one thread for torch's computations, and the random number generators.

The answer is the message that a worker process would send, and the contents of the slot that this
message describes, as an array: any executor can send that, and Dask and Ray do so without pickling
the array.
"""

import collections
import contextlib
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import EmptyBatchError, FetchConfig
from shmloader.batch.portable import MissingPayloadError, PayloadHandle, load_portable
from shmloader.batch.sample_rng import seed_worker
from shmloader.batch.timer import Timer
from shmloader.memory.collate import install
from shmloader.memory.slot import FIRST_BYTES, Slot
from shmloader.memory.slot_writer import SlotWriter
from shmloader.messages import BatchDone, BatchEmpty, BatchFailed, pack
from shmloader.pools.answer_writer import AnswerWriter
from shmloader.pools.worker_dataset import WorkerDataset, call_init
from shmloader.sampling.rng import GlobalState

#: The most loaders whose datasets a process keeps.
KEPT = 8


class ProcessName(NamedTuple):
    """Identifies a process of an executor.

    Attributes:
        token: A random number of the process.
        host: Name of its machine.
        pid: Its process id there.
        clock: Identifies the clock: the boot of the machine.
    """

    token: bytes
    host: str
    pid: int
    clock: str


class Task(NamedTuple):
    """What one task needs to know.

    Attributes:
        loader: Identifies the loader.
        payload: The pickled dataset and functions.
        home: The process that has the loader.
        number: The worker number that the process gets, if it has none for this payload.
        base_seed: Seeds the process's random generators for this loader, together with the number.
        seq: Number of the batch in its epoch.
        epoch: Number of the epoch within the iterator.
        slot_id: The slot of the main process.
        indices: The pickled indices.
        attempt: Makes tasks differ that are otherwise equal: Dask would not run the second one.
    """

    loader: bytes
    payload: PayloadHandle
    home: ProcessName
    number: int
    base_seed: int
    seq: int
    epoch: int
    slot_id: int
    indices: bytes
    attempt: int


class Result(NamedTuple):
    """What a task returns, as a plain tuple.

    Attributes:
        process: The process that ran it.
        number: The worker number of that process; -1 if it made no batch.
        span_ns: When the task began and ended, by the process's clock.
        message: The packed message for the main process; b"" if the process has no payload.
        contents: The slot's contents; None if the message describes none.
        refusal: Why the process cannot make batches; "" if it can.
    """

    process: ProcessName
    number: int
    span_ns: tuple[int, int]
    message: bytes = b""
    contents: "np.ndarray[Any, np.dtype[np.uint8]] | None" = None
    refusal: str = ""


class _Here:
    """State of this process: a task knows no owner but its process."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    name: ClassVar[ProcessName | None] = None
    makers: ClassVar["collections.OrderedDict[bytes, _Maker]"] = collections.OrderedDict()

    @classmethod
    def forget(cls) -> None:
        """Forget the parent's state in a forked child, where no task runs."""
        cls.lock = threading.Lock()
        cls.name = None
        cls.makers = collections.OrderedDict()


os.register_at_fork(after_in_child=_Here.forget)


def this_process() -> ProcessName:
    """Return the name of this process."""
    if _Here.name is None:
        clock = ""
        with contextlib.suppress(OSError):
            clock = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        _Here.name = ProcessName(secrets.token_bytes(8), socket.gethostname(), os.getpid(), clock)
    return _Here.name


def this_version() -> str:
    """Return the version of shmloader in this process."""
    return str(sys.modules["shmloader"].__version__)


def make_batch(version: str, packed: bytes, contents: Any = None) -> tuple[Any, ...]:
    """Make the batch of a task. The function that is submitted to the executor.

    Args:
        version: Version of shmloader in the main process.
        packed: The pickled fields of a :class:`Task`.
        contents: The payload, for a process that cannot open it by its handle.

    Returns:
        The fields of a :class:`Result`. An exception of the user's code is in its message.
    """
    began_ns = time.monotonic_ns()
    process = this_process()
    if version != this_version():
        text = f"shmloader {this_version()} is installed on {process.host}, and the loader "
        text += f"has {version}: install the same version there"
        return (*Result(process, -1, (began_ns, began_ns), refusal=text),)
    fields = pickle.loads(packed)
    task = Task(fields[0], PayloadHandle(*fields[1]), ProcessName(*fields[2]), *fields[3:])
    if process.token == task.home.token:
        text = "the executor runs tasks in the process that has the loader: use thread_pool=True, "
        text += "whose threads make batches without copies"
        return (*Result(process, -1, (began_ns, began_ns), refusal=text),)
    with _Here.lock, _one_thread():
        return (*_make(process, task, contents, began_ns),)


def _make(process: ProcessName, task: Task, contents: Any, began_ns: int) -> Result:
    kept = _Here.makers
    maker = kept.get(task.loader)
    if maker is None or maker.digest != task.payload.digest:
        kept.pop(task.loader, None)
        where = f"in a process of the executor (pid {process.pid} on {process.host})"
        maker = _Maker(task, where)
        try:
            maker.load(task.payload, contents)
        except MissingPayloadError:
            return Result(process, -1, (began_ns, time.monotonic_ns()))
        except Exception:  # noqa: BLE001 - it is the answer
            # Not kept: the next task tries again.
            error = RemoteError.caught(where)
            message = BatchFailed(task.seq, task.epoch, task.slot_id, error.dumps(), kept=False)
            return Result(process, -1, (began_ns, time.monotonic_ns()), pack(message))
        kept[task.loader] = maker
        while len(kept) > KEPT:
            kept.popitem(last=False)[1].close()
    kept.move_to_end(task.loader)
    message_bytes, array = maker.make(task)
    return Result(process, maker.number, (began_ns, time.monotonic_ns()), message_bytes, array)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch use one thread for computations, as in its own workers."""
    count = torch.get_num_threads()
    if count != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if count != 1:
            torch.set_num_threads(count)


class _Maker:
    """The dataset of one loader in this process, and what makes its batches.

    Attributes:
        digest: Digest of the payload.
        number: Number of this process among those that make batches for the loader.

    Args:
        task: The first task.
        where: Where this runs, in words, for the texts of errors.
    """

    def __init__(self, task: Task, where: str) -> None:
        self.digest = task.payload.digest
        self.number = task.number
        self._base_seed = task.base_seed
        self._where = where
        # The slot is made when the task that needs it begins.
        self._slot: Slot | None = None
        self._slot_bytes = 0
        self._touched_bytes = 0
        self._writer = SlotWriter(None, self._slots)
        self._answers = AnswerWriter(self._writer)
        self._timer = Timer()
        self._config: FetchConfig
        self._dataset: WorkerDataset
        self._info: torch_worker.WorkerInfo | None = None
        self._rng: GlobalState | None = None

    def _slots(self) -> tuple[Slot, ...]:
        return () if self._slot is None else (self._slot,)

    def load(self, handle: PayloadHandle, contents: Any) -> None:
        """Load the dataset and the functions, and call ``worker_init_fn``.

        Raises:
            MissingPayloadError: If the payload cannot be opened here.
            Exception: What loading the user's objects raises, or ``worker_init_fn``.
        """
        with self._as_worker():
            objects = load_portable(handle, contents)
            dataset, collate_fn, init_fn, on_error, config, worker_count, slot_bytes = objects
            self._config, self._slot_bytes = FetchConfig(*config), slot_bytes
            seed = seed_worker(self._base_seed, self.number)
            self._info = torch_worker._worker_info = torch_worker.WorkerInfo(
                id=self.number, num_workers=worker_count, seed=seed, dataset=dataset
            )
            if init_fn is not None:
                call_init(init_fn, self.number)
            self._dataset = WorkerDataset(
                self._config, self.number, self._where, self._writer, self._timer, _publish_nothing
            )
            self._answers.by_value = handle.by_value
            self._dataset.open(dataset, collate_fn, on_error, by_value=handle.by_value)

    @contextlib.contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Make this process a worker of the loader's for the block."""
        own, info = GlobalState(), torch_worker._worker_info
        if self._rng is not None:
            self._rng.restore()
        torch_worker._worker_info = self._info
        install(self._writer)
        try:
            yield
        finally:
            torch_worker._worker_info = info
            self._rng = GlobalState()
            own.restore()

    def make(self, task: Task) -> tuple[bytes, "np.ndarray[Any, np.dtype[np.uint8]] | None"]:
        """Make a task's batch. Returns the packed answer, and the contents of the slot."""
        if self._slot is None:
            self._slot = Slot.create(self._slot_bytes, FIRST_BYTES)
            self._touched_bytes = 0
        slot, writer, answers, dataset = self._slot, self._writer, self._answers, self._dataset
        self._timer.begin()
        is_offered = answers.offers and not self._config.auto_collation
        writer.open(slot, is_offered=is_offered, touched_bytes=self._touched_bytes)
        answers.repeat_layout()
        error, layout, is_empty = dataset.error, None, False
        try:
            if error is None:
                with self._as_worker():
                    try:
                        batch = dataset.load(pickle.loads(task.indices))
                        layout = answers.put_batch(batch, may_shard=self._config.may_shard)
                        del batch
                    except EmptyBatchError:
                        is_empty = True
                    except BaseException:  # noqa: BLE001 - it is the answer
                        error = RemoteError.caught(self._where)
            if answers.is_kept():
                self._slot = None  # the user's code may still write to it
            at = task.seq, task.epoch, task.slot_id
            report = None if dataset.maker is None else dataset.maker.take_report()
            if error is not None:
                sent = answers.put_error(error, is_kept=False)
                message: Any = BatchFailed(
                    *at, sent, kept=False, touched_bytes=writer.touched_bytes,
                    report=answers.put_report(report),
                )  # fmt: skip
            elif is_empty:
                message = BatchEmpty(*at, kept=False, report=answers.put_report(report))
            else:
                put = answers.put_report(report)
                message = BatchDone(
                    *at, layout, writer.used_bytes, kept=False, report=put,
                    times=self._timer.read(),
                )  # fmt: skip
            return pack(message), self._contents(slot)
        finally:
            self._touched_bytes = max(self._touched_bytes, writer.touched_bytes)
            writer.close()
            if self._slot is None:
                slot.close()

    def _contents(self, slot: Slot) -> "np.ndarray[Any, np.dtype[np.uint8]] | None":
        """Return a copy of what was written to the slot, which the next task writes to again."""
        nbytes = self._writer.touched_bytes
        if not nbytes:
            return None
        return np.frombuffer(memoryview(slot.mapping)[:nbytes], np.uint8).copy()

    def close(self) -> None:
        """Free the slot."""
        if self._slot is not None:
            self._slot.close()
            self._slot = None


def _publish_nothing(number: int, deadline_ns: int) -> None:
    """Show the main process nothing: it cannot see this process."""
