"""What is recorded of epochs: a tuple for each call of ``iter()`` and ``next()``.

The consumer's thread alone writes. Any thread may read: the sums are computed then. What a reader
needs at one moment is a single value, so that it counts each call and each epoch exactly once.
"""

import copy
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from shmloader.insight.measurements import Counts, Readings, core_time_of
from shmloader.insight.sums import ITER, Call, Sums, Totals

# With more calls than this, they are summed up, so that memory is bounded: a call takes half a
# kilobyte.
_MOST_CALLS = 1_000
# Summing up costs as much as several batches, so that only some epochs at once are.
_MOST_RECENT = 4


class Failures(Protocol):
    """A count of samples that failed."""

    total: int


class Record:
    """What was recorded of one epoch.

    Args:
        epoch: Number of the epoch.
        kind: What loads: "processes", "threads", "executor", "in-process", "torch" (its own
            iterator), or "other" (a loader that is not ours).
        worker_count: Number of workers.
        keeps_workers: Whether the workers persist after the epoch.
        in_order: Whether batches wait for earlier ones.
        counts: Counts of the engine; None without one.
        readings: Usage of the workers; None without workers of ours.
        failed: Count of the loader's samples that failed; None if none is kept.
        begin_ns: When the epoch began; None stands for now.

    Attributes:
        is_over: Whether the epoch has ended or was given up.
        lane: Number of the iterator among those at work at the same time; 0 for a single one.
        failures: Batches that raised.
        most_calls: How many calls are kept before they are summed up. A trace keeps all.
        calls: The sums of earlier calls (None before any), and the later calls.
    """

    __slots__ = (
        "_begun", "_final", "_first_ns", "_in_order", "_keeps_workers", "_sources", "_thread_id",
        "calls", "epoch", "failures", "is_over", "kind", "lane", "most_calls", "worker_count",
    )  # fmt: skip

    def __init__(
        self,
        epoch: int | None,
        kind: str,
        worker_count: int,
        *,
        keeps_workers: bool = False,
        in_order: bool = True,
        counts: Counts | None = None,
        readings: Readings | None = None,
        failed: Failures | None = None,
        begin_ns: int | None = None,
    ) -> None:
        self.epoch, self.kind, self.worker_count = epoch, kind, worker_count
        self._keeps_workers, self._in_order = keeps_workers, in_order
        self.lane = self.failures = 0
        self.is_over = False
        self.most_calls = _MOST_CALLS
        self._first_ns = time.monotonic_ns() if begin_ns is None else begin_ns
        self.calls: tuple[Sums | None, list[Call]] = (None, [])
        self._sources = (counts, readings, failed)
        self._final: Totals | None = None
        self._begun: Totals | None = None
        if kind != "in-process":  # such epochs may be many and short
            self._thread_id = threading.get_native_id()
            self._begun = self._read()

    def add(self, *call: Any) -> None:
        """Add a call: see :mod:`shmloader.insight.sums`."""
        calls = self.calls[1]
        calls.append(call)
        if len(calls) > self.most_calls:
            self.calls = (self._sums(*self.calls), [])

    def begin(self, draw_ns: int = 0) -> None:
        """Add the call of ``iter()``, which returns now, after ``draw_ns`` in the sampler."""
        self.add(self._first_ns, time.monotonic_ns(), draw_ns, None, ITER, 0)

    def end(self) -> None:
        """End the record: no batch follows. May be called again."""
        if not self.is_over:
            if self.kind != "in-process":
                self._final = self._read()
            self.is_over = True
            self._sources = (None, None, None)

    def totals(self) -> Totals:
        """Return what was recorded so far, with the workers' memory. Any thread may call it."""
        return self._totals(self._sums(*self.calls), self._first_ns, self._begun)

    def _sums(self, before: Sums | None, calls: Sequence[Call]) -> Sums:
        """Return the sums of the calls and of those before them."""
        sums = copy.deepcopy(before) or Sums(self._in_order, is_local=self.kind == "in-process")
        sums.add(list(calls))
        return sums

    def _totals(self, sums: Sums, first_ns: int, begun: Totals | None) -> Totals:
        """Return the totals of calls since ``first_ns``, and of what was read since ``begun``."""
        totals = sums.finish(first_ns)
        totals.merge(self._read(thoroughly=True))
        for name, before in begun.added.items() if begun is not None else ():
            if name in totals.added:
                totals.added[name] -= before
        totals.newest |= {
            "epoch": self.epoch,
            "kind": self.kind,
            "num_workers": self.worker_count,
            "persistent_workers": self._keeps_workers,
            "is_over": self.is_over,
        }
        return totals

    def _read(self, *, thoroughly: bool = False) -> Totals:
        """Return what was counted and used since the engine and the workers began.

        Args:
            thoroughly: Whether to measure the workers' memory as well.
        """
        counts, readings, failed = self._sources
        if self._final is not None:  # looked at last, since another thread may end the epoch
            return self._final
        totals = Totals()
        added, newest = totals.added, totals.newest
        added["failures"] = self.failures + (failed.total if failed is not None else 0)
        if self.kind == "in-process":
            return totals
        if counts is not None:
            for name in ("lent", "copied", "grown", "restarts"):
                added[name] = getattr(counts, name)
            totals.set_most(largest_bytes=counts.largest_bytes, slot_bytes=counts.most_bytes)
            newest |= {"slot_count": counts.slot_count, "share_bytes": counts.share_bytes}
        for worker_id, usage in enumerate(readings.read(thoroughly=thoroughly) if readings else ()):
            added[worker_id, "cpu"] = usage.cpu_ns
            if usage.stalled_ns is not None:
                added[worker_id, "stalled"] = usage.stalled_ns
            known = {"pid": usage.pid, "pss_bytes": usage.pss_bytes}
            newest |= {(worker_id, name): value for name, value in known.items() if value}
        added["process_cpu"] = time.process_time_ns()
        spent = core_time_of(self._thread_id)
        if spent is not None:
            added["consumer_cpu"], added["consumer_stalled"] = spent
        return totals


