"""The statistics of a loader, frozen, and how they print."""

import enum
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from shmloader.grammar import counted, seconds, size, with_share

#: The parts of a batch's way, in order, and what each means; the fields of :class:`Times`.
PARTS = {
    "start": "iter(), or its worker was starting",
    "draw": "the batch sampler was drawing",
    "slot": "waiting for a slot and a worker",
    "queue": "behind earlier batches of its worker",
    "fetch": "in the dataset",
    "collate": "in collate_fn",
    "encode": "being packed for the main process",
    "transport": "loaded, on its way to the main process",
    "reorder": "waiting for an earlier batch",
    "ready": "waiting for the consumer",
    "build": "being built (or copied out of its slot) and handed over",
    "pin": "being pinned",
    "device": "being copied to the device, in device_transform",
    "end": "there was none: the epoch ended",
    "other": "not known, or an error was raised",
}

# Parts with a smaller share are not printed.
_SHOWN_SHARE = 0.01


class Times(NamedTuple):
    """Seconds in each part of a batch's way. All fields are 0 where a part does not occur.

    Attributes:
        start: ``iter()`` made the iterator, or the batch's worker had not begun its first batch of
            the epoch, because the worker was starting. Not in ``stages``.
        draw: The batch sampler drew indices on the consumer's thread, most often those of a later
            batch. Not in ``stages``.
        slot: The indices are drawn, and the batch waits for a slot and a worker.
        queue: The task is sent, and waits for earlier batches of its worker.
        fetch: The dataset loads the samples.
        collate: ``collate_fn`` makes the batch.
        encode: The worker describes the batch for the main process.
        transport: The batch is loaded, and the main process has not noticed that yet.
        reorder: The batch waits for an earlier one. Only in ``stages``.
        ready: The batch waits for the consumer. Only in ``stages``.
        build: Tensors are made of the slot or copied out of it, and the next task is drawn and
            sent. With ``device="cpu"``, ``device_transform`` is called.
        pin: The batch is copied into page-locked memory.
        device: The batch is copied to the device, or ``device_transform`` is called.
        end: There is no next batch: the epoch ends, and so do workers that do not persist. Not in
            ``stages``.
        other: An error is raised in place of the batch, or it is not known where the batch is. Not
            in ``stages``.
    """

    start: float = 0.0
    draw: float = 0.0
    slot: float = 0.0
    queue: float = 0.0
    fetch: float = 0.0
    collate: float = 0.0
    encode: float = 0.0
    transport: float = 0.0
    reorder: float = 0.0
    ready: float = 0.0
    build: float = 0.0
    pin: float = 0.0
    device: float = 0.0
    end: float = 0.0
    other: float = 0.0


def as_plain(value: Any) -> Any:
    """Return statistics as dicts, lists, strings, numbers and None, which ``json.dumps`` takes."""
    if isinstance(value, Times):
        return value._asdict()
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [as_plain(each) for each in value]
    return value.value if isinstance(value, enum.Enum) else value


