"""What is added up of an epoch's batches; and such sums, added.

Written by the consumer's thread alone, a few additions a batch; read by any thread, which may see
a batch half added.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from shmloader.insight.histogram import Histogram
from shmloader.insight.readings import Readings, Usage
from shmloader.insight.times import STAGES, BatchTimes, WorkTimes
from shmloader.insight.trace import Trace, Traced


@dataclasses.dataclass(slots=True)
class Counts:
    """What an engine counts since its start; it alone writes.

    Attributes:
        lent: Batches that were lent.
        copied: Batches that could have been lent, and were copied out.
        grown: How often a slot took more memory than it had.
        restarts: Workers that were replaced.
        slot_count: Slots there may be.
        slot_bytes: Bytes of memory that all slots take now.
        most_bytes: The most that they took together.
        largest_bytes: The most that a batch has taken of a slot.
        share_bytes: The most that a slot may take; 0 for no such limit.
    """

    lent: int = 0
    copied: int = 0
    grown: int = 0
    restarts: int = 0
    slot_count: int = 0
    slot_bytes: int = 0
    most_bytes: int = 0
    largest_bytes: int = 0
    share_bytes: int = 0

    def since(self, begun: "Counts") -> "Counts":
        """What has been counted since a copy of this was made."""
        return dataclasses.replace(
            self,
            lent=self.lent - begun.lent,
            copied=self.copied - begun.copied,
            grown=self.grown - begun.grown,
            restarts=self.restarts - begun.restarts,
        )

    def and_then(self, other: "Counts") -> "Counts":
        """What is counted in this and in a later one."""
        return dataclasses.replace(
            other,
            lent=self.lent + other.lent,
            copied=self.copied + other.copied,
            grown=self.grown + other.grown,
            restarts=self.restarts + other.restarts,
            largest_bytes=max(self.largest_bytes, other.largest_bytes),
            most_bytes=max(self.most_bytes, other.most_bytes),
        )


class Failures(Protocol):
    """Counts samples that failed."""

    total: int


@dataclasses.dataclass(slots=True)
class WorkerSums:
    """Of one worker's batches that were handed over."""

    batches: int = 0
    busy_ns: int = 0
    fetch_ns: int = 0
    collate_ns: int = 0
    first_ns: int = 0
    span_ns: int = 0
    cpu_ns: int = 0
    stalled_ns: int | None = None
    pss_bytes: int | None = None
    pid: int | None = None


