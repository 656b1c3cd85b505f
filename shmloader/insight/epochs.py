"""All epochs of a loader: those that are over, summed up, and those that are under way."""

import itertools
import weakref
from typing import Any, NamedTuple

from shmloader.insight.record import Record
from shmloader.insight.trace import Trace


class _State(NamedTuple):
    """Epochs that are over, summed up, and those that may not be, with their iterators."""

    past: Record | None
    open: tuple[tuple[Record, weakref.ref[Any]], ...]


class Statistics:
    """All epochs of a loader. The consumer's thread begins them, and any thread may ask."""

    def __init__(self) -> None:
        self._newest: Record | None = None
        # All in one, so that who asks meanwhile counts no epoch twice, and none not at all.
        self._state = _State(None, ())
        self.epochs = 0
        #: What every batch is told; see :attr:`Record.trace`.
        self.trace: Trace | None = None

    def begin(self, record: Record, iterator: object) -> None:
        """An epoch has begun."""
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
        record.trace = self.trace
        self._newest = record
        self.epochs += 1

    def trace_with(self, trace: Trace | None) -> None:
        """Tell a trace of every batch from now on, or, with None, none any more."""
        self.trace = trace
        for record, _ in self._state.open:
            record.trace = trace

    def newest(self) -> Record | None:
        """The newest epoch, as it is now; None before the first."""
        self._end_what_is_gone()
        newest = self._newest
        return None if newest is None else newest.copy()

    def total(self) -> Record | None:
        """All epochs; None before the first."""
        self._end_what_is_gone()
        total, still_open = self._state
        for record, _ in still_open:
            total = _sum(total, record)
        return total

    def _end_what_is_gone(self) -> None:
        """An epoch whose iterator is garbage was given up."""
        for record, owner in self._state.open:
            if owner() is None:
                record.end()


def _sum(past: Record | None, record: Record) -> Record:
    later = record.copy()
    if past is None:
        past = Record(None, later.kind, later.worker_count, begin_ns=later.first_ns)
        past.merge(later)
        return past
    summed = past.copy()
    summed.merge(later)
    return summed