@dataclass(frozen=True, slots=True)
class WaitStats:
    """How long the consumer waited, in seconds.

    Attributes:
        total_s: Time in ``iter()`` and ``next()``.
        share: ``total_s`` as a share of ``elapsed_s``; 0 to 1.
        p50_s: Median time of a call of ``next()``; accurate to 7 %, like the next one.
        p99_s: 99th percentile.
        max_s: Longest call of ``next()``.
        startup_s: The part of ``total_s`` in ``iter()`` and the first ``next()`` of each epoch.
        causes: Where the next batch was during ``total_s``; the fields add up to it. The verdict
            is based on them. Without workers, the consumer's own thread loads the batch meanwhile.
    """

    total_s: float = 0.0
    share: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    startup_s: float = 0.0
    causes: Times = Times()  # noqa: RUF009 - it cannot change


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """The statistics of one worker.

    Attributes:
        worker_id: Number of the worker.
        pid: Process id of the newest process with this number; None for a thread.
        batches: Number of its batches that were delivered.
        busy_s: Seconds that it took to load these batches.
        busy_share: ``busy_s`` as a share of the time since it began its first batch; 0 to 1.
        idle_s: Seconds between its batches, from the end of one to the beginning of the next.
        cpu_s: CPU seconds that it has used, including its start.
        stalled_s: Seconds in which it could have run but no core was free; 0 where the system does
            not report it.
        pss_bytes: Its memory in bytes, with its share of the shared pages, when it was last
            measured. None for a thread, or if it ended too soon.
    """

    worker_id: int
    pid: int | None = None
    batches: int = 0
    busy_s: float = 0.0
    busy_share: float = 0.0
    idle_s: float = 0.0
    cpu_s: float = 0.0
    stalled_s: float = 0.0
    pss_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SlotStats:
    """The use of shared memory.

    Attributes:
        count: Maximum number of slots; 0 without worker processes.
        nbytes: Maximum memory that all slots took together, in bytes.
        lent: Number of batches whose slot was lent to the consumer.
        copied: Number of batches that were copied out, since the consumer held too many.
    """

    count: int = 0
    nbytes: int = 0
    lent: int = 0
    copied: int = 0


