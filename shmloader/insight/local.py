"""The times of an epoch without workers, from which a record is made when somebody asks.

Many such epochs are short, and nobody asks: a loader for each client or task, with a few batches.
So an iterator only appends a tuple for each call of ``next()``. Where there are many calls, or a
trace is recorded, they are added to a record at once.
"""

import time
from typing import Any

from shmloader.insight.record import Record
from shmloader.insight.trace import Trace

#: As many calls as a short epoch has. More are summed up, so that memory is bounded.
_MOST_CALLS = 16


class LocalEpoch:
    """The times of one epoch that the consumer's thread loads.

    Written by the consumer's thread alone; any thread may read it.

    Attributes:
        is_over: Whether the epoch has ended or was given up.
        lane: See :class:`Record`.
    """

    __slots__ = (
        "_begin_ns",
        "_begun_ns",
        "_calls",
        "_epoch",
        "_failures",
        "_record",
        "is_over",
        "lane",
    )

    def __init__(self, epoch: int | None, begin_ns: int) -> None:
        """Begin the epoch of this number, at ``begin_ns``."""
        self._epoch = epoch
        self._begin_ns = self._begun_ns = begin_ns
        self._calls: list[tuple[Any, ...]] = []
        self._record: Record | None = None
        self.lane = self._failures = 0
        self.is_over = False

    def begun(self) -> None:
        """Note that ``iter()`` returns."""
        self._begun_ns = time.monotonic_ns()
        if self._record is not None:  # a trace is being recorded
            self._record.note_begun(0, self._begun_ns)

    def add(self, *call: Any) -> None:
        """Note a call of ``next()``.

        Args:
            call: The arguments of :meth:`Record.note_local_batch`, or those of
                :meth:`Record.note_wait` if the call returned no batch.
        """
        if self._record is not None:
            _add(self._record, call)
            return
        self._calls.append(call)
        if len(self._calls) > _MOST_CALLS:
            self._record = self._summed()

    def failed(self, count: int = 1) -> None:
        """Count batches that raised, and samples that failed."""
        self._failures += count
        if self._record is not None and self._record.traced is not None:
            self._record.traced.failures += count

    def end(self) -> None:
        """End the epoch: no batch follows. May be called again."""
        self.is_over = True
        if self._record is not None:
            self._record.end()

    def trace_with(self, trace: Trace | None, *, from_now: bool = False) -> None:
        """See :meth:`Record.trace_with`."""
        if self._record is None and trace is not None:
            self._record = self._summed()
        if self._record is not None:
            self._record.trace_with(trace, from_now=from_now)

    def copy(self) -> Record:
        """Return a snapshot."""
        made = self._summed() if self._record is None else self._record.copy()
        made.failures, made.is_over = self._failures, self.is_over
        return made

    def _summed(self) -> Record:
        """Return a record of the calls so far."""
        made = Record(self._epoch, "in-process", 0, begin_ns=self._begin_ns, is_sum=True)
        made.lane = self.lane
        if self._begun_ns != self._begin_ns:
            made.note_begun(0, self._begun_ns)
        for call in self._calls:
            _add(made, call)
        return made


def _add(record: Record, call: tuple[Any, ...]) -> None:
    add = record.note_wait if isinstance(call[-1], str) else record.note_local_batch
    add(*call)
