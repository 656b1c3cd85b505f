"""The records of all epochs of a loader."""

import dataclasses
import itertools
import weakref
from typing import Any

from shmloader.insight.record import Part, Record, Totals, totals_of
from shmloader.insight.trace import Trace

# Summing up costs as much as several batches, so that only some epochs at once are.
_MOST_RECENT = 4

_Recent = tuple[tuple[Record, weakref.ref[Any]], ...]


class Statistics:
    """The records of all epochs of a loader.

    The consumer's thread begins the epochs, and any thread may read.

    Attributes:
        epochs: Number of epochs begun.
        trace: The trace that is being recorded; None otherwise.
    """

    __slots__ = ("_newest", "_state", "epochs", "trace")

    def __init__(self) -> None:
        self._newest: Record | None = None
        # The sum of earlier epochs, and the newest ones and those that still run, with their
        # iterators. A single value, so that a thread that reads meanwhile counts each epoch
        # exactly once.
        self._state: tuple[Totals | None, _Recent] = (None, ())
        self.epochs = 0
        self.trace: Trace | None = None

    def begin(self, record: Record, iterator: object) -> None:
        """Add the record of an epoch that begins, and its iterator."""
        past, recent = self._state
        if recent:
            self._end_abandoned(iterator)
            if len(recent) >= _MOST_RECENT:
                past = _sum(past, totals_of([other for other, _ in recent if other.is_over]))
                recent = tuple(each for each in recent if not each[0].is_over)
            taken = [other.lane for other, _ in recent if not other.is_over]
            if taken:
                record.lane = next(lane for lane in itertools.count() if lane not in taken)
        self._state = (past, (*recent, (record, weakref.ref(iterator))))
        if self.trace is not None:
            self.trace.parts.append(Part(record))
        self._newest = record
        self.epochs += 1

    def begin_trace(self) -> Trace:
        """Record calls from now on."""
        self._end_abandoned()
        parts = [Part(record) for record, _ in self._state[1] if not record.is_over]
        self.trace = Trace(parts)
        return self.trace

    def end_trace(self) -> tuple[Totals | None, int]:
        """Return the sum of what was recorded, and the number of epochs in it."""
        trace, self.trace = self.trace, None
        totals = []
        for part in () if trace is None else trace.parts:
            part.end()
            if part.calls:
                totals.append(part.totals)
        return _sum(None, totals), len(totals)

    def newest(self) -> Totals | None:
        """Return the totals of the newest epoch; None before the first."""
        self._end_abandoned()
        return None if self._newest is None else self._newest.totals()

    def total(self) -> Totals | None:
        """Return the sum of all epochs; None before the first."""
        self._end_abandoned()
        past, recent = self._state
        found = _sum(past, [record.totals() for record, _ in recent])
        if found is not None:
            found.epoch = None
        return found

    def _end_abandoned(self, again: object = None) -> None:
        """End the records whose iterators are garbage, or begin ``again``."""
        for record, owner in self._state[1]:
            if owner() in (None, again):
                record.end()


def _sum(past: Totals | None, later: list[Totals]) -> Totals | None:
    """Return the sum of earlier epochs and later ones, whose totals are used up; None if empty."""
    if past is not None:
        whole = dataclasses.replace(past, sums=past.sums.copy())
    elif later:
        whole, *later = later
    else:
        return None
    for each in later:
        whole.merge(each)
    return whole
