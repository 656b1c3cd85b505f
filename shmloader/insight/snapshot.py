"""The statistics of a loader, frozen."""

import dataclasses
from typing import NamedTuple

from shmloader.insight.record import Counts, Record, WorkerSums
from shmloader.insight.table import write_table
from shmloader.insight.verdict import Evidence, Finding, judge

_NS = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class WaitStats:
    """The consumer's wait, in seconds.

    Attributes:
        total_s: In ``iter()`` and ``next()``.
        share: Of the time from ``iter()`` to the last return of ``next()``; 0 to 1.
        p50_s: Half of the calls of ``next()`` took at most so long; right to 7 %.
        p90_s: Likewise nine in ten.
        p99_s: Likewise 99 in 100.
        max_s: The longest.
        startup_s: Of ``total_s``, in ``iter()`` and the first ``next()``; of all epochs together.
    """

    total_s: float = 0.0
    share: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    startup_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class StageStats:
    """One stage of the batches' way, summed over all batches that were handed over.

    Many batches are on their way at a time, so the stages' sums may exceed the time that passed.

    Attributes:
        total_s: Seconds that batches spent there.
        mean_s: Seconds a batch.
    """

    total_s: float = 0.0
    mean_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker.

    Attributes:
        worker_id: Its number.
        pid: Of the process, the newest with this number; None for a thread.
        batches: Of its batches, those handed over.
        busy_s: Seconds that it was loading these.
        busy_share: Of the time since it began its first one; 0 to 1.
        fetch_s: Of ``busy_s``, in the dataset.
        collate_s: Of ``busy_s``, in ``collate_fn``.
        cpu_s: CPU seconds that it has used, also for its start.
        stalled_s: Seconds in which it could have run, and no core was free; None where the system
            does not tell.
        pss_bytes: Its memory, what it shares with others counted by its part: as of now while it
            lives, else as it was last measured. None for a thread, or if it ended too soon.
    """

    worker_id: int
    pid: int | None = None
    batches: int = 0
    busy_s: float = 0.0
    busy_share: float = 0.0
    fetch_s: float = 0.0
    collate_s: float = 0.0
    cpu_s: float = 0.0
    stalled_s: float | None = None
    pss_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlotStats:
    """The shared memory.

    Attributes:
        count: Slots there may be; 0 without worker processes.
        nbytes: The most memory, in bytes, that they took together.
        lent: Batches whose slot was lent to the consumer.
        copied: Batches that were copied out instead, since the consumer held too many.
        grown: How often a slot took more memory than it had.
        largest_bytes: The most that a batch has taken.
        share_bytes: The most that a batch may take, by ``shm_size``; 0 for no limit.
    """

    count: int = 0
    nbytes: int = 0
    lent: int = 0
    copied: int = 0
    grown: int = 0
    largest_bytes: int = 0
    share_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What there is, apart from the loader.

    Attributes:
        cores: Cores that this process may use.
        free_bytes: Memory that may still be taken; None if not known.
        limit: What sets that limit, in words.
    """

    cores: int = 0
    free_bytes: int | None = None
    limit: str = ""


class Stages(NamedTuple):
    """A batch's way, in its order. Several batches are on it at a time.

    Attributes:
        slot: Drawn; waiting for a slot and a worker.
        queue: Sent; behind earlier batches of its worker, or until the worker has started.
        fetch: In the dataset.
        collate: In ``collate_fn``.
        encode: Being described.
        transport: The answer is under way, and somebody waits for it.
        reorder: Waiting for an earlier batch.
        ready: Waiting for the consumer.
        build: Tensors are made of the slot, and the next task is drawn and sent; with
            ``device="cpu"``, in ``transform``.
        pin: On the pinning thread.
        device: On the thread that copies to a device and calls ``transform``: until the copy is
            begun, and there is room for a further one.
    """

    slot: StageStats = StageStats()
    queue: StageStats = StageStats()
    fetch: StageStats = StageStats()
    collate: StageStats = StageStats()
    encode: StageStats = StageStats()
    transport: StageStats = StageStats()
    reorder: StageStats = StageStats()
    ready: StageStats = StageStats()
    build: StageStats = StageStats()
    pin: StageStats = StageStats()
    device: StageStats = StageStats()


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderStats:
    """Where the time of a loader goes. ``print`` shows it as a table.

    Attributes:
        epoch: Number of the epoch; None for all of them.
        epochs: Epochs that were begun, if this is of all of them; else 1, or 0 before the first.
        is_over: Whether the epoch has come to its end, or was given up.
        kind: What loads: "processes", "threads", "in-process" or "torch" (its own iterator); ""
            before the first epoch.
        num_workers: How many of these.
        persistent_workers: Whether the workers persist after an epoch.
        batches: Handed over.
        samples: In these.
        nbytes: In these: of slots, or of tensors and arrays.
        elapsed_s: From ``iter()`` to the last return of ``next()``.
        samples_per_s: Samples over that time.
        wait: The consumer's.
        stages: Where batches spent their time.
        load_p50_s: Half of the batches took a worker at most so long; right to 7 %.
        load_p99_s: Likewise 99 in 100.
        workers: Each of them.
        slots: The shared memory.
        restarts: Workers that were replaced.
        failures: Samples that were left out or replaced, and batches that raised.
        machine: What there is, apart from the loader.
    """

    epoch: int | None = None
    epochs: int = 0
    is_over: bool = False
    kind: str = ""
    num_workers: int = 0
    persistent_workers: bool = False
    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    elapsed_s: float = 0.0
    samples_per_s: float = 0.0
    wait: WaitStats = WaitStats()
    stages: Stages = Stages()  # noqa: RUF009 - it cannot change
    load_p50_s: float = 0.0
    load_p99_s: float = 0.0
    workers: tuple[WorkerStats, ...] = ()
    slots: SlotStats = SlotStats()
    restarts: int = 0
    failures: int = 0
    machine: Machine = Machine()

    @property
    def finding(self) -> Finding:
        """Which rule the verdict comes of."""
        return judge(_evidence(self))[0]

    @property
    def verdict(self) -> str:
        """One sentence: what the limit is, and what to change."""
        return judge(_evidence(self))[1]

    def __str__(self) -> str:
        """A table, and the verdict."""
        return write_table(self)


