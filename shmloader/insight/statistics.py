"""The records of all epochs of a loader."""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from shmloader.insight.local import LocalEpoch
from shmloader.insight.record import Record
from shmloader.insight.trace import Trace

# Summing up costs as much as several batches, so that only some epochs at once are.
_MOST_RECENT = 4


class _State(NamedTuple):
    """The sum of earlier epochs, and the newest ones and those that still run.

    These come with their iterators.
    """

    past: Record | None
    recent: tuple[tuple[Record | LocalEpoch, weakref.ref[Any]], ...]


class Statistics:
    """The records of all epochs of a loader.

    The consumer's thread begins the epochs, and any thread may read.

    Attributes:
        epochs: Number of epochs begun.
        trace: The trace that is being recorded; None otherwise.
    """

    __slots__ = ("_newest", "_state", "epochs", "trace")

    def __init__(self) -> None:
        self._newest: Record | LocalEpoch | None = None
        # A single value, so that a thread that reads meanwhile counts each epoch exactly once.
        self._state = _State(None, ())
        self.epochs = 0
        self.trace: Trace | None = None

    def begin(self, record: Record | LocalEpoch, iterator: object) -> None:
        """Add the record of an epoch that begins, and its iterator."""
        past, recent = self._state
        self._end_abandoned(iterator)
        if len(recent) >= _MOST_RECENT:
            past = _sum(past, (other for other, _ in recent if other.is_over))
            recent = tuple(each for each in recent if not each[0].is_over)
        taken = [other.lane for other, _ in recent if not other.is_over]
        record.lane = next(lane for lane in itertools.count() if lane not in taken) if taken else 0
        self._state = _State(past, (*recent, (record, weakref.ref(iterator))))
        if self.trace is not None:
            record.trace_with(self.trace)
        self._newest = record
        self.epochs += 1

    def trace_with(self, trace: Trace | None) -> None:
        """Pass each call to a trace from now on. None stops that."""
        self._end_abandoned()
        self.trace = trace
        for record, _ in self._state.recent:
            if trace is None or not record.is_over:
                record.trace_with(trace, from_now=True)

    @staticmethod
    def traced(trace: Trace) -> tuple[Record | None, int]:
        """Return the sum of what a trace has recorded, and the number of epochs in it."""
        parts = [part for part in trace.parts if part.waits.count or part.iter_ns]
        if len(parts) == 1:
            return parts[0].copy(), 1
        return _sum(None, parts), len(parts)

    def newest(self) -> Record | None:
        """Return a snapshot of the newest epoch; None before the first."""
        self._end_abandoned()
        newest = self._newest
        return None if newest is None else newest.copy()

    def total(self) -> Record | None:
        """Return the sum of all epochs; None before the first."""
        self._end_abandoned()
        past, recent = self._state
        return _sum(past, (record for record, _ in recent))

    def _end_abandoned(self, again: object = None) -> None:
        """End the records whose iterators are garbage, or begin ``again``."""
        for record, owner in self._state.recent:
            if owner() in (None, again):
                record.end()


def _sum(past: Record | None, records: Iterable[Record | LocalEpoch]) -> Record | None:
    """Return the sum of the records; None if there is none."""
    total = None if past is None else past.copy()
    for later in (record.copy() for record in records):
        if total is None:
            begin_ns = later.first_ns
            total = Record(None, later.kind, later.worker_count, begin_ns=begin_ns, is_sum=True)
        total.merge(later)
    return total
