"""Statistics as text: tables, one line, and durations, sizes and numbers in words."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmloader.insight.snapshot import LoaderStats

_TIMES = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
# From this number on, three digits round up to 1.
_ROUNDED_UP = 0.9995
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

# Length of the longest bar, in characters.
_BAR = 20

_STAGES = {
    "slot": "waiting for a slot and a worker",
    "queue": "behind earlier batches of its worker",
    "fetch": "in the dataset",
    "collate": "in collate_fn",
    "encode": "describing the batch",
    "transport": "sending the answer",
    "reorder": "waiting for an earlier batch",
    "ready": "waiting for the consumer",
    "build": "making tensors of it, drawing and sending the next task",
    "pin": "pinning",
    "device": "copying to the device, device_transform",
}

#: What each of :class:`~shmloader.insight.WaitPlaces` means.
PLACES_IN_WORDS = {
    "start": "iter(), or its worker was starting",
    "draw": "the batch sampler was drawing",
    "send": "no worker had room for it",
    "queue": "its worker was busy with earlier batches",
    "fetch": "in the dataset",
    "collate": "in collate_fn",
    "encode": "being described by its worker",
    "transport": "loaded, on its way to the main process",
    "build": "being built (or copied out of its slot) and handed over",
    "pin": "being pinned",
    "device": "being copied to the device, in device_transform",
    "end": "there was none: the epoch ended",
    "other": "not known, or an error was raised",
}
_WAIT_COLUMN = "where the next batch was while the consumer waited"
# Places with a smaller share of the wait are not printed.
_SHOWN_SHARE = 0.01

_WORKER_COLUMNS = ("worker", "batches", "busy", "CPU", "no core", "memory")


def seconds(duration_s: float) -> str:
    """Return a duration in seconds with two decimals, or in ms, µs or ns with three digits."""
    for unit, factor in _TIMES:
        if duration_s * factor >= _ROUNDED_UP:
            return f"{duration_s:.2f} s" if unit == "s" else f"{duration_s * factor:.3g} {unit}"
    return "0 s"


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number of things; ``many`` is the plural if that is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def size(nbytes: float) -> str:
    """Return a number of bytes with a fitting unit."""
    for factor, unit in _SIZES:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def write_table(stats: "LoaderStats") -> str:
    """Return the lines of a :class:`~shmloader.insight.LoaderStats`."""
    if not stats.kind:
        return f"shmloader: {stats.verdict}"
    lines = [f"shmloader: {_headline(stats)}", ""]
    lines += [f"  {name:<10}{text}" for name, text in _overview(stats)]
    longest = max((stage.mean_s for stage in stats.stages), default=0.0)
    if longest:
        lines += ["", "stages (mean time per batch)"]
    for name, stage in stats.stages._asdict().items():
        if stage.total_s:
            bar = "█" * round(_BAR * stage.mean_s / longest)
            lines.append(f"  {name:<10}{seconds(stage.mean_s):>9}  {bar:<{_BAR}}  {_STAGES[name]}")
    places = _wait_rows(stats)
    if places:
        lines += ["", _WAIT_COLUMN]
    lines += [f"  {name:<10}{spent:>9}  {share:>5}  {text}" for name, spent, share, text in places]
    if stats.workers:
        lines += ["", *(_row(*cells) for cells in (_WORKER_COLUMNS, *_worker_rows(stats)))]
    lines += ["", stats.verdict]
    return "\n".join(line.rstrip() for line in lines)


def write_line(stats: "LoaderStats") -> str:
    """Return a short line that says which statistics these are."""
    if not stats.kind:
        return "no epoch yet"
    return (
        f"{_epochs(stats)}, {counted(stats.batches, 'batch', 'batches')}, "
        f"{stats.samples_per_s:,.0f} samples/s, waited {seconds(stats.wait.total_s)} "
        f"({stats.wait.share:.0%})"
    )


def write_html(stats: "LoaderStats") -> str:
    """Return the content of :func:`write_table` as HTML tables, with all text escaped."""
    verdict = f"<p>{escape(stats.verdict)}</p>"
    if not stats.kind:
        return verdict
    parts = [f"<p><b>{escape(_headline(stats))}</b></p>", html_table(_overview(stats))]
    stages = [
        (name, seconds(stage.mean_s), _STAGES[name])
        for name, stage in stats.stages._asdict().items()
        if stage.total_s
    ]
    if stages:
        parts.append(html_table(stages, ("stage", "mean time per batch", "")))
    places = _wait_rows(stats)
    if places:
        parts.append(html_table(places, ("place", "waited", "share", _WAIT_COLUMN)))
    if stats.workers:
        parts.append(html_table(_worker_rows(stats), _WORKER_COLUMNS))
    return "\n".join([*parts, verdict])


def escape(text: object) -> str:
    """Return HTML that shows as the given text."""
    import html  # noqa: PLC0415 - takes 2 ms, and only notebooks need it

    return html.escape(str(text))


def html_table(rows: Iterable[Iterable[object]], columns: Iterable[str] = ()) -> str:
    """Return an HTML table, with all text escaped."""
    lines = [_html_row("th", columns)] if columns else []
    lines += [_html_row("td", cells) for cells in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _worker_rows(stats: "LoaderStats") -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for worker in stats.workers:
        stalled = "–" if worker.stalled_s is None else seconds(worker.stalled_s)
        memory = "–" if worker.pss_bytes is None else size(worker.pss_bytes)
        busy, cpu = f"{worker.busy_share:.0%}", seconds(worker.cpu_s)
        rows.append((worker.worker_id, worker.batches, busy, cpu, stalled, memory))
    return rows


def _wait_rows(stats: "LoaderStats") -> list[tuple[str, str, str, str]]:
    total_s = stats.wait.total_s
    return [
        (name, seconds(spent_s), f"{spent_s / total_s:.0%}", PLACES_IN_WORDS[name])
        for name, spent_s in stats.wait.places._asdict().items()
        if spent_s > _SHOWN_SHARE * total_s
    ]


def _row(first: object, *others: object) -> str:
    return f"  {first:<8}" + "".join(f"{other:>10}" for other in others)


def _headline(stats: "LoaderStats") -> str:
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


def _epochs(stats: "LoaderStats") -> str:
    if stats.epoch is None:
        return "one epoch" if stats.epochs == 1 else f"all of {stats.epochs} epochs"
    return f"epoch {stats.epoch}{'' if stats.is_over else ', running'}"


def _overview(stats: "LoaderStats") -> list[tuple[str, str]]:
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
