"""How far the workers' streams of an iterable dataset have come, as their answers tell. Pure.

A delivery tells of a stream's batch when that is handed over, and of a stream's end when all that
comes before it in the order is handed over: so what the user's thread notes is the same however
fast the workers are.
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
        beginnings: The streams' checkpoints at the beginning of the epoch, or where it went on.

    Args:
        start: The same, for the first epoch.
        in_order: Whether batches are handed over by ``seq``.
        is_iterable: Whether these are streams; else what stays from epoch to epoch is the state
            of a map-style dataset.
    """

    def __init__(
        self, start: IterableCheckpoints, *, in_order: bool, is_iterable: bool = True
    ) -> None:
        self.beginnings = start
        self._checkpoints = list(start.checkpoints)
        self._in_order = in_order
        self._is_iterable = is_iterable
        # Answers that are not handed over yet, for each worker.
        self._waiting = [0] * len(self._checkpoints)
        # Ends that no delivery has told yet.
        self._ends: list[_End] = []
        self._is_left = False
        self._parts: dict[int, bytearray] = {}

    def checkpoint(self, worker_id: int) -> IterableCheckpoint:
        """Return the checkpoint from which the worker that replaces this one goes on."""
        return self._checkpoints[worker_id]

    def answered(self, note: StreamNote) -> None:
        """A batch has come, or an exception in its place."""
        worker_id = note.worker_id
        self._checkpoints[worker_id] = note.applied_to(self._checkpoints[worker_id])
        self._waiting[worker_id] += 1

    def ended(self, worker_id: int, seq: int, next_epoch: Beginning) -> None:
        """A stream has nothing for ticket ``seq``, nor for any later one.

        Args:
            worker_id: The stream's worker.
            seq: The ticket.
            next_epoch: What the worker's next epoch begins with.
        """
        if not self._is_left:
            note = StreamNote(worker_id, next_epoch=next_epoch)
            self._checkpoints[worker_id] = note.applied_to(self._checkpoints[worker_id])
            self._ends.append(_End(seq, note))

    def handed_over(self, seq: int, note: StreamNote) -> list[StreamNote]:
        """What the delivery of a ticket says: the ends before it, and the ticket's own batch."""
        self._waiting[note.worker_id] -= 1
        if not self._ends:
            return [note]
        told = [end for end in self._ends if self._is_over(end, seq)]
        self._ends = [end for end in self._ends if end not in told]
        return [*_in_order(told), note]

    def _is_over(self, end: _End, seq: int) -> bool:
        if self._in_order:
            return end.seq < seq
        return not self._waiting[end.note.worker_id]

    def take_ends(self) -> list[StreamNote]:
        """At the epoch's end: the ends that no delivery has told."""
        ends, self._ends = self._ends, []
        return _in_order(ends)

    # Between epochs ----------------------------------------------------------------------

    def leave(self) -> None:
        """The epoch is given up: a worker that is new now begins the next one."""
        self._is_left = True
        if self._is_iterable:
            self._checkpoints = [checkpoint.begun_anew() for checkpoint in self._checkpoints]
        self._parts.clear()

    def note_part(self, worker_id: int, data: bytes) -> None:
        """A piece of what an epoch begins with has come."""
        self._parts.setdefault(worker_id, bytearray()).extend(data)

    def entered(self, worker_id: int, data: bytes | None) -> None:
        """A worker is ready for the next epoch.

        Args:
            worker_id: The worker.
            data: The :class:`Beginning` of that epoch, written down, or the last piece of it.
        """
        parts = self._parts.pop(worker_id, b"")
        beginning = Beginning.loads(data if data is None else bytes(parts) + data)
        self._checkpoints[worker_id] = IterableCheckpoint(0, beginning.snapshot, rng=beginning.rng)

    def lost(self, worker_id: int) -> None:
        """A worker is dead: forget the pieces that it sent."""
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
