"""The statistics of a loader, with a verdict and as a table."""

import dataclasses

from shmloader.grammar import as_html, counted, seconds, size
from shmloader.insight.figures import (
    PLACES,
    STAGES,
    ConsumerStats,
    Figures,
    Machine,
    SlotStats,
    Stages,
    StageStats,
    WaitPlaces,
    WaitStats,
    WorkerStats,
)
from shmloader.insight.sums import Totals
from shmloader.insight.verdict import Finding, judge

_NS = 1e9

# Length of the longest bar of a table, in characters.
_BAR = 20
# Places with a smaller share of the wait are not printed.
_SHOWN_SHARE = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderStats(Figures):
    """Where the time of a loader goes. ``print`` shows it as a table.

    Attributes:
        epoch: Number of the epoch; None for all epochs together.
        epochs: Number of epochs begun, for all epochs together; otherwise 1, or 0 before the first.
        is_over: Whether the epoch has ended or was given up.
        kind: What loads: "processes", "threads", "executor", "in-process", "torch" (torch's own
            iterator) or, in ``shmloader bench``, "other" (a loader that is not ours); "" before
            the first epoch.
        num_workers: Number of workers.
        persistent_workers: Whether the workers persist after an epoch.
        batches: Number of batches delivered.
        samples: Number of samples in these batches.
        nbytes: Bytes of these batches: of slots, or of tensors and arrays.
        elapsed_s: Seconds from ``iter()`` to the last return of ``next()``, summed over the epochs.
        samples_per_s: Samples per second of ``elapsed_s``.
        wait: How long the consumer waited.
        stages: Where batches spent their time.
        load_p50_s: Median seconds that a worker took for a batch; accurate to 7 %.
        load_p99_s: 99th percentile of these seconds.
        workers: The statistics of each worker.
        consumer: What the process that takes the batches used.
        slots: The use of shared memory.
        restarts: Number of workers that were replaced.
        failures: Number of samples that were left out or replaced, and of batches that raised.
        machine: What the machine offers this process.
    """

    __module__ = "shmloader"  # users import it from there

    @property
    def finding(self) -> Finding:
        """The rule that made the verdict: a member of ``shmloader.insight.verdict.Finding``."""
        return judge(self)[0]

    @property
    def verdict(self) -> str:
        """What limits the speed and what to change, in one sentence or two.

        It names the cause of most of the wait; two causes if the second has at least three quarters
        of the first's weight. Nearly full memory comes before all others.
        """
        return judge(self)[1]

    def __str__(self) -> str:
        """Return a table and the verdict."""
        return _table(self)

    def __repr__(self) -> str:
        """Return one short line: epoch, batches, samples per second and the consumer's wait."""
        if not self.kind:
            return "<LoaderStats: no epoch yet>"
        return (
            f"<LoaderStats: {_epochs(self)}, {counted(self.batches, 'batch', 'batches')}, "
            f"{self.samples_per_s:,.0f} samples/s, waited {seconds(self.wait.total_s)} "
            f"({self.wait.share:.0%})>"
        )

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return as_html(str(self))


def snapshot(totals: Totals | None, epochs: int, machine: Machine) -> LoaderStats:
    """Return the statistics of what was recorded.

    Args:
        totals: The totals; None before the first epoch.
        epochs: Number of epochs in them.
        machine: What the machine offers this process.
    """
    if totals is None or not totals.newest:
        return LoaderStats(machine=machine)
    added, most, newest = totals.added, totals.most, totals.newest
    spent = {name: count / _NS for name, count in added.items()}  # of use for times only
    elapsed_s = max(1 / _NS, spent["elapsed"])
    total_s = spent.get("iter", 0.0) + spent.get("next", 0.0)
    places = {name: spent.get(("wait", name), 0.0) for name in PLACES}
    places["build"] = max(0.0, total_s - sum(places.values()))
    stages = {name: spent.get(("stage", name), 0.0) for name in STAGES}
    batches = added["batches"]
    numbers = sorted({name[0] for name in (*added, *newest) if isinstance(name[0], int)})
    max_ns = most.get("next", 0)
    p50_ns, p90_ns, p99_ns = (min(max_ns, totals.waits.percentile(at)) for at in (50, 90, 99))
    return LoaderStats(
        **{name: value for name, value in newest.items() if name in _OF_NEWEST},
        epochs=epochs,
        batches=batches,
        samples=added["samples"],
        nbytes=added["nbytes"],
        elapsed_s=elapsed_s,
        samples_per_s=added["samples"] / elapsed_s,
        wait=WaitStats(
            total_s,
            min(1.0, total_s / elapsed_s),
            p50_ns / _NS,
            p90_ns / _NS,
            p99_ns / _NS,
            max_ns / _NS,
            spent.get("startup", 0.0),
            WaitPlaces(**places),
        ),
        stages=Stages(
            **{name: StageStats(sum_s, sum_s / max(1, batches)) for name, sum_s in stages.items()}
        ),
        load_p50_s=totals.loads.percentile(50) / _NS,
        load_p99_s=totals.loads.percentile(99) / _NS,
        workers=tuple(_worker_stats(totals, number) for number in numbers),
        consumer=ConsumerStats(
            spent.get("process_cpu", 0.0), spent.get("consumer_cpu"), spent.get("consumer_stalled")
        ),
        slots=SlotStats(
            newest.get("slot_count", 0),
            most.get("slot_bytes", 0),
            added["lent"],
            added["copied"],
            added["grown"],
            most.get("largest_bytes", 0),
            newest.get("share_bytes", 0),
        ),
        restarts=added["restarts"],
        failures=added["failures"],
        machine=machine,
    )