class Record:
    """An epoch, or several.

    Attributes:
        epoch: Its number; None for several.
        kind: What loads: "processes", "threads", "in-process", "torch" (its own iterator), or
            "other" (a loader that is not ours).
        worker_count: How many workers.
        keeps_workers: Whether the workers persist after the epoch.
        lane: Which of the iterators that are at work at a time: 0, where there is but one.
        is_over: Whether the epoch has been given up or come to its end.
        trace: What every batch is told, while a trace is recorded.
    """

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
        self.epoch = epoch
        self.kind = kind
        self.worker_count = worker_count
        self.keeps_workers = keeps_workers
        self.lane = 0
        self.is_over = False
        self.trace: Trace | None = None
        self._in_order = in_order
        self.counts = counts
        self._counts_begun = None if counts is None else dataclasses.replace(counts)
        self._readings = readings
        begun = () if readings is None else readings.read(thoroughly=False)
        self._usage_begun = list(begun)
        self._final: tuple[Counts | None, Sequence[Usage]] | None = None
        self._failed = failed
        self._failed_before = 0 if failed is None else failed.total
        self.first_ns = self.last_ns = time.monotonic_ns() if begin_ns is None else begin_ns
        #: Until the iterator was there.
        self.iter_ns = 0
        #: That, and the wait for the first batch.
        self.startup_ns = 0
        self.batches = self.samples = self.nbytes = 0
        #: Batches that raised, and samples that failed of an epoch that is over.
        self.failures = 0
        self.waits = Histogram()
        self.loads = Histogram()
        self.stages = dict.fromkeys(STAGES, 0)
        self.workers: dict[int, WorkerSums] = {}
        self._turn_ns = 0

    # On the consumer's thread ----------------------------------------------------------------

    def begun(self) -> None:
        """The iterator is there."""
        self.last_ns = time.monotonic_ns()
        self.iter_ns = self.last_ns - self.first_ns
        if self.trace is not None:
            begun = Traced(self.epoch, self.first_ns, self.last_ns, lane=self.lane, name="iter()")
            self.trace.note(begun)

    def waited(self, began_ns: int, ended_ns: int) -> None:
        """``next()`` has given no batch that is noted by itself."""
        if self.trace is not None:
            self.trace.note(Traced(self.epoch, began_ns, ended_ns, lane=self.lane))
        self._waited(began_ns, ended_ns)

    def _waited(self, began_ns: int, ended_ns: int) -> None:
        self.last_ns = ended_ns
        self.waits.note(ended_ns - began_ns)
        if self.waits.count == 1:
            self.startup_ns = self.iter_ns + ended_ns - began_ns

    def handed(
        self,
        times: BatchTimes,
        asked_ns: int,
        taken_ns: int,
        stage: tuple[str, int, int] | None,
    ) -> None:
        """An engine has handed over a batch.

        Args:
            times: What is known of it.
            asked_ns: When the consumer asked for it.
            taken_ns: When it had it.
            stage: A name, and when that stage began and ended; None if there is none.
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
        if worker is None:
            worker = self.workers[worker_id] = WorkerSums(first_ns=began_ns)
        worker.batches += 1
        worker.busy_ns += busy_ns
        worker.fetch_ns += fetch_ns
        worker.collate_ns += collate_ns
        self._waited(asked_ns, taken_ns)
        if self.trace is not None:
            self.trace.note(Traced(self.epoch, asked_ns, taken_ns, times, stage, lane=self.lane))

    def loaded_here(
        self, work: WorkTimes, asked_ns: int, taken_ns: int, nbytes: int, stage: str
    ) -> None:
        """The consumer's thread has loaded a batch; ``encode_ns`` is of the stage that is named."""
        self._waited(asked_ns, taken_ns)
        if self.trace is not None:
            here = (work, stage)
            self.trace.note(Traced(self.epoch, asked_ns, taken_ns, here=here, lane=self.lane))
        self.stages["fetch"] += work.fetch_ns
        self.stages["collate"] += work.collate_ns
        self.stages[stage] += work.encode_ns
        self.loads.note(work.fetch_ns + work.collate_ns)
        self.batches += 1
        self.samples += work.sample_count
        self.nbytes += nbytes

    def end(self) -> None:
        """Nothing more comes. May be called again."""
        if not self.is_over:
            self.is_over = True
            self._final = self.counted(), self._usage(thoroughly=False)
            failed, self._failed = self.failed(), None
            self.failures = failed
            self.counts = self._readings = None

    # On any thread ---------------------------------------------------------------------------

    def failed(self) -> int:
        """Samples that failed, and batches that raised."""
        failures, failed = self.failures, self._failed
        return failures + (0 if failed is None else failed.total - self._failed_before)

    def counted(self) -> Counts | None:
        """What the engine has counted in this epoch."""
        counts = self.counts  # before: it goes when the epoch ends, on another thread
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
        """What it is now, workers' usage included, in memory of its own."""
        made = Record(
            self.epoch,
            self.kind,
            self.worker_count,
            keeps_workers=self.keeps_workers,
            in_order=self._in_order,
            begin_ns=self.first_ns,
        )
        made.last_ns = self.last_ns
        made.is_over = self.is_over
        made._add_sums(self)
        made._final = self.counted(), ()
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
        self.iter_ns += other.iter_ns
        self.startup_ns += other.startup_ns
        self.batches += other.batches
        self.samples += other.samples
        self.nbytes += other.nbytes
        self.failures += other.failed()
        self.waits.add(other.waits)
        self.loads.add(other.loads)
        for name, duration_ns in other.stages.items():
            self.stages[name] += duration_ns
        for worker_id, theirs in list(other.workers.items()):
            ours = self.workers.setdefault(worker_id, WorkerSums())
            ours.batches += theirs.batches
            ours.busy_ns += theirs.busy_ns
            ours.fetch_ns += theirs.fetch_ns
            ours.collate_ns += theirs.collate_ns
            ours.span_ns += theirs.span_ns
            if theirs.first_ns:
                ours.span_ns += max(0, other.last_ns - theirs.first_ns)
            ours.cpu_ns += theirs.cpu_ns
            if theirs.stalled_ns is not None:
                ours.stalled_ns = (ours.stalled_ns or 0) + theirs.stalled_ns
            ours.pss_bytes = theirs.pss_bytes or ours.pss_bytes
            ours.pid = theirs.pid or ours.pid

    def merge(self, later: "Record") -> None:
        """Add a further epoch, a copy."""
        self._add_sums(later)
        self.kind, self.worker_count = later.kind, later.worker_count
        self.keeps_workers = later.keeps_workers
        # Of the time between two epochs nobody knows whether the loader was to blame.
        self.last_ns += later.last_ns - later.first_ns
        ours, theirs = self.counted(), later.counted()
        both = theirs if ours is None else (ours if theirs is None else ours.and_then(theirs))
        self._final = both, ()
