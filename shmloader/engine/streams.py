"""How far the workers' streams of an iterable dataset have come, as their answers tell. Pure.

A receipt tells of a stream's batch when that is handed over, and of a stream's end when all that
comes before it in the order is handed over: so what the user's thread notes is the same however
fast the workers are.
"""

from typing import NamedTuple

from shmloader.engine.stream_states import Place, StreamNote, StreamStates


class _End(NamedTuple):
    seq: int
    note: StreamNote


class StreamBook:
    """The places of all streams, on the engine's thread.

    Attributes:
        beginnings: The streams' places at the beginning of the present epoch, or where it went on.

    Args:
        start: The same, for the first epoch.
        in_order: Whether batches are handed over by ``seq``.
    """

    def __init__(self, start: StreamStates, *, in_order: bool) -> None:
        self.beginnings = start
        self._places = list(start.places)
        self._in_order = in_order
        # Answers that are not handed over yet, for each worker.
        self._waiting = [0] * len(self._places)
        # Ends that no receipt has told yet.
        self._ends: list[_End] = []
        self._is_left = False
        self._parts: dict[int, bytearray] = {}

    def place(self, worker_id: int) -> Place:
        """From where a worker goes on that takes this one's place."""
        return self._places[worker_id]

    def answered(self, worker_id: int, snapshot: bytes | None) -> None:
        """A batch has come, or an exception in its place."""
        self._places[worker_id] = self._places[worker_id].gave(snapshot)
        self._waiting[worker_id] += 1

    def ended(self, worker_id: int, seq: int, snapshot: bytes | None) -> None:
        """A stream has nothing for ticket ``seq``, nor for any later one."""
        if not self._is_left:
            self._places[worker_id] = self._places[worker_id].ended(snapshot)
            self._ends.append(_End(seq, StreamNote(worker_id, snapshot, is_end=True)))

    def handed_over(self, worker_id: int, seq: int, snapshot: bytes | None) -> list[StreamNote]:
        """What the receipt of a ticket says: the ends before it, and the ticket's own batch."""
        self._waiting[worker_id] -= 1
        notes = []
        if self._ends:
            told = [end for end in self._ends if self._is_over(end, seq)]
            self._ends = [end for end in self._ends if end not in told]
            notes = [end.note for end in sorted(told)]
        notes.append(StreamNote(worker_id, snapshot))
        return notes

    def _is_over(self, end: _End, seq: int) -> bool:
        if self._in_order:
            return end.seq < seq
        return not self._waiting[end.note.worker_id]

    def take_ends(self) -> list[StreamNote]:
        """At the epoch's end: the ends that no receipt has told."""
        ends, self._ends = self._ends, []
        return [end.note for end in sorted(ends)]

    # Between epochs ----------------------------------------------------------------------

    def leave(self) -> None:
        """The epoch is given up: a worker that is new now begins the next one."""
        self._is_left = True
        self._places = [place.begun_anew() for place in self._places]
        self._parts.clear()

    def note_part(self, worker_id: int, data: bytes) -> None:
        """A piece of a dataset's state has come."""
        self._parts.setdefault(worker_id, bytearray()).extend(data)

    def entered(self, worker_id: int, state: bytes | None) -> None:
        """A worker is ready for the next epoch, its dataset in this state."""
        parts = self._parts.pop(worker_id, b"")
        self._places[worker_id] = Place(0, state if state is None else bytes(parts) + state)

    def lost(self, worker_id: int) -> None:
        """A worker is dead: the pieces of its dataset's state are none."""
        self._parts.pop(worker_id, None)

    def start_epoch(self) -> None:
        """Begin the next epoch, at worker 0."""
        self._is_left = False
        self._ends.clear()
        self._waiting = [0] * len(self._places)
        self.beginnings = StreamStates(self._places)
