"""Makes the batch of one task in a slot, and the message that answers the task.

All of it runs in a worker process, once for each of its channels, on the thread that makes batches.
"""

import ctypes
import os
import pickle
from collections.abc import Callable
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.fetchers import EmptyBatchError
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.timer import Timer
from shmloader.forked_child import end_if_forked
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.arena import Arena, Slot
from shmloader.memory.lease import checksum
from shmloader.memory.slot_writer import SlotWriter
from shmloader.messages import (
    BatchDone,
    BatchEmpty,
    BatchFailed,
    Spilled,
    StreamEnded,
    Task,
    TooLong,
    Unsaved,
)
from shmloader.pools.answer_writer import AnswerWriter
from shmloader.pools.worker_dataset import WorkerDataset

#: The messages that can answer a task.
TaskAnswer = BatchDone | BatchFailed | BatchEmpty | StreamEnded


class BatchServer:
    """Makes batches of one dataset.

    Attributes:
        dataset: The worker's dataset. Callers resume it and start its epochs through this object.
        writer: Writes to the task's slot.
        answers: Writes the answers.

    Args:
        config: How batches are made.
        worker_id: Number of the worker.
        where: Where this runs, for the texts of errors.
        arena: The slots.
        publish: Shows the main process which sample is in work; see ``SampleWatch``.
        admission: Admits the first touch of a slot's memory; None if memory is not checked.
        is_debugging: Whether answers carry a checksum.
    """

    def __init__(
        self,
        config: FetchConfig,
        worker_id: int,
        where: str,
        arena: Arena,
        publish: Callable[[int, int], None],
        *,
        admission: MemoryAdmission | None = None,
        is_debugging: bool = False,
    ) -> None:
        self._config = config
        self._where = where
        self._arena = arena
        self._admission = admission
        self._is_debugging = is_debugging
        self._timer = Timer()
        self.writer = SlotWriter(arena, admission)
        self.answers = AnswerWriter(self.writer)
        self.dataset = WorkerDataset(config, worker_id, where, self.writer, self._timer, publish)

    def open(self, dataset: Any, collate_fn: Any, on_error: Any, *, by_value: bool) -> None:
        """Take the dataset and the functions; see :meth:`WorkerDataset.open`."""
        self.answers.by_value = by_value
        self.dataset.open(dataset, collate_fn, on_error, by_value=by_value)

    def serve(self, task: Task, slot: Slot) -> TaskAnswer:
        """Make a task's batch. The caller closes the writer, after it has read the slot.

        Args:
            task: The task.
            slot: The slot to fill.

        Returns:
            The answer's message. An exception of the user's code is in it.
        """
        dataset, pid = self.dataset, os.getpid()
        self._timer.begin()
        slot.touched_bytes = task.touched_bytes
        self.writer.open(slot, is_offered=self.answers.offers and not self._config.auto_collation)
        dataset.snapshot = None
        error = dataset.error
        layout: bytes | Spilled | None = None
        is_empty = False
        if error is None:
            try:
                dataset.tell_epoch(task.dataset_epoch)
                layout = self._load(slot, task.indices)
            except EmptyBatchError:
                is_empty = True
            except StopIteration:
                if self._config.is_iterable:
                    dataset.has_ended = True
                else:
                    error = RemoteError.caught(self._where)
            except BaseException:  # noqa: BLE001 - it is the answer
                end_if_forked(pid)
                error = RemoteError.caught(self._where)
        end_if_forked(pid)
        self.answers.part()
        if dataset.has_ended:
            return self._end(task)
        if error is not None:
            return self._fail(task, error)
        if is_empty:
            return BatchEmpty(*_of(task), *self._put_notes())
        return self._finish(task, slot, layout)

    def _load(self, slot: Slot, indices: bytes | Spilled) -> bytes | Spilled | None:
        """Make a batch and write it to the slot. Returns its layout if the layout is new."""
        if not isinstance(indices, bytes):
            end = indices.offset + indices.nbytes
            self._arena.reach(slot, end)
            indices = bytes(slot.memory[indices.offset : end])
        pid = os.getpid()
        batch = self.dataset.load(pickle.loads(indices))
        end_if_forked(pid)
        return self.answers.put_batch(batch, may_shard=self._config.may_shard)

    def _finish(self, task: Task, slot: Slot, layout: bytes | Spilled | None) -> BatchDone:
        report, snapshot = self._put_notes()
        used_bytes = self.writer.used_bytes
        if self._admission is not None:
            self._admission.note_batch(used_bytes)
            if self._admission.is_tight:
                _give_freed_memory_back()
        check = None
        if self._is_debugging:
            self._arena.reach(slot, used_bytes)
            check = checksum(slot, used_bytes)
        times = self._timer.read()
        return BatchDone(
            *_of(task), layout, used_bytes, check, report, snapshot, times,
            self.dataset.fingerprint, self.dataset.state_ns,
        )  # fmt: skip

    def _put_notes(
        self,
    ) -> tuple[bytes | Spilled | None, bytes | Spilled | TooLong | Unsaved | None]:
        """Write what goes with a batch: the report on its samples, and the dataset's state."""
        maker, snapshot = self.dataset.maker, self.dataset.snapshot
        report = self.answers.put_report(None if maker is None else maker.take_report())
        if isinstance(snapshot, Unsaved):
            return report, snapshot
        sent = self.answers.put_state(snapshot)
        if isinstance(sent, TooLong) and not self._config.is_iterable:
            return report, Unsaved(
                f"the state of the dataset ({sent.nbytes} bytes) does not fit beside its batch in "
                "a slot. Raise shm_size, or set snapshot_every_n_steps=0 to leave this state out"
            )
        return report, sent

    def _fail(self, task: Task, error: RemoteError) -> BatchFailed:
        sent = self.answers.put_error(error)
        report, snapshot = self._put_notes()
        dataset = self.dataset
        return BatchFailed(
            *_of(task), sent, self.writer.touched_bytes, report, snapshot,
            dataset.fingerprint, dataset.is_lost,
        )  # fmt: skip

    def _end(self, task: Task) -> StreamEnded:
        is_persistent = self._config.is_persistent
        sent = self.answers.put_state(self.dataset.next_beginning() if is_persistent else None)
        return StreamEnded(*_of(task), self.writer.touched_bytes, sent)


def _of(task: Task) -> tuple[int, int, int]:
    """Return the numbers by which an answer names its task."""
    return task.seq, task.epoch, task.slot_id


def _give_freed_memory_back() -> None:
    """Make glibc's ``malloc`` return free memory to the kernel. Does nothing with another libc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