class Part:
    """The calls of an epoch from now on, for a trace. The record keeps them all until ``end``.

    Attributes:
        record: The record.
        calls: The calls, once the part has ended.
        totals: Their sums, once the part has ended.
    """

    calls: Sequence[Call]
    totals: Totals

    def __init__(self, record: Record) -> None:
        self.record = record
        record.most_calls = sys.maxsize
        self._before, self._calls = record.calls
        self._start = len(self._calls)
        is_whole = not self._start and self._before is None
        self._first_ns = record._first_ns if is_whole else time.monotonic_ns()
        self._begun = record._begun if is_whole else record._read()

    def end(self) -> None:
        """End the part: it gets no further call."""
        record = self.record
        self.calls = self._calls[self._start :]
        sums = record._sums(self._before, self._calls[: self._start])
        sums.clear()
        sums.add(self.calls)
        self.totals = record._totals(sums, self._first_ns, self._begun)
        record.most_calls = _MOST_CALLS


class Statistics:
    """The records of all epochs of a loader.

    The consumer's thread begins the epochs, and any thread may read.

    Attributes:
        epochs: Number of epochs begun.
        parts: What is traced, a part for each epoch; None while nothing is.
    """

    __slots__ = ("_newest", "_state", "epochs", "parts")

    def __init__(self) -> None:
        self._newest: Record | None = None
        # The sum of earlier epochs, and the newest ones and those that still run, with their
        # iterators.
        self._state: tuple[Totals | None, tuple[tuple[Record, weakref.ref[Any]], ...]] = (None, ())
        self.epochs = 0
        self.parts: list[Part] | None = None

    def begin(self, record: Record, iterator: object) -> None:
        """Add the record of an epoch that begins, and its iterator."""
        self._end_abandoned(iterator)
        past, recent = self._state
        if len(recent) >= _MOST_RECENT:
            past = sum_of(past, [other.totals() for other, _ in recent if other.is_over])
            recent = tuple(each for each in recent if not each[0].is_over)
        taken = [other.lane for other, _ in recent if not other.is_over]
        if taken:
            record.lane = next(lane for lane in itertools.count() if lane not in taken)
        self._state = (past, (*recent, (record, weakref.ref(iterator))))
        if self.parts is not None:
            self.parts.append(Part(record))
        self._newest = record
        self.epochs += 1

    def begin_trace(self) -> None:
        """Keep all calls from now on."""
        self._end_abandoned()
        self.parts = [Part(record) for record, _ in self._state[1] if not record.is_over]

    def end_trace(self) -> list[Part]:
        """Return what was traced."""
        parts, self.parts = self.parts or [], None
        for part in parts:
            part.end()
        return parts

    def newest(self) -> Totals | None:
        """Return the totals of the newest epoch; None before the first."""
        self._end_abandoned()
        return None if self._newest is None else self._newest.totals()

    def total(self) -> Totals | None:
        """Return the sum of all epochs; None before the first."""
        self._end_abandoned()
        past, recent = self._state
        return sum_of(past, [record.totals() for record, _ in recent]) if recent or past else None

    def _end_abandoned(self, again: object = None) -> None:
        """End the records whose iterators are garbage, or begin ``again``."""
        for record, owner in self._state[1]:
            if owner() in (None, again):
                record.end()


def sum_of(past: Totals | None, later: Sequence[Totals]) -> Totals:
    """Return the sum of earlier epochs and of later ones."""
    whole = copy.deepcopy(past) or Totals()
    for each in later:
        whole.merge(each)
    return whole
