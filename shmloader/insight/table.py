"""How statistics print."""

from typing import Any

from shmloader.insight.units import counted, seconds, size

# Of the longest bar, in characters.
_BAR = 20

_EXPLAINED = {
    "slot": "waiting for a slot and a worker",
    "queue": "behind earlier batches of its worker",
    "fetch": "in the dataset",
    "collate": "in collate_fn",
    "encode": "describing the batch",
    "transport": "the answer under way",
    "reorder": "waiting for an earlier batch",
    "ready": "waiting for the consumer",
    "build": "making tensors of it, drawing and sending the next task",
    "pin": "pinning",
    "device": "copying to the device, transform",
}


def write_table(stats: Any) -> str:
    """Lines of a :class:`~shmloader.insight.LoaderStats`."""
    if not stats.kind:
        return f"shmloader: {stats.verdict}"
    lines = [_headline(stats), ""]
    lines += _rows(_overview(stats))
    longest = max((stage.mean_s for stage in stats.stages), default=0.0)
    if longest:
        lines += ["", "a batch's way (mean of a batch)"]
    for name, stage in stats.stages._asdict().items():
        if stage.total_s:
            bar = "█" * round(_BAR * stage.mean_s / longest)
            lines.append(
                f"  {name:<10}{seconds(stage.mean_s):>9}  {bar:<{_BAR}}  {_EXPLAINED[name]}"
            )
    if stats.workers:
        lines += ["", _row("worker", "batches", "busy", "CPU", "no core", "memory")]
        for one in stats.workers:
            stalled = "–" if one.stalled_s is None else seconds(one.stalled_s)
            memory = "–" if one.pss_bytes is None else size(one.pss_bytes)
            busy = f"{one.busy_share:.0%}"
            lines.append(
                _row(one.worker_id, one.batches, busy, seconds(one.cpu_s), stalled, memory)
            )
    lines += ["", stats.verdict]
    return "\n".join(line.rstrip() for line in lines)


def _row(first: object, *others: object) -> str:
    return f"  {first:<8}" + "".join(f"{other:>10}" for other in others)


def _headline(stats: Any) -> str:
    many = "one epoch" if stats.epochs == 1 else f"all of {stats.epochs} epochs"
    what = many if stats.epoch is None else f"epoch {stats.epoch}"
    state = "" if stats.is_over or stats.epoch is None else ", running"
    how = {
        "processes": counted(stats.num_workers, "worker process", "worker processes"),
        "threads": counted(stats.num_workers, "worker thread"),
        "in-process": "loaded in-process",
        "torch": f"torch's own iterator, {counted(stats.num_workers, 'worker')}",
        "other": f"another loader, {counted(stats.num_workers, 'worker')}",
    }[stats.kind]
    cores = f", {counted(stats.machine.cores, 'core')}" if stats.machine.cores else ""
    return f"shmloader: {what}{state}, {how}{cores}"


def _overview(stats: Any) -> list[tuple[str, str]]:
    wait, slots = stats.wait, stats.slots
    nbytes = f", {size(stats.nbytes)}" if stats.nbytes else ""
    given = (
        f"{counted(stats.batches, 'batch', 'batches')}, {counted(stats.samples, 'sample')}"
        f"{nbytes} in "
        f"{seconds(stats.elapsed_s)}: {stats.samples_per_s:,.0f} samples/s"
    )
    waited = (
        f"{seconds(wait.total_s)} ({wait.share:.0%}), start-up {seconds(wait.startup_s)}; "
        f"next(): median {seconds(wait.p50_s)}, 90 % {seconds(wait.p90_s)}, "
        f"99 % {seconds(wait.p99_s)}, most {seconds(wait.max_s)}"
    )
    rows = [("given", given), ("waited", waited)]
    if slots.count:
        used = (
            f"{slots.count}, {size(slots.nbytes)}; lent {slots.lent:,}, copied out "
            f"{slots.copied:,}, grown {slots.grown:,}"
        )
        rows.append(("slots", used))
    if stats.restarts or stats.failures:
        rows.append(
            (
                "trouble",
                f"{counted(stats.restarts, 'restart')}, {counted(stats.failures, 'failure')}",
            )
        )
    return rows


def _rows(pairs: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<10}{text}" for name, text in pairs]