class Finding(enum.StrEnum):
    """The rule that made the verdict."""

    NOTHING_YET = "nothing yet"
    NOTHING_TO_GAIN = "nothing to gain"
    START_UP = "start-up"
    SAMPLER = "slow sampler"
    UNKNOWN = "errors"
    COPYING = "pinning or device copy"
    SLOTS_HELD = "slots held by the consumer"
    DELIVERY = "delivering"
    INTERPRETER_LOCK = "interpreter lock"
    CORES_BUSY = "no free core"
    TOO_FEW_AHEAD = "too few batches ahead"
    TOO_FEW_WORKERS = "too few workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Where the time of a loader goes. ``print`` shows it as a table.

    Attributes:
        epoch: Number of the epoch; None for all epochs together.
        epochs: Number of epochs begun, for all epochs together; otherwise 1, or 0 before the first.
        is_over: Whether the epoch has ended or was given up.
        kind: What loads: "processes", "threads", "executor" or "in-process"; "" before the first
            epoch.
        num_workers: Number of workers.
        persistent_workers: Whether the workers persist after an epoch.
        in_order: Whether batches wait for earlier ones.
        fetch_concurrency: Number of samples of a batch that a worker loads at once. It is 0 if it
            cannot be raised: without workers or indices, or with one call for a whole batch.
        has_transform: Whether there is a ``device_transform``.
        batches: Number of batches delivered.
        samples: Number of samples in these batches.
        nbytes: Bytes of these batches: of slots, or of tensors and arrays.
        elapsed_s: Seconds from ``iter()`` to the last return of ``next()``, summed over the epochs.
        cpu_s: CPU seconds that all threads of this process have used in the epochs, your loop's
            included; 0 without workers.
        consumer_cpu_s: The part of ``cpu_s`` of the thread that called ``iter()``.
        samples_per_s: Samples per second of ``elapsed_s``.
        wait: How long the consumer waited.
        stages: Where the delivered batches spent their time. Batches overlap, so the stages add up
            to more than the elapsed time.
        workers: The statistics of each worker.
        slots: The use of shared memory.
        restarts: Number of workers that were replaced.
        failures: Number of samples that were left out or replaced, and of batches that raised.
        cores: Number of cores that this process may use.
        finding: The rule that made the verdict.
        verdict: What limits the speed, in one sentence. Mostly a second one says what to change.
    """

    __module__ = "shmloader"  # users import it from there

    epoch: int | None = None
    epochs: int = 0
    is_over: bool = False
    kind: str = ""
    num_workers: int = 0
    persistent_workers: bool = False
    in_order: bool = True
    fetch_concurrency: int = 0
    has_transform: bool = False
    batches: int = 0
    samples: int = 0
    nbytes: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    consumer_cpu_s: float = 0.0
    samples_per_s: float = 0.0
    wait: WaitStats = WaitStats()
    stages: Times = Times()  # noqa: RUF009 - it cannot change
    workers: tuple[WorkerStats, ...] = ()
    slots: SlotStats = SlotStats()
    restarts: int = 0
    failures: int = 0
    cores: int = 0
    finding: Finding = Finding.NOTHING_YET
    verdict: str = "No batch has been delivered yet."

    def __str__(self) -> str:
        """Return a table and the verdict."""
        return "\n".join(_lines_of(self))

    def __repr__(self) -> str:
        """Return one short line: epoch, batches, samples per second and the consumer's wait."""
        if not self.kind:
            return "<LoaderStats: no epoch yet>"
        return (
            f"<LoaderStats: {_epochs(self)}, {counted(self.batches, 'batch', 'batches')}, "
            f"{self.samples_per_s:,.0f} samples/s, waited "
            f"{with_share(self.wait.total_s, self.wait.share)}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by their names, as values that ``json.dumps`` takes.

        ``wait``, ``stages`` and ``slots`` are dicts, and ``workers`` is a list of dicts. The end of
        a name is its unit: ``_s`` for seconds, ``bytes`` for bytes, ``share`` for 0 to 1.
        ``finding`` is its text.
        """
        return dict(as_plain(self))


def _lines_of(stats: LoaderStats) -> list[str]:
    """Return the lines of a table, with the verdict."""
    if not stats.kind:
        return [f"shmloader: {stats.verdict}"]
    wait, slots, batches = stats.wait, stats.slots, counted(stats.batches, "batch", "batches")
    workers, cores = counted(stats.num_workers, "worker"), counted(stats.cores, "core")
    lines = [
        f"shmloader: {_epochs(stats)}, {stats.kind}, {workers}, {cores}",
        "",
        (
            f"  delivered {batches}, {counted(stats.samples, 'sample')}, {size(stats.nbytes)} in "
            f"{seconds(stats.elapsed_s)}: {stats.samples_per_s:,.0f} samples/s"
        ),
        (
            f"  waited    {with_share(wait.total_s, wait.share)}, start-up "
            f"{seconds(wait.startup_s)}; next(): median {seconds(wait.p50_s)}, 99 % "
            f"{seconds(wait.p99_s)}, most {seconds(wait.max_s)}"
        ),
    ]
    if slots.count:
        lines.append(
            f"  slots     {slots.count}, {size(slots.nbytes)}; lent {slots.lent:,}, copied out "
            f"{slots.copied:,}"
        )
    if stats.restarts or stats.failures:
        restarts = counted(stats.restarts, "restart")
        lines.append(f"  trouble   {restarts}, {counted(stats.failures, 'failure')}")
    for heading, times, count in (
        ("stages (mean time per batch)", stats.stages, max(1, stats.batches)),
        ("where the next batch was while the consumer waited", wait.causes, 1),
    ):
        whole_s = sum(times)
        shown = [(name, at) for name, at in times._asdict().items() if at > _SHOWN_SHARE * whole_s]
        lines += ["", heading] * bool(shown)
        for name, spent_s in shown:
            share = f"{spent_s / whole_s:.0%}"
            lines.append(f"  {name:<10}{seconds(spent_s / count):>9}  {share:>5}  {PARTS[name]}")
    if stats.workers:
        names = "".join(f"{name:>10}" for name in ("batches", "busy", "CPU", "no core", "memory"))
        lines += ["", f"  worker  {names}"]
    for worker in stats.workers:
        memory = "–" if worker.pss_bytes is None else size(worker.pss_bytes)
        lines.append(
            f"  {worker.worker_id:<8}{worker.batches:>10}{worker.busy_share:>10.0%}"
            f"{seconds(worker.cpu_s):>10}{seconds(worker.stalled_s):>10}{memory:>10}"
        )
    return [*lines, "", stats.verdict]


def _epochs(stats: LoaderStats) -> str:
    if stats.epoch is None:
        return "one epoch" if stats.epochs == 1 else f"all of {stats.epochs} epochs"
    return f"epoch {stats.epoch}{'' if stats.is_over else ', running'}"
