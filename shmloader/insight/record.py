"""What is recorded of an epoch: a tuple for each call of ``iter()`` and ``next()``.

The consumer's thread alone writes a record. Any thread may read it: the sums are computed then.
"""

import dataclasses
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from shmloader.insight.measurements import Counts, Readings, Usage, core_time_of
from shmloader.insight.sums import ITER, Call, Sums, WorkerSums, added

# With more calls than this, they are summed up, so that memory is bounded: a call takes half a
# kilobyte.
_MOST_CALLS = 1_000


class Failures(Protocol):
    """A count of samples that failed."""

    total: int


class ConsumerUsage(NamedTuple):
    """What the consumer has used, in ns.

    Attributes:
        process_cpu_ns: CPU time of all threads of its process.
        cpu_ns: CPU time of the thread that takes the batches; None if not known.
        stalled_ns: Time in which that thread could have run but no core was free; None if not
            known.
    """

    process_cpu_ns: int = 0
    cpu_ns: int | None = None
    stalled_ns: int | None = None

    def plus(self, other: "ConsumerUsage", sign: int = 1) -> "ConsumerUsage":
        """Return the sum of two usages, or with ``sign=-1`` the difference."""
        theirs = [None if value is None else sign * value for value in other]
        return ConsumerUsage(*map(added, self, theirs))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The counts and the usage at one moment.

    Attributes:
        counts: What the engine has counted; None without one.
        usage: The usage of each worker.
        failures: How many samples failed and batches raised.
        consumer: What the consumer has used.
    """

    counts: Counts | None = None
    usage: Sequence[Usage] = ()
    failures: int = 0
    consumer: ConsumerUsage = ConsumerUsage()  # noqa: RUF009 - it cannot change


_NOTHING_READ = Reading()
# The last is the native number of the consumer's thread; 0 if nothing is read.
_Sources = tuple[Counts | None, Readings | None, Failures | None, int]
_NO_SOURCES: _Sources = (None, None, None, 0)


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
        lane: Number of the iterator among those at work at the same time; 0 for a single one.
        first_ns: When the epoch began.
        failures: Batches that raised.
        begun: What was read at the beginning.
        most_calls: How many calls are kept before they are summed up. A trace keeps all.
        state: The sums of earlier calls, and the later calls. A single value, so that a thread that
            reads meanwhile counts each call exactly once.
    """

    __slots__ = (
        "_final", "_sources", "begun", "epoch", "failures", "first_ns", "keeps_workers", "kind",
        "lane", "most_calls", "state", "worker_count",
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
        self.keeps_workers = keeps_workers
        self.lane = self.failures = 0
        self.most_calls = _MOST_CALLS
        self.first_ns = time.monotonic_ns() if begin_ns is None else begin_ns
        self._final: Reading | None = None
        self._sources = _NO_SOURCES
        if kind != "in-process":  # such epochs may be many and short
            self._sources = (counts, readings, failed, threading.get_native_id())
        self.begun = self.read()
        self.state: tuple[Sums | None, list[Call]] = (
            None if in_order else Sums(in_order=False),
            [],
        )

    # On the consumer's thread ----------------------------------------------------------------

    def add(self, *call: Any) -> None:
        """Add a call: see :mod:`shmloader.insight.sums`."""
        calls = self.state[1]
        calls.append(call)
        if len(calls) > self.most_calls:
            self._sum_up()

    def begin(self, draw_ns: int = 0, ended_ns: int | None = None) -> None:
        """Note that ``iter()`` returns, after ``draw_ns`` in the sampler; None stands for now."""
        ended_ns = time.monotonic_ns() if ended_ns is None else ended_ns
        self.add(self.first_ns, ended_ns, draw_ns, None, ITER, 0)

    def end(self) -> None:
        """End the record: no batch follows. May be called again."""
        if self._final is None:
            self._final = self.read()
            self._sources = _NO_SOURCES

    def _sum_up(self) -> None:
        self.state = (self._sums(*self.state), [])

    @property
    def is_over(self) -> bool:
        """Whether the epoch has ended or was given up."""
        return self._final is not None

    # On any thread ---------------------------------------------------------------------------

    def _sums(self, before: Sums | None, calls: Sequence[Call]) -> Sums:
        """Return the sums of the calls and of those before them."""
        sums = before.copy() if before else Sums(is_local=self.kind == "in-process")
        sums.add(list(calls))
        return sums

    def read(self, *, thoroughly: bool = False) -> Reading:
        """Return the counts and the usage; ``thoroughly`` measures the workers' memory as well."""
        # Another thread may end the epoch meanwhile, which sets `_final` first.
        counts, readings, failed, thread_id = self._sources
        if self._final is not None:
            return self._final
        if not thread_id:
            return Reading(failures=self.failures) if self.failures else _NOTHING_READ
        return Reading(
            None if counts is None else dataclasses.replace(counts),
            () if readings is None else list(readings.read(thoroughly=thoroughly)),
            self.failures + (0 if failed is None else failed.total),
            ConsumerUsage(time.process_time_ns(), *core_time_of(thread_id) or ()),
        )

    @property
    def is_simple(self) -> bool:
        """Whether it has nothing but the calls of an epoch without workers."""
        return self.kind == "in-process" and not self.failures and self.state[0] is None

    def totals(self) -> "Totals":
        """Return what was recorded so far, with the workers' memory."""
        sums = self._sums(*self.state)
        return Totals.of(self, sums, self.first_ns, self.begun, self.read(thoroughly=True))


class Part:
    """The calls of an epoch from now on, for a trace. The record keeps them all until ``end``.

    Attributes:
        record: The record.
        calls: The calls, once the part has ended.
        totals: Their sums, once the part has ended.
    """

    calls: Sequence[Call]
    totals: "Totals"

    def __init__(self, record: Record) -> None:
        self.record = record
        record.most_calls = sys.maxsize
        self._before, self._calls = record.state
        self._start = len(self._calls)
        is_whole = not self._start and not (self._before and self._before.last_ns)
        self._first_ns = record.first_ns if is_whole else time.monotonic_ns()
        self._begun = record.begun if is_whole else record.read()

    def end(self) -> None:
        """End the part: it gets no further call."""
        record, start = self.record, self._start
        self.calls = self._calls[start:]
        earlier = record._sums(self._before, self._calls[:start])
        begun = Sums(in_order=earlier.in_order, is_local=earlier.is_local)
        for worker_id, worker in earlier.workers.items():
            begun.workers[worker_id] = WorkerSums(first_ns=worker.last_ns, last_ns=worker.last_ns)
        sums = record._sums(begun, self.calls)
        reading = record.read(thoroughly=True)
        self.totals = Totals.of(record, sums, self._first_ns, self._begun, reading)
        record.most_calls = _MOST_CALLS


@dataclasses.dataclass(slots=True)
class Totals:
    """The sums of an epoch, or of several, and what its engine, workers and consumer have used.

    Attributes:
        epoch: Number of the epoch; None for several.
        kind: What loads; see :class:`Record`.
        worker_count: Number of workers.
        keeps_workers: Whether the workers persist after the epoch.
        is_over: Whether the epoch has ended or was given up.
        elapsed_ns: From the beginning to the return of the last call.
        sums: The sums over the calls. The usage of workers is added to theirs.
        counts: What the engine has counted; None without one.
        failures: How many samples failed and batches raised.
        consumer: What the consumer has used.
    """

    epoch: int | None
    kind: str
    worker_count: int
    keeps_workers: bool
    is_over: bool
    elapsed_ns: int
    sums: Sums
    counts: Counts | None
    failures: int
    consumer: ConsumerUsage

    @classmethod
    def of(
        cls, record: Record, sums: Sums, first_ns: int, begun: Reading, reading: Reading
    ) -> "Totals":
        """Return the totals of calls since ``first_ns``, and of what was read since ``begun``."""
        counts = reading.counts
        if counts is not None and begun.counts is not None:
            counts = counts.since(begun.counts)
        sums.finish()
        for worker_id, now in enumerate(reading.usage):
            then = begun.usage[worker_id] if worker_id < len(begun.usage) else Usage()
            sums.workers.setdefault(worker_id, WorkerSums()).add_usage(now, then)
        return cls(
            record.epoch,
            record.kind,
            record.worker_count,
            record.keeps_workers,
            record.is_over,
            max(0, sums.last_ns - first_ns),
            sums,
            counts,
            reading.failures - begun.failures,
            reading.consumer.plus(begun.consumer, -1),
        )

    def merge(self, later: "Totals") -> None:
        """Add a later epoch's totals. The time between the two epochs is left out."""
        self.epoch, self.kind, self.worker_count = None, later.kind, later.worker_count
        self.keeps_workers = later.keeps_workers
        self.elapsed_ns += later.elapsed_ns
        self.sums.merge(later.sums)
        if self.counts is not None and later.counts is not None:
            self.counts = self.counts.and_then(later.counts)
        else:
            self.counts = later.counts or self.counts
        self.failures += later.failures
        self.consumer = self.consumer.plus(later.consumer)


def totals_of(records: list[Record]) -> list[Totals]:
    """Return the totals of epochs that are over; one for all that are simple, which may be many."""
    simple = [record for record in records if record.is_simple and record.state[1]]
    totals = [record.totals() for record in records if not record.is_simple]
    if simple:
        whole = simple[0].totals()
        for record in simple[1:]:
            calls = record.state[1]
            whole.sums.add(calls)
            whole.elapsed_ns += calls[-1][1] - record.first_ns
        totals.append(whole)
    return totals
