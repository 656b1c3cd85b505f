"""Tracks, from the workers' answers, how far their streams of an iterable dataset have come. Pure.

A delivery reports a stream's batch when the batch is handed over. It reports a stream's end once
everything that precedes the end in the order has been handed over. So what the user's thread notes
does not depend on how fast the workers are.
"""

import operator
from collections.abc import Iterable
from typing import NamedTuple

from shmloader.batch.iterable_state import Beginning, IterableCheckpoint
from shmloader.engine.iterable_checkpoints import IterableCheckpoints, StreamNote


class _End(NamedTuple):
    seq: int
    note: StreamNote


class StreamBook:
    """The checkpoints of all streams, on the engine's thread.

    Attributes:
        beginnings: The streams' checkpoints at the beginning of the epoch, or where it was
            resumed.

    Args:
        start: The ``beginnings`` of the first epoch.
        in_order: Whether batches are handed over in the order of ``seq``.
        is_iterable: Whether the dataset is iterable; otherwise the checkpoints hold the states of
            a map-style dataset, which carry over from epoch to epoch.
    """

    def __init__(
        self, start: IterableCheckpoints, *, in_order: bool, is_iterable: bool = True
    ) -> None:
        self.beginnings = start
        self._checkpoints = list(start.checkpoints)
        self._in_order = in_order
        self._is_iterable = is_iterable
        # For each worker, how many answers are not handed over yet.
        self._waiting = [0] * len(self._checkpoints)
        # Ends that no delivery has reported yet.
        self._ends: list[_End] = []
        self._is_left = False
        self._parts: dict[int, bytearray] = {}

    def checkpoint(self, worker_id: int) -> IterableCheckpoint:
        """Return the checkpoint from which a replacement of this worker resumes."""
        return self._checkpoints[worker_id]

    def answered(self, note: StreamNote) -> None:
        """Note that a batch, or an exception in its place, has come from a worker."""
        worker_id = note.worker_id
        self._checkpoints[worker_id] = note.applied_to(self._checkpoints[worker_id])
        self._waiting[worker_id] += 1

    def ended(self, worker_id: int, seq: int, next_epoch: Beginning) -> None:
        """Note that a stream has no batch for ticket ``seq`` or any later one.

        Args:
            worker_id: The stream's worker.
            seq: The ticket's number.
            next_epoch: What the worker's next epoch begins with.
        """
        if not self._is_left:
            note = StreamNote(worker_id, next_epoch=next_epoch)
            self._checkpoints[worker_id] = note.applied_to(self._checkpoints[worker_id])
            self._ends.append(_End(seq, note))

    def handed_over(self, seq: int, note: StreamNote) -> list[StreamNote]:
        """Return the notes for a ticket's delivery: the ends before it, then its own batch."""
        self._waiting[note.worker_id] -= 1
        if not self._ends:
            return [note]
        over = [end for end in self._ends if self._is_over(end, seq)]
        self._ends = [end for end in self._ends if end not in over]
        return [*_in_order(over), note]

    def _is_over(self, end: _End, seq: int) -> bool:
        if self._in_order:
            return end.seq < seq
        return not self._waiting[end.note.worker_id]

    def take_ends(self) -> list[StreamNote]:
        """Return the ends that no delivery has reported. Called at the epoch's end."""
        ends, self._ends = self._ends, []
        return _in_order(ends)

    # Between epochs ----------------------------------------------------------------------

    def leave(self) -> None:
        """Note that the epoch is abandoned: a worker that starts from now on begins the next."""
        self._is_left = True
        if self._is_iterable:
            self._checkpoints = [checkpoint.at_next_epoch() for checkpoint in self._checkpoints]
        self._parts.clear()

    def note_part(self, worker_id: int, data: bytes) -> None:
        """Store a piece of a worker's :class:`Beginning`; :meth:`entered` gets the last piece."""
        self._parts.setdefault(worker_id, bytearray()).extend(data)

    def entered(self, worker_id: int, data: bytes | None) -> None:
        """Note that a worker is ready for the next epoch.

        Args:
            worker_id: The worker.
            data: The pickled :class:`Beginning` of that epoch, or the last piece of it.
        """
        parts = self._parts.pop(worker_id, b"")
        beginning = Beginning.loads(data if data is None else bytes(parts) + data)
        self._checkpoints[worker_id] = IterableCheckpoint(0, beginning.snapshot, rng=beginning.rng)

    def lost(self, worker_id: int) -> None:
        """Discard the pieces that a worker sent before it died."""
        self._parts.pop(worker_id, None)

    def start_epoch(self) -> None:
        """Begin the next epoch, at worker 0."""
        self._is_left = False
        self._ends.clear()
        self._waiting = [0] * len(self._checkpoints)
        self.beginnings = IterableCheckpoints(
            self._checkpoints, base_seed=self.beginnings.base_seed
        )


def _in_order(ends: Iterable[_End]) -> list[StreamNote]:
    return [end.note for end in sorted(ends, key=operator.attrgetter("seq"))]
