"""The sums over the batches of an epoch, or of several.

A record is written by the consumer's thread alone, with a few additions per batch. Any thread may
read it, and may see a batch half added.

The module is long because every sum appears three times in it: where a batch is added, where a
record is copied, and where two are added.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from shmloader.insight.core_time import ConsumerMeter, ConsumerUsage
from shmloader.insight.histogram import Histogram
from shmloader.insight.measurements import (
    PLACES,
    STAGES,
    BatchTimes,
    Counts,
    Readings,
    Usage,
)
from shmloader.insight.trace import Trace, Traced

# The number of waits that are remembered, to tell whether a worker was idle meanwhile. A worker is
# idle for no longer than the consumer takes for a window of batches.
_WAITS_KEPT = 512


class Failures(Protocol):
    """A count of samples that failed."""

    total: int


@dataclasses.dataclass(slots=True)
class WorkerSums:
    """Sums over the batches of one worker that were delivered.

    ``idle_ns`` and ``idle_awaited_ns`` are about the time between the worker's batches, so they
    leave out its start and the epoch's end, when there is nothing left to load. Like ``span_ns``,
    ``idle_ns`` is computed when a record is copied or added to another.
    """

    batches: int = 0
    busy_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    idle_ns: int = 0
    idle_awaited_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    span_ns: int = 0
    cpu_ns: int = 0
    stalled_ns: int | None = None
    pss_bytes: int | None = None
    pid: int | None = None


class Record:
    """The sums of one epoch, or of several.

    Args:
        epoch: Number of the epoch; None for several.
        kind: What loads: "processes", "threads", "executor", "in-process", "torch" (its own
            iterator), or "other" (a loader that is not ours).
        worker_count: Number of workers.
        keeps_workers: Whether the workers persist after the epoch.
        in_order: Whether batches wait for earlier ones.
        counts: Counts of the engine; None without one.
        readings: Usage of the workers; None without workers of ours.
        failed: Count of the loader's samples that failed; None if none is kept.
        begin_ns: When the epoch began; None stands for now.
        is_sum: Whether it only takes the sums of other records, and measures nothing itself.

    Attributes:
        lane: Number of the iterator among those at work at the same time; 0 for a single one.
        is_over: Whether the epoch has ended or was given up.
        traced: What was noted since a trace began; None while none is being recorded.
        first_ns: When the epoch began.
        last_ns: When ``iter()`` or ``next()`` returned last.
        iter_ns: Time until the iterator was made.
        startup_ns: ``iter_ns`` and the wait for the first batch.
        waited: Where the next batch was while the consumer waited, in ns. :meth:`places` adds what
            it can derive from other sums.
        failures: Batches that raised, and once the epoch is over also samples that failed.
    """

    __slots__ = (
        "_consumer", "_counts_begun", "_failed", "_failed_before", "_final", "_in_order",
        "_is_part", "_meter", "_readings", "_trace", "_turn_ns", "_usage_begun",
        "_waited_until_ns", "_waits_kept", "batches", "counts", "epoch", "failures",
        "first_ns", "is_over", "iter_ns", "keeps_workers", "kind", "lane", "last_ns",
        "loads", "nbytes", "samples", "stages", "startup_ns", "traced", "waited", "waits",
        "worker_count", "workers",
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
        is_sum: bool = False,
    ) -> None:
        self.epoch = epoch
        self.kind = kind
        self.worker_count = worker_count
        self.keeps_workers = keeps_workers
        self.lane = 0
        self.is_over = False
        self.traced: Record | None = None
        self._trace: Trace | None = None
        self._is_part = False
        self._in_order = in_order
        self.counts = counts
        self._counts_begun = None if counts is None else dataclasses.replace(counts)
        self._readings = readings
        begun = () if readings is None else readings.read(thoroughly=False)
        self._usage_begun = list(begun)
        self._final: tuple[Counts | None, Sequence[Usage]] | None = None
        self._meter = None if is_sum else ConsumerMeter()
        self._consumer = ConsumerUsage()
        self._failed = failed
        self._failed_before = 0 if failed is None else failed.total
        self.first_ns = self.last_ns = time.monotonic_ns() if begin_ns is None else begin_ns
        self.iter_ns = self.startup_ns = 0
        self.batches = self.samples = self.nbytes = self.failures = 0
        self.waits = Histogram()
        self.loads = Histogram()
        self.stages = dict.fromkeys(STAGES, 0)
        self.waited = dict.fromkeys(PLACES, 0)
        # The last waits for batches that were not loaded yet: from when until when.
        self._waits_kept: collections.deque[tuple[int, int]] | None = None
        self._waited_until_ns = 0  # the end of the last of them
        self.workers: dict[int, WorkerSums] = {}
        self._turn_ns = 0

    # On the consumer's thread ----------------------------------------------------------------

    def trace_with(self, trace: Trace | None, *, from_now: bool = False) -> None:
        """Pass each call to a trace from now on, and sum the calls up separately. None stops that.

        Args:
            trace: The trace, or None.
            from_now: Whether the epoch began earlier, so that the trace has only a part of it.
        """
        self._trace = trace
        if trace is None:
            if self.traced is not None:
                self.traced.end()
                self.traced.is_over = self.is_over
            self.traced = None
            return
        self.traced = Record(
            self.epoch,
            self.kind,
            self.worker_count,
            keeps_workers=self.keeps_workers,
            in_order=self._in_order,
            counts=self.counts,
            readings=self._readings,
            failed=self._failed,
            begin_ns=None if from_now else self.first_ns,
        )
        self.traced._is_part = from_now
        if from_now:
            for worker_id, sums in self.workers.items():
                self.traced.workers[worker_id] = WorkerSums(
                    first_ns=sums.last_ns, last_ns=sums.last_ns
                )
        trace.parts.append(self.traced)

    def note_begun(self, draw_ns: int = 0, ended_ns: int | None = None) -> None:
        """Note that ``iter()`` returns, after ``draw_ns`` in the sampler; None stands for now."""
        self._add_begun(time.monotonic_ns() if ended_ns is None else ended_ns, draw_ns)
        if self._trace is not None and self.traced is not None:
            begun = Traced(self.epoch, self.first_ns, self.last_ns, lane=self.lane, name="iter()")
            self._trace.note(begun)
            self.traced._add_begun(self.last_ns, draw_ns)

    def _add_begun(self, ended_ns: int, draw_ns: int) -> None:
        self.last_ns = ended_ns
        self.iter_ns = ended_ns - self.first_ns
        self.waited["draw"] += draw_ns
        self.waited["start"] += self.iter_ns - draw_ns

    def note_wait(self, began_ns: int, ended_ns: int, place: str = "other") -> None:
        """Note a call of ``next()`` whose batch, if any, has no times of its own.

        Args:
            began_ns: When it was called.
            ended_ns: When it returned or raised.
            place: One of :data:`PLACES`: where the next batch was during the call.
        """
        self.waited[place] += ended_ns - began_ns
        if self._trace is not None and self.traced is not None:
            self._trace.note(Traced(self.epoch, began_ns, ended_ns, lane=self.lane))
            self.traced.note_wait(began_ns, ended_ns, place)
        self._add_wait(began_ns, ended_ns)

    def _add_wait(self, began_ns: int, ended_ns: int) -> None:
        self.last_ns = ended_ns
        waits = self.waits
        waits.note(ended_ns - began_ns)
        if waits.count == 1 and not self._is_part:
            self.startup_ns = self.iter_ns + ended_ns - began_ns

    def note_batch(  # noqa: PLR0915 - each call of a part would cost 0.1 µs a batch
        self,
        times: BatchTimes,
        asked_ns: int,
        taken_ns: int,
        stage: tuple[str, int, int] | None,
        draw_ns: int = 0,
    ) -> None:
        """Note a batch that an engine delivered.

        Args:
            times: The times of the batch.
            asked_ns: When the consumer asked for it.
            taken_ns: When the consumer had it.
            stage: Name of the stage after the engine, and when that began and ended; None without
                such a stage.
            draw_ns: How much of the call of ``next()`` was spent in the sampler.
        """
        worker_id, offered_ns, sent_ns, work, looked_ns, seen_ns, handed_ns, nbytes, _ = times
        began_ns, fetch_ns, collate_ns, encode_ns, sample_count = work
        busy_ns = fetch_ns + collate_ns + encode_ns
        end_ns = began_ns + busy_ns
        late_ns = seen_ns - (looked_ns if looked_ns > end_ns else end_ns)  # noqa: FURB136 - faster
        here_ns = end_ns + late_ns
        turn_ns = here_ns
        if self._in_order and self._turn_ns > here_ns:
            turn_ns = self._turn_ns
        self._turn_ns = turn_ns
        sums = self.stages
        sums["slot"] += sent_ns - offered_ns
        if began_ns > sent_ns:
            sums["queue"] += began_ns - sent_ns
        sums["fetch"] += fetch_ns
        sums["collate"] += collate_ns
        sums["encode"] += encode_ns
        sums["transport"] += late_ns
        sums["reorder"] += turn_ns - here_ns
        ready_ns = handed_ns - turn_ns if handed_ns > turn_ns else 0
        if stage is not None:
            name, stage_began_ns, stage_ended_ns = stage
            sums[name] += stage_ended_ns - stage_began_ns
            sums["build"] += stage_began_ns - handed_ns
            if asked_ns > stage_ended_ns:
                ready_ns += asked_ns - stage_ended_ns
        else:
            sums["build"] += taken_ns - handed_ns
        sums["ready"] += ready_ns
        self.loads.note(busy_ns)
        self.batches += 1
        self.samples += sample_count
        self.nbytes += nbytes
        worker = self.workers.get(worker_id)
        is_first = worker is None
        if worker is None:
            worker = self.workers[worker_id] = WorkerSums(first_ns=began_ns, last_ns=began_ns)
        # The wait has three parts: until the batch was loaded, then until the engine noticed that,
        # and the rest, in which it is built, pinned or copied, and another batch is drawn.
        at_ns = asked_ns
        if end_ns > asked_ns:
            self._note_awaited(times, asked_ns, end_ns, is_first=is_first)
            at_ns = end_ns
        waited = self.waited
        if handed_ns > at_ns:
            waited["transport"] += handed_ns - at_ns
            at_ns = handed_ns
        if stage is not None and stage_ended_ns > at_ns:
            if name != "build":
                waited[name] += stage_ended_ns - max(stage_began_ns, at_ns)
            at_ns = stage_ended_ns
        # The consumer may also have drawn before the batch was here.
        left_ns = taken_ns - at_ns
        waited["draw"] += draw_ns if draw_ns < left_ns else left_ns  # noqa: FURB136 - faster
        if self._waited_until_ns > worker.last_ns:
            worker.idle_awaited_ns += self._awaited_ns(worker.last_ns, began_ns)
        worker.last_ns = end_ns
        worker.batches += 1
        worker.busy_ns += busy_ns
        worker.fetch_ns += fetch_ns
        worker.collate_ns += collate_ns
        self._add_wait(asked_ns, taken_ns)
        if self._trace is not None and self.traced is not None:
            self._trace.note(Traced(self.epoch, asked_ns, taken_ns, times, stage, lane=self.lane))
            self.traced.note_batch(times, asked_ns, taken_ns, stage, draw_ns)

    def _note_awaited(
        self, times: BatchTimes, asked_ns: int, end_ns: int, *, is_first: bool
    ) -> None:
        """Note a wait for a batch that was not loaded yet, up to the end of its loading.

        Args:
            times: The times of the batch.
            asked_ns: When the consumer asked for it.
            end_ns: When it was loaded.
            is_first: Whether it is its worker's first batch of the epoch.
        """
        waited, at_ns, sent_ns = self.waited, asked_ns, times.sent_ns
        began_ns, fetch_ns, collate_ns, _, _ = times.work
        if began_ns > at_ns:
            if is_first:
                waited["start"] += began_ns - at_ns
                asked_ns = began_ns
            elif sent_ns > at_ns:
                waited["send"] += sent_ns - at_ns
                waited["queue"] += began_ns - sent_ns
            else:
                waited["queue"] += began_ns - at_ns
            at_ns = began_ns
        fetched_ns = began_ns + fetch_ns
        if fetched_ns > at_ns:
            waited["fetch"] += fetched_ns - at_ns
            at_ns = fetched_ns
        collated_ns = fetched_ns + collate_ns
        if collated_ns > at_ns:
            waited["collate"] += collated_ns - at_ns
            at_ns = collated_ns
        waited["encode"] += end_ns - at_ns
        if self._waits_kept is None:
            self._waits_kept = collections.deque(maxlen=_WAITS_KEPT)
        self._waits_kept.append((asked_ns, end_ns))
        self._waited_until_ns = end_ns

    def _awaited_ns(self, began_ns: int, ended_ns: int) -> int:
        """Return for how long of a span of time the consumer waited for a batch to be loaded."""
        awaited_ns = 0
        for since_ns, until_ns in reversed(self._waits_kept or ()):
            if until_ns <= began_ns:
                break
            awaited_ns += max(0, min(until_ns, ended_ns) - max(since_ns, began_ns))
        return awaited_ns

    def note_local_batch(
        self,
        work: tuple[int, int, int, int, int],
        asked_ns: int,
        taken_ns: int,
        nbytes: int,
        stage: str,
        draw_ns: int = 0,
    ) -> None:
        """Note a batch that the consumer's thread loaded.

        Args:
            work: The batch's times: the fields of
                :class:`~shmloader.insight.measurements.WorkTimes`, but with the time in ``stage``
                as ``encode_ns``.
            asked_ns: When ``next()`` was called.
            taken_ns: When ``next()`` returned.
            nbytes: Bytes that the batch takes.
            stage: Name of the stage after collate.
            draw_ns: How much of the call of ``next()`` was spent in the sampler.
        """
        self._add_wait(asked_ns, taken_ns)
        if self._trace is not None and self.traced is not None:
            here = (work, stage)
            self._trace.note(Traced(self.epoch, asked_ns, taken_ns, here=here, lane=self.lane))
            self.traced.note_local_batch(work, asked_ns, taken_ns, nbytes, stage, draw_ns)
        _, fetch_ns, collate_ns, encode_ns, sample_count = work
        sums = self.stages
        sums["fetch"] += fetch_ns
        sums["collate"] += collate_ns
        sums[stage] += encode_ns
        self.waited["draw"] += draw_ns
        self.loads.note(fetch_ns + collate_ns)
        self.batches += 1
        self.samples += sample_count
        self.nbytes += nbytes

    def end(self) -> None:
        """End the record: no batch follows. May be called again."""
        if not self.is_over:
            self.is_over = True
            if self.traced is not None:
                self.traced.end()
            self._final = self.engine_counts(), self._usage(thoroughly=False)
            self._consumer = self.consumer()
            self._meter = None
            failed, self._failed = self.failure_count(), None
            self.failures = failed
            self.counts = self._readings = None

    # On any thread ---------------------------------------------------------------------------

    def failure_count(self) -> int:
        """Return how many samples failed and batches raised."""
        failures, failed = self.failures, self._failed
        return failures + (0 if failed is None else failed.total - self._failed_before)

    def consumer(self) -> ConsumerUsage:
        """Return what the consumer has used."""
        meter = self._meter  # read first, as in engine_counts()
        return self._consumer if meter is None else meter.read()

    def places(self) -> dict[str, int]:
        """Return where the next batch was while the consumer waited, in ns; see :data:`PLACES`."""
        waited = dict(self.waited)
        if self.kind == "in-process":  # the consumer waits for each stage
            for name in ("fetch", "collate", "pin", "device"):
                waited[name] += self.stages[name]
        # What is left was spent on building and handing over.
        waited["build"] = max(0, self.iter_ns + self.waits.total_ns - sum(waited.values()))
        return waited

    def engine_counts(self) -> Counts | None:
        """Return what the engine has counted in this epoch; None without an engine."""
        counts = self.counts  # read first: another thread may end the epoch, which removes it
        if self._final is not None:
            return self._final[0]
        if counts is None or self._counts_begun is None:
            return None
        return counts.since(self._counts_begun)

    def _usage(self, *, thoroughly: bool) -> Sequence[Usage]:
        readings = self._readings
        if self._final is not None:
            return self._final[1]
        return () if readings is None else readings.read(thoroughly=thoroughly)

    def copy(self) -> "Record":
        """Return a snapshot, which includes the workers' usage."""
        made = Record(
            self.epoch,
            self.kind,
            self.worker_count,
            keeps_workers=self.keeps_workers,
            in_order=self._in_order,
            begin_ns=self.first_ns,
            is_sum=True,
        )
        made.last_ns = self.last_ns
        made.is_over = self.is_over
        made._add_sums(self)
        made._final = self.engine_counts(), ()
        made._take_usage(self._usage(thoroughly=True), self._usage_begun)
        return made

    def _take_usage(self, usage: Sequence[Usage], begun: Sequence[Usage]) -> None:
        for worker_id, now in enumerate(usage):
            then = begun[worker_id] if worker_id < len(begun) else Usage()
            sums = self.workers.setdefault(worker_id, WorkerSums())
            sums.cpu_ns += now.cpu_ns - then.cpu_ns
            if now.stalled_ns is not None:
                sums.stalled_ns = now.stalled_ns - (then.stalled_ns or 0)
            sums.pss_bytes, sums.pid = now.pss_bytes, now.pid

    def _add_sums(self, other: "Record") -> None:
        self._consumer = self._consumer.and_then(other.consumer())
        self.iter_ns += other.iter_ns
        self.startup_ns += other.startup_ns
        self.batches += other.batches
        self.samples += other.samples
        self.nbytes += other.nbytes
        self.failures += other.failure_count()
        self.waits.add(other.waits)
        self.loads.add(other.loads)
        for name, duration_ns in other.stages.items():
            self.stages[name] += duration_ns
        for name, duration_ns in other.waited.items():
            self.waited[name] += duration_ns
        for worker_id, theirs in list(other.workers.items()):
            ours = self.workers.setdefault(worker_id, WorkerSums())
            ours.batches += theirs.batches
            ours.busy_ns += theirs.busy_ns
            ours.fetch_ns += theirs.fetch_ns
            ours.collate_ns += theirs.collate_ns
            ours.idle_ns += theirs.idle_ns
            ours.idle_awaited_ns += theirs.idle_awaited_ns
            ours.span_ns += theirs.span_ns
            if theirs.first_ns:
                ours.span_ns += max(0, other.last_ns - theirs.first_ns)
                ours.idle_ns += max(0, theirs.last_ns - theirs.first_ns - theirs.busy_ns)
            ours.cpu_ns += theirs.cpu_ns
            if theirs.stalled_ns is not None:
                ours.stalled_ns = (ours.stalled_ns or 0) + theirs.stalled_ns
            ours.pss_bytes = theirs.pss_bytes or ours.pss_bytes
            ours.pid = theirs.pid or ours.pid

    def merge(self, later: "Record") -> None:
        """Add a copy of a later epoch's record."""
        self._add_sums(later)
        self.kind, self.worker_count = later.kind, later.worker_count
        self.keeps_workers = later.keeps_workers
        # The time between two epochs is left out: the loader may have no part in it.
        self.last_ns += later.last_ns - later.first_ns
        ours, theirs = self.engine_counts(), later.engine_counts()
        both = theirs if ours is None else (ours if theirs is None else ours.and_then(theirs))
        self._final = both, ()
