"""The records of all epochs of a loader."""

import itertools
import weakref
from typing import Any, NamedTuple

from shmloader.insight.record import Record
from shmloader.insight.trace import Trace


class _State(NamedTuple):
    """The sum of the epochs that are over, and those that may still run, with their iterators."""

    past: Record | None
    open: tuple[tuple[Record, weakref.ref[Any]], ...]


class Statistics:
    """The records of all epochs of a loader.

    The consumer's thread begins the epochs, and any thread may read.

    Attributes:
        epochs: Number of epochs begun.
        trace: The trace that is being recorded; None otherwise.
    """

    def __init__(self) -> None:
        self._newest: Record | None = None
        # A single value, so that a thread that reads meanwhile counts each epoch exactly once.
        self._state = _State(None, ())
        self.epochs = 0
        self.trace: Trace | None = None

    def begin(self, record: Record, iterator: object) -> None:
        """Add the record of an epoch that begins, and its iterator."""
        past, still_open = self._state.past, []
        for other, owner in self._state.open:
            if other.is_over or owner() is None or owner() is iterator:
                other.end()
                past = _sum(past, other)
            else:
                still_open.append((other, owner))
        taken = {other.lane for other, _ in still_open}
        record.lane = next(lane for lane in itertools.count() if lane not in taken)
        self._state = _State(past, (*still_open, (record, weakref.ref(iterator))))
        if self.trace is not None:
            record.trace_with(self.trace)
        self._newest = record
        self.epochs += 1

    def trace_with(self, trace: Trace | None) -> None:
        """Pass each call to a trace from now on. None stops that."""
        self._end_abandoned()
        self.trace = trace
        for record, _ in self._state.open:
            if trace is None or not record.is_over:
                record.trace_with(trace, from_now=True)

    @staticmethod
    def traced(trace: Trace) -> tuple[Record | None, int]:
        """Return the sum of what a trace has recorded, and the number of epochs in it."""
        parts = [part for part in trace.parts if part.waits.count or part.iter_ns]
        if len(parts) == 1:
            return parts[0].copy(), 1
        total = None
        for part in parts:
            total = _sum(total, part)
        return total, len(parts)

    def newest(self) -> Record | None:
        """Return a snapshot of the newest epoch; None before the first."""
        self._end_abandoned()
        newest = self._newest
        return None if newest is None else newest.copy()

    def total(self) -> Record | None:
        """Return the sum of all epochs; None before the first."""
        self._end_abandoned()
        total, still_open = self._state
        for record, _ in still_open:
            total = _sum(total, record)
        return total

    def _end_abandoned(self) -> None:
        """End the records whose iterators are garbage."""
        for record, owner in self._state.open:
            if owner() is None:
                record.end()


def _sum(past: Record | None, record: Record) -> Record:
    later = record.copy()
    if past is None:
        past = Record(None, later.kind, later.worker_count, begin_ns=later.first_ns, is_sum=True)
        past.merge(later)
        return past
    summed = past.copy()
    summed.merge(later)
    return summed
