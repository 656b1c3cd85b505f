"""Makes the batch of one task in a slot, and the answer to the task.

All of it runs in a worker process, once for each of its channels, on the thread that makes batches.

What is short travels in the answer's message, and what is long in the slot, after the batch. A
batch that does not fit into its slot fails. An error or report that does not fit is shortened, and
a state that does not fit is left out.
"""

import ctypes
import pickle
from collections.abc import Callable
from os import getpid
from typing import Any

from shmloader.batch.collator import Timer
from shmloader.batch.explain import pickle_or_explain
from shmloader.batch.failures import RemoteError, SampleReport
from shmloader.batch.fetch import EmptyBatchError, FetchConfig
from shmloader.batch.state_slot import StatePickler
from shmloader.errors import SharedMemoryError
from shmloader.forked_child import end_if_forked
from shmloader.memory.arena import Arena, Slot
from shmloader.memory.flat import FlatLayout, FlatLayouts, FlatReader, checksum
from shmloader.memory.limits import MemoryAdmission
from shmloader.memory.pickled import write_batch
from shmloader.memory.writer import SlotWriter
from shmloader.messages import (
    INLINE_BYTES,
    BatchDone,
    BatchEmpty,
    BatchFailed,
    SentState,
    Spilled,
    StreamEnded,
    TooLong,
    Unsaved,
    pack,
)
from shmloader.pools.worker_dataset import WorkerDataset

# Once the user's code has kept memory of this many batches, it gets no more memory of slots.
_KEPT_LIMIT = 4

Sent = bytes | Spilled