def snapshot(record: Record | None, epochs: int, machine: Machine) -> LoaderStats:
    """The statistics of what was noted; ``record`` is a copy."""
    if record is None:
        return LoaderStats(machine=machine)
    elapsed_ns = max(1, record.last_ns - record.first_ns)
    waited_ns = record.iter_ns + record.waits.total_ns
    counts = record.counted() or Counts()
    waits = record.waits
    return LoaderStats(
        epoch=record.epoch,
        epochs=epochs,
        is_over=record.is_over,
        kind=record.kind,
        num_workers=record.worker_count,
        persistent_workers=record.keeps_workers,
        batches=record.batches,
        samples=record.samples,
        nbytes=record.nbytes,
        elapsed_s=elapsed_ns / _NS,
        samples_per_s=record.samples / (elapsed_ns / _NS),
        wait=WaitStats(
            waited_ns / _NS,
            min(1.0, waited_ns / elapsed_ns),
            waits.percentile(50) / _NS,
            waits.percentile(90) / _NS,
            waits.percentile(99) / _NS,
            waits.max_ns / _NS,
            record.startup_ns / _NS,
        ),
        stages=Stages(
            **{
                name: StageStats(spent_ns / _NS, spent_ns / _NS / max(1, record.batches))
                for name, spent_ns in record.stages.items()
            }
        ),
        load_p50_s=record.loads.percentile(50) / _NS,
        load_p99_s=record.loads.percentile(99) / _NS,
        workers=tuple(
            _worker_stats(worker_id, record.workers[worker_id])
            for worker_id in sorted(record.workers)
        ),
        slots=SlotStats(
            counts.slot_count,
            counts.most_bytes,
            counts.lent,
            counts.copied,
            counts.grown,
            counts.largest_bytes,
            counts.share_bytes,
        ),
        restarts=counts.restarts,
        failures=record.failed(),
        machine=machine,
    )


def _worker_stats(worker_id: int, sums: WorkerSums) -> WorkerStats:
    return WorkerStats(
        worker_id,
        sums.pid,
        sums.batches,
        sums.busy_ns / _NS,
        min(1.0, sums.busy_ns / sums.span_ns) if sums.span_ns else 0.0,
        sums.fetch_ns / _NS,
        sums.collate_ns / _NS,
        sums.cpu_ns / _NS,
        None if sums.stalled_ns is None else sums.stalled_ns / _NS,
        sums.pss_bytes,
    )


def _evidence(stats: LoaderStats) -> Evidence:
    working = [worker for worker in stats.workers if worker.batches]
    stalled = [worker.stalled_s for worker in stats.workers if worker.stalled_s is not None]
    used_bytes = stats.slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)
    seconds = {name: stage.total_s for name, stage in stats.stages._asdict().items()}
    return Evidence(
        kind=stats.kind,
        batches=stats.batches,
        elapsed_s=stats.elapsed_s,
        waited_s=stats.wait.total_s,
        startup_s=stats.wait.startup_s,
        workers=stats.num_workers,
        are_kept=stats.persistent_workers,
        cores=stats.machine.cores,
        busy_s=sum(worker.busy_s for worker in working),
        busy_share=sum(worker.busy_share for worker in working) / max(1, len(working)),
        cpu_s=sum(worker.cpu_s for worker in stats.workers),
        stalled_s=sum(stalled),
        stages=seconds,
        load_p50_s=stats.load_p50_s,
        load_p99_s=stats.load_p99_s,
        lent=stats.slots.lent,
        copied=stats.slots.copied,
        largest_bytes=stats.slots.largest_bytes,
        share_bytes=stats.slots.share_bytes,
        used_bytes=used_bytes,
        free_bytes=stats.machine.free_bytes,
        limit=stats.machine.limit,
    )
