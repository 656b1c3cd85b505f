"""Tracks, from the workers' answers, how far their datasets have come. Pure.

A worker's record says where its dataset is after the worker's last answer; a replacement of the
worker resumes there. A batch is reported with its own delivery. With ``in_order``, the end of a
stream is reported with the first delivery that comes after the end in the order, so what the user's
thread notes does not depend on how fast the workers are. Otherwise, the end is reported with a
delivery once all batches of its worker are delivered. Ends that are left over are reported at the
epoch's end.
"""

import operator
from collections.abc import Iterable
from typing import NamedTuple

from shmloader.batch.dataset_checkpoint import Beginning, DatasetCheckpoint
from shmloader.engine.workers import WorkerTable
from shmloader.messages import Unsaved


class DatasetNote(NamedTuple):
    """Says that a worker's dataset has yielded a batch, or that it has ended.

    Attributes:
        worker_id: The worker.
        snapshot: The dataset's state after the batch, or why there is none; None if none was due.
        fingerprint: The batch's fingerprint, if one was taken.
        has_failed: Whether an exception came in the batch's place.
        state_ns: How long it took to take the snapshot, in nanoseconds.
        next_epoch: What the stream's next epoch begins with, if the stream has ended; else None.
    """

    worker_id: int
    snapshot: bytes | memoryview | Unsaved | None = None
    fingerprint: int | None = None
    has_failed: bool = False
    next_epoch: Beginning | None = None
    state_ns: int = 0

    def applied_to(self, checkpoint: DatasetCheckpoint) -> DatasetCheckpoint:
        """Return the checkpoint of the worker's dataset after this note."""
        if self.next_epoch is not None:
            return checkpoint.ended(self.next_epoch)
        return checkpoint.after_batch(self.snapshot, self.fingerprint, has_failed=self.has_failed)


class _End(NamedTuple):
    seq: int
    note: DatasetNote


class DatasetProgress:
    """Keeps the checkpoints in the workers' records. Part of the scheduler.

    Attributes:
        beginnings: The checkpoints with which the epoch began, or from which it was resumed, by
            worker number.

    Args:
        workers: The workers' records.
        beginnings: The ``beginnings`` of the first epoch.
        in_order: Whether batches are handed over in the order of ``seq``.
        is_iterable: Whether the dataset is iterable; otherwise the checkpoints hold the states of
            a map-style dataset, which carry over from epoch to epoch.
    """

    def __init__(
        self,
        workers: WorkerTable,
        beginnings: Iterable[DatasetCheckpoint],
        *,
        in_order: bool,
        is_iterable: bool = True,
    ) -> None:
        self._workers = workers
        self.beginnings = tuple(beginnings)
        for worker, checkpoint in zip(workers, self.beginnings, strict=True):
            worker.checkpoint = checkpoint
            worker.has_stream = not checkpoint.has_ended
        self._in_order = in_order
        self._is_iterable = is_iterable
        # What no delivery has reported yet: batches that were left out, and ends.
        self._left_out: list[DatasetNote] = []
        self._ends: list[_End] = []
        self._is_left = False

    def answered(self, note: DatasetNote) -> None:
        """Note that a batch, or an exception in its place, has come from a worker."""
        worker = self._workers[note.worker_id]
        worker.checkpoint = note.applied_to(worker.checkpoint)
        worker.undelivered += 1

    def ended(self, worker_id: int, seq: int, next_epoch: Beginning) -> None:
        """Note that a stream has no batch for ticket ``seq`` or any later one.

        Args:
            worker_id: The stream's worker.
            seq: The ticket's number.
            next_epoch: What the worker's next epoch begins with.
        """
        if not self._is_left:
            worker, note = self._workers[worker_id], DatasetNote(worker_id, next_epoch=next_epoch)
            worker.checkpoint = note.applied_to(worker.checkpoint)
            self._ends.append(_End(seq, note))

    def handed_over(self, seq: int, note: DatasetNote) -> list[DatasetNote]:
        """Return the notes for a ticket's delivery: on its batch, and on what is over by then."""
        self._workers[note.worker_id].undelivered -= 1
        if not (self._ends or self._left_out):
            return [note]
        over = [end for end in self._ends if self._is_over(end, seq)]
        self._ends = [end for end in self._ends if end not in over]
        ends = _in_order(over)
        # Without an order, this batch may be the last one of a stream that has ended.
        notes = [*ends, note] if self._in_order else [note, *ends]
        return [*self._take_left_out(), *notes]

    def left_out(self, note: DatasetNote) -> None:
        """Note that a batch is not delivered, since all its samples failed."""
        self._workers[note.worker_id].undelivered -= 1
        self._left_out.append(note)

    def _take_left_out(self) -> list[DatasetNote]:
        notes, self._left_out = self._left_out, []
        return notes

    def _is_over(self, end: _End, seq: int) -> bool:
        if self._in_order:
            return end.seq < seq
        return not self._workers[end.note.worker_id].undelivered

    def take_notes(self) -> list[DatasetNote]:
        """Return the notes that no delivery has reported. Called at the epoch's end."""
        ends, self._ends = self._ends, []
        return [*self._take_left_out(), *_in_order(ends)]

    # Between epochs ----------------------------------------------------------------------

    def leave_epoch(self) -> None:
        """Note that the epoch is left: a worker that starts from now on begins the next."""
        self._is_left = True
        for worker in self._workers:
            worker.undelivered = 0
            worker.next_beginning.clear()
            if self._is_iterable:
                worker.checkpoint = worker.checkpoint.at_next_epoch()

    def entered(self, worker_id: int, data: bytes | None) -> None:
        """Note that a worker is ready for the next epoch.

        Args:
            worker_id: The worker.
            data: The pickled :class:`Beginning` of that epoch, or the last piece of it.
        """
        worker = self._workers[worker_id]
        beginning = Beginning.loads(data if data is None else bytes(worker.next_beginning) + data)
        worker.next_beginning.clear()
        worker.checkpoint = beginning.checkpoint()

    def start_epoch(self) -> None:
        """Begin the next epoch."""
        self._is_left = False
        self._left_out.clear()
        self._ends.clear()
        self.beginnings = tuple(worker.checkpoint for worker in self._workers)


def _in_order(ends: Iterable[_End]) -> list[DatasetNote]:
    return [end.note for end in sorted(ends, key=operator.attrgetter("seq"))]
