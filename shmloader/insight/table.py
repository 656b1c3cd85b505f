"""Writes the figures of a loader: as a table, and as one line."""

from collections.abc import Iterator

from shmloader.insight.figures import Figures
from shmloader.insight.measurements import PLACES, STAGES
from shmloader.insight.text import counted, seconds, size

# Length of the longest bar, in characters.
_BAR = 20

# Places with a smaller share of the wait are not printed.
_SHOWN_SHARE = 0.01


def write_table(stats: Figures, verdict: str) -> str:
    """Return the lines of a :class:`~shmloader.LoaderStats`."""
    if not stats.kind:
        return f"shmloader: {verdict}"
    lines = [f"shmloader: {_headline(stats)}", ""]
    lines += [f"  {name:<10}{text}" for name, text in _overview(stats)]
    longest = max((stage.mean_s for stage in stats.stages), default=0.0)
    if longest:
        lines += ["", "stages (mean time per batch)"]
    for name, stage in stats.stages._asdict().items():
        if stage.total_s:
            bar = "█" * round(_BAR * stage.mean_s / longest)
            lines.append(f"  {name:<10}{seconds(stage.mean_s):>9}  {bar:<{_BAR}}  {STAGES[name]}")
    if stats.wait.total_s:
        lines += ["", "where the next batch was while the consumer waited"]
    for name, spent_s in stats.wait.places._asdict().items():
        share = spent_s / (stats.wait.total_s or 1.0)
        if share > _SHOWN_SHARE:
            lines.append(f"  {name:<10}{seconds(spent_s):>9}  {share:>5.0%}  {PLACES[name]}")
    if stats.workers:
        lines += ["", *_worker_rows(stats)]
    lines += ["", verdict]
    return "\n".join(line.rstrip() for line in lines)


def write_line(stats: Figures) -> str:
    """Return a short line that says which statistics these are."""
    if not stats.kind:
        return "no epoch yet"
    return (
        f"{_epochs(stats)}, {counted(stats.batches, 'batch', 'batches')}, "
        f"{stats.samples_per_s:,.0f} samples/s, waited {seconds(stats.wait.total_s)} "
        f"({stats.wait.share:.0%})"
    )


def _worker_rows(stats: Figures) -> Iterator[str]:
    rows: list[tuple[object, ...]] = [("worker", "batches", "busy", "CPU", "no core", "memory")]
    for worker in stats.workers:
        stalled = "–" if worker.stalled_s is None else seconds(worker.stalled_s)
        memory = "–" if worker.pss_bytes is None else size(worker.pss_bytes)
        busy, cpu = f"{worker.busy_share:.0%}", seconds(worker.cpu_s)
        rows.append((worker.worker_id, worker.batches, busy, cpu, stalled, memory))
    for first, *others in rows:
        yield f"  {first:<8}" + "".join(f"{other:>10}" for other in others)


def _headline(stats: Figures) -> str:
    how = {
        "processes": counted(stats.num_workers, "worker process", "worker processes"),
        "threads": counted(stats.num_workers, "worker thread"),
        "executor": f"an executor with {counted(stats.num_workers, 'batch', 'batches')} in flight",
        "in-process": "loaded in-process",
        "torch": f"torch's own iterator, {counted(stats.num_workers, 'worker')}",
        "other": f"another loader, {counted(stats.num_workers, 'worker')}",
    }[stats.kind]
    cores = f", {counted(stats.machine.cores, 'core')}" if stats.machine.cores else ""
    return f"{_epochs(stats)}, {how}{cores}"


def _epochs(stats: Figures) -> str:
    if stats.epoch is None:
        return "one epoch" if stats.epochs == 1 else f"all of {stats.epochs} epochs"
    return f"epoch {stats.epoch}{'' if stats.is_over else ', running'}"


def _overview(stats: Figures) -> list[tuple[str, str]]:
    wait, slots = stats.wait, stats.slots
    nbytes = f", {size(stats.nbytes)}" if stats.nbytes else ""
    delivered = (
        f"{counted(stats.batches, 'batch', 'batches')}, {counted(stats.samples, 'sample')}"
        f"{nbytes} in {seconds(stats.elapsed_s)}: {stats.samples_per_s:,.0f} samples/s"
    )
    waited = (
        f"{seconds(wait.total_s)} ({wait.share:.0%}), start-up {seconds(wait.startup_s)}; "
        f"next(): median {seconds(wait.p50_s)}, 90 % {seconds(wait.p90_s)}, "
        f"99 % {seconds(wait.p99_s)}, most {seconds(wait.max_s)}"
    )
    rows = [("delivered", delivered), ("waited", waited)]
    if slots.count:
        used = (
            f"{slots.count}, {size(slots.nbytes)}; lent {slots.lent:,}, copied out "
            f"{slots.copied:,}, grown {slots.grown:,}"
        )
        rows.append(("slots", used))
    if stats.restarts or stats.failures:
        restarts, failures = counted(stats.restarts, "restart"), counted(stats.failures, "failure")
        rows.append(("trouble", f"{restarts}, {failures}"))
    return rows