_OF_NEWEST = ("epoch", "kind", "num_workers", "persistent_workers", "is_over")


def _worker_stats(totals: Totals, number: int) -> WorkerStats:
    added, newest = totals.added, totals.newest
    times = ("busy", "fetch", "collate", "idle", "idle_awaited", "cpu")
    span_ns = added[number, "span"]
    stalled_ns = added.get((number, "stalled"))
    return WorkerStats(
        worker_id=number,
        pid=newest.get((number, "pid")),
        batches=added[number, "batches"],
        busy_share=min(1.0, added[number, "busy"] / span_ns) if span_ns else 0.0,
        stalled_s=None if stalled_ns is None else stalled_ns / _NS,
        pss_bytes=newest.get((number, "pss_bytes")),
        **{f"{name}_s": added[number, name] / _NS for name in times},
    )


def _table(stats: LoaderStats) -> str:
    """Return the lines of a table, with the verdict."""
    if not stats.kind:
        return f"shmloader: {stats.verdict}"
    wait, slots, count = stats.wait, stats.slots, stats.num_workers
    how = {
        "processes": counted(count, "worker process", "worker processes"),
        "threads": counted(count, "worker thread"),
        "executor": f"an executor with {counted(count, 'batch', 'batches')} in flight",
        "in-process": "loaded in-process",
        "torch": f"torch's own iterator, {counted(count, 'worker')}",
        "other": f"another loader, {counted(count, 'worker')}",
    }[stats.kind]
    cores = f", {counted(stats.machine.cores, 'core')}" if stats.machine.cores else ""
    nbytes = f", {size(stats.nbytes)}" if stats.nbytes else ""
    batches, samples = counted(stats.batches, "batch", "batches"), counted(stats.samples, "sample")
    lines = [f"shmloader: {_epochs(stats)}, {how}{cores}", ""]
    lines.append(
        f"  delivered {batches}, {samples}{nbytes} in {seconds(stats.elapsed_s)}: "
        f"{stats.samples_per_s:,.0f} samples/s"
    )
    lines.append(
        f"  waited    {seconds(wait.total_s)} ({wait.share:.0%}), start-up "
        f"{seconds(wait.startup_s)}; next(): median {seconds(wait.p50_s)}, 90 % "
        f"{seconds(wait.p90_s)}, 99 % {seconds(wait.p99_s)}, most {seconds(wait.max_s)}"
    )
    if slots.count:
        lines.append(
            f"  slots     {slots.count}, {size(slots.nbytes)}; lent {slots.lent:,}, copied out "
            f"{slots.copied:,}, grown {slots.grown:,}"
        )
    if stats.restarts or stats.failures:
        lines.append(
            f"  trouble   {counted(stats.restarts, 'restart')}, "
            f"{counted(stats.failures, 'failure')}"
        )
    longest = max(stage.mean_s for stage in stats.stages)
    if longest:
        lines += ["", "stages (mean time per batch)"]
    for name, stage in stats.stages._asdict().items():
        if stage.total_s:
            bar = "█" * round(_BAR * stage.mean_s / longest)
            lines.append(f"  {name:<10}{seconds(stage.mean_s):>9}  {bar:<{_BAR}}  {STAGES[name]}")
    if wait.total_s:
        lines += ["", "where the next batch was while the consumer waited"]
    for name, spent_s in wait.places._asdict().items():
        share = spent_s / (wait.total_s or 1.0)
        if share > _SHOWN_SHARE:
            lines.append(f"  {name:<10}{seconds(spent_s):>9}  {share:>5.0%}  {PLACES[name]}")
    if stats.workers:
        names = "".join(f"{name:>10}" for name in ("batches", "busy", "CPU", "no core", "memory"))
        lines += ["", f"  worker  {names}"]
    for worker in stats.workers:
        stalled = "–" if worker.stalled_s is None else seconds(worker.stalled_s)
        memory = "–" if worker.pss_bytes is None else size(worker.pss_bytes)
        lines.append(
            f"  {worker.worker_id:<8}{worker.batches:>10}{worker.busy_share:>10.0%}"
            f"{seconds(worker.cpu_s):>10}{stalled:>10}{memory:>10}"
        )
    return "\n".join([*lines, "", stats.verdict])


def _epochs(stats: LoaderStats) -> str:
    if stats.epoch is None:
        return "one epoch" if stats.epochs == 1 else f"all of {stats.epochs} epochs"
    return f"epoch {stats.epoch}{'' if stats.is_over else ', running'}"