class BatchServer:
    """Makes batches of one dataset.

    Attributes:
        dataset: The worker's dataset. Callers resume it and start its epochs through this object.
        writer: Writes to the task's slot.

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
        self._config, self._where, self._arena = config, where, arena
        self._admission, self._is_debugging = admission, is_debugging
        self._timer = Timer()
        self.writer = SlotWriter(arena, admission)
        states = StatePickler(arena, worker_id, admission)
        self.dataset = WorkerDataset(
            config, worker_id, where, self.writer, self._timer, publish, states
        )
        # Whether the dataset was pickled by cloudpickle; its batches may need that, too.
        self._by_value = False
        # How often the user's code has kept memory of a slot, and whether it is still offered any.
        self._kept_count, self._offers = 0, True
        # The layout by which the main process reads this worker's next batch, unless a new one
        # comes with the batch.
        self._last_layout = b""
        self._last_flat_layout: object = None

    def open(self, dataset: Any, collate_fn: Any, on_error: Any, *, by_value: bool) -> None:
        """Take the dataset and the functions; see :meth:`WorkerDataset.open`."""
        self._by_value = by_value
        self.dataset.open(dataset, collate_fn, on_error, by_value=by_value)

    def serve(
        self,
        seq: int,
        epoch: int,
        slot: Slot,
        indices: Sent,
        dataset_epoch: int | None,
        has_hung: bool,
    ) -> bytes:
        """Make a task's batch in a slot. The arguments are those of a :class:`Task`.

        Returns:
            The answer's packed message. An exception of the user's code is in it.
        """
        dataset, writer, pid, slot_id = self.dataset, self.writer, getpid(), slot.slot_id
        self._timer.begin()
        writer.open(slot, is_offered=self._offers and not self._config.auto_collation)
        error, is_empty = dataset.error, False
        layout: Sent | None = None
        if error is not None:
            dataset.snapshot = dataset.fingerprint = None
        else:
            try:
                layout = self._make(slot, indices, dataset_epoch, has_hung)
            except EmptyBatchError:
                is_empty = True
            except BaseException as caught:  # noqa: BLE001 - it is the answer
                end_if_forked(pid)
                if isinstance(caught, StopIteration) and self._config.is_iterable:
                    dataset.has_ended = True
                else:
                    error = RemoteError.of(caught, self._where)
        if getpid() != pid:
            end_if_forked(pid)
        if writer.part():
            # Code that keeps a batch once may be a cache. Code that always does (a generator that
            # holds its last batch) gets ordinary memory, which is copied to the slot: that is as
            # fast.
            self._kept_count += 1
            self._offers = self._kept_count < _KEPT_LIMIT
        if error is not None or is_empty or dataset.has_ended:
            return self._answer_without_batch((seq, epoch, slot_id), error)
        report = snapshot = None
        if dataset.has_report or dataset.snapshot is not None:
            report, snapshot = self._put_notes()
        used_bytes, admission = writer.used_bytes, self._admission
        if admission is not None and admission.is_tight:
            _give_freed_memory_back()
        check = self._checksum(slot, used_bytes) if self._is_debugging else None
        return pack(
            BatchDone(
                seq, epoch, slot_id, layout, used_bytes, check, report, snapshot,
                self._timer.read(), dataset.fingerprint,
            )
        )  # fmt: skip

    def _answer_without_batch(
        self, numbers: tuple[int, int, int], error: RemoteError | None
    ) -> bytes:
        """Return the message that a task failed, or has no samples, or that the stream ended."""
        dataset, writer = self.dataset, self.writer
        if dataset.has_ended:
            is_persistent = self._config.is_persistent
            sent = self._put(dataset.next_beginning()) if is_persistent else None
            return pack(StreamEnded(*numbers, writer.touched_bytes, sent))
        if error is None:
            return pack(BatchEmpty(*numbers, *self._put_notes()))
        error_sent = self._put_error(error)
        report, snapshot = self._put_notes()
        return pack(
            BatchFailed(
                *numbers, error_sent, writer.touched_bytes, report, snapshot, dataset.fingerprint,
                dataset.is_lost,
            )
        )  # fmt: skip

    def _make(
        self, slot: Slot, indices: Sent, dataset_epoch: int | None, has_hung: bool
    ) -> Sent | None:
        """Make a batch and write it to the slot. Returns its layout if the layout is new."""
        if not isinstance(indices, bytes):
            end = indices.offset + indices.nbytes
            self._arena.reach(slot, end)
            indices = bytes(slot.memory[indices.offset : end])
        pid = getpid()
        content = pickle.loads(indices)
        content, self.dataset.hung = content if has_hung else (content, {})
        batch = self.dataset.load(content, dataset_epoch)
        if getpid() != pid:
            end_if_forked(pid)
        return self._put_batch(batch)

    def _checksum(self, slot: Slot, used_bytes: int) -> int:
        self._arena.reach(slot, used_bytes)
        return checksum(slot, used_bytes)

    # What an answer consists of ----------------------------------------------------------

    def _put_batch(self, batch: Any) -> Sent | None:
        """Encode a batch into the slot. Returns its layout, or None if it is that of the last one.

        Raises:
            TypeError: If part of the batch cannot be pickled; names that part.
            SharedMemoryError: If the batch does not fit the slot.
        """
        flat: FlatLayouts | None = batch if type(batch) is FlatLayout else None
        if type(batch) is list and self._config.may_shard and FlatLayout in map(type, batch):
            if {*map(type, batch)} == {FlatLayout}:
                flat = tuple(batch)
            else:  # some shards had to be pickled
                batch = [self._read_back(shard) for shard in batch]
        if flat is None:
            pickled = pickle_or_explain(batch, by_value=self._by_value)
            layout = write_batch(pickled, self.writer, spill_bytes=INLINE_BYTES // 2)
        elif flat is self._last_flat_layout:
            return None
        data = pickle.dumps(flat or layout, pickle.HIGHEST_PROTOCOL)
        sent: Sent | None = None
        if data != self._last_layout:
            sent = data if len(data) <= INLINE_BYTES // 2 else Spilled(*self.writer.put(data))
        # Set after the write: the main process does not get a layout that could not be written.
        self._last_layout, self._last_flat_layout = data, flat
        return sent

    def _read_back(self, shard: Any) -> Any:
        """Return the batch of a shard, which may lie in the slot."""
        if type(shard) is not FlatLayout:
            return shard
        return FlatReader(shard).read(self.writer.slot, None)

    def _put(self, data: bytes | None) -> Sent | TooLong | None:
        """Write a pickled value after the batch. Returns TooLong if it does not fit."""
        if data is None or len(data) <= INLINE_BYTES // 4:
            return data
        try:
            return Spilled(*self.writer.put(data))
        except SharedMemoryError:
            return TooLong(len(data))

    def _put_error(self, error: RemoteError) -> Sent:
        data = pickle.dumps(error)
        if len(data) <= INLINE_BYTES // 2:
            return data
        self.writer.rewind()  # the batch has failed, so its memory is free
        try:
            return Spilled(*self.writer.put(data))
        except SharedMemoryError:
            return pickle.dumps(error.shortened(INLINE_BYTES // 4))

    def _put_report(self, report: SampleReport | None) -> Sent | None:
        if report is None:
            return None
        sent = self._put(pickle.dumps(report))
        return pickle.dumps(report.counts()) if isinstance(sent, TooLong) else sent

    def _put_notes(self) -> tuple[Sent | None, SentState]:
        """Write what goes with a batch: the report on its samples, and the dataset's state."""
        dataset, report = self.dataset, None
        if dataset.has_report and dataset.maker is not None:
            report = self._put_report(dataset.maker.pop_report())
        snapshot = dataset.snapshot
        if not isinstance(snapshot, bytes):
            return report, snapshot
        sent = self._put(snapshot)
        if isinstance(sent, TooLong) and not self._config.is_iterable:
            return report, Unsaved(
                f"the state of the dataset ({sent.nbytes} bytes) does not fit beside its batch in "
                "a slot. Raise shm_size, or set snapshot_every_n_steps=0 to leave this state out"
            )
        return report, sent


def _give_freed_memory_back() -> None:
    """Make glibc's ``malloc`` return free memory to the kernel. Does nothing with another libc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
