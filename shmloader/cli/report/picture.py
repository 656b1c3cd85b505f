"""Draws the charts of the page into one picture, with matplotlib."""

import itertools
import textwrap
from pathlib import Path
from typing import Any

from shmloader.cli.report.data import TracedRun
from shmloader.cli.target import UsageError
from shmloader.insight.measurements import STAGES
from shmloader.insight.text import seconds

_COLOURS = {
    "slot": "#c3c9d2",
    "queue": "#98a2b0",
    "fetch": "#2f6fde",
    "collate": "#16a3a3",
    "encode": "#8e5bd0",
    "transport": "#d9649b",
    "reorder": "#e0a100",
    "ready": "#a9d6a0",
    "build": "#7a5a3a",
    "pin": "#c2571a",
    "device": "#c2571a",
    "wait": "#d8432f",
    "use": "#b9c3d0",
}
_CONSUMER = {"wait": "consumer waits in iter(), next()", "use": "consumer works"}
# The stages that one row of the timeline shows: a worker's, or those of the consumer's own thread.
_LOADING = ("fetch", "collate", "encode")
_IN_PROCESS = ("fetch", "collate", "build", "pin", "device")
_MOST_BARS = 400


def new_figure(argument: str, path: Path, **options: Any) -> Any:
    """Return a new figure of matplotlib that can be drawn into a file.

    Args:
        argument: The argument of the command line that names the file.
        path: The file.
        options: Arguments of ``matplotlib.figure.Figure``.

    Raises:
        UsageError: If matplotlib is not installed, the file's suffix is not one of a picture, or
            its directory does not exist.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UsageError(f"{argument} needs matplotlib: pip install 'shmloader[report]'") from error
    figure = Figure(**options)
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise UsageError(
            f"{argument}: {path.name!r} has no suffix of a picture, such as .png or .svg"
        )
    if not path.parent.is_dir():
        raise UsageError(f"{argument}: there is no directory {str(path.parent)!r}")
    return figure


def write_picture(run: TracedRun, path: Path) -> None:
    """Draw a run into a file.

    Raises:
        UsageError: If :func:`new_figure` raises it.
        OSError: If the picture cannot be written.
    """
    draw_run(run, path).savefig(path)


def draw_run(run: TracedRun, path: Path) -> Any:
    """Return a figure of matplotlib with the charts of the page, in their order."""
    rows = len({batch.worker for batch in run.batches}) + 2
    places = run.drawn_places()
    size = (11, 10.5 + 0.25 * rows + 0.25 * len(places))
    figure = new_figure("--png", path, figsize=size, dpi=120, layout="constrained")
    heights = [1.2 + 0.35 * rows, 0.5 + 0.25 * len(places), 3.5, 2, 2.2]
    has_workers = any(batch.worker is not None for batch in run.batches)
    if not has_workers:  # no batch is ever loaded ahead
        heights.pop()
    panels = figure.subplots(len(heights), 1, height_ratios=heights)
    timeline, waited, stack, waits = panels[:4]
    figures = [f"{name}:\N{NO-BREAK SPACE}{value}" for name, value in run.figures]
    lines = [*textwrap.wrap(run.verdict, 130), f"({run.epochs})", ""]
    lines += ["   ·   ".join(some) for some in (figures[:3], figures[3:])]
    title = "\n".join(lines)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
    _draw_timeline(timeline, run)
    _draw_places(waited, places)
    _draw_stack(stack, run)
    waits.set_title("How long next() took", loc="left", fontsize=10)
    waits.vlines(
        [at + took for at, took in run.waits], 0, [took for _, took in run.waits], _COLOURS["wait"]
    )
    waits.set(ylabel="ms", xlabel="ms")
    if has_workers:
        _draw_in_flight(panels[4], run)
    for axes in panels[3:]:
        axes.sharex(timeline)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_timeline(axes: Any, run: TracedRun) -> None:
    workers = sorted({batch.worker for batch in run.batches if batch.worker is not None})
    stages = [name for name in ("pin", "device") if any(b.stage_ms.get(name) for b in run.batches)]
    names = [f"worker {worker}" for worker in workers]
    names += [*(stages if workers else []), "consumer"]
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    last = len(names) - 1
    spans[last, "wait"] = [*run.begins, *run.waits]
    spans[last, "use"] = run.uses
    for batch in run.batches:
        at = batch.began
        row = last if batch.worker is None else workers.index(batch.worker)
        for name in _LOADING if workers else _IN_PROCESS:
            took = batch.stage_ms.get(name, 0.0)
            spans.setdefault((row, name), []).append((at, took))
            at += took
        for name in stages if workers else ():
            span = (batch.stage_began, batch.stage_ms.get(name, 0.0))
            spans.setdefault((last - 1, name), []).append(span)
    names_shown = set()
    for (row, name), bars in spans.items():
        if not any(took for _, took in bars):
            continue
        label = None if name in names_shown else _CONSUMER.get(name, name)
        names_shown.add(name)
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=_COLOURS[name], label=label)
    axes.legend(ncols=7, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title("Timeline", loc="left", fontsize=10)
    axes.set_xlabel("ms")


def _draw_places(axes: Any, places: list[tuple[str, str, float]]) -> None:
    """Draw a bar for each place, with its duration and its meaning at the bar's end."""
    values = [spent_s * 1e3 for _, _, spent_s in places]
    colours = [_COLOURS[colour] for colour, _, _ in places]
    bars = axes.barh(range(len(places)), values, color=colours)
    texts = [f"{seconds(spent_s)}  {text}" for _, text, spent_s in places]
    axes.bar_label(bars, texts, padding=4, fontsize=9)
    axes.margins(x=0.6)  # room for the texts
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_title("What the consumer waited for", loc="left", fontsize=10)
    axes.set_xlabel("ms")


def _draw_stack(axes: Any, run: TracedRun) -> None:
    count = min(len(run.batches), _MOST_BARS)
    edges = [len(run.batches) * number // count for number in range(count + 1)]
    groups = [run.batches[begin:stop] for begin, stop in itertools.pairwise(edges)]
    first_numbers = [group[0].number for group in groups]
    width = len(run.batches) / count
    below = [0.0] * count
    for name in STAGES:
        means = [sum(b.stage_ms.get(name, 0.0) for b in group) / len(group) for group in groups]
        if any(means):
            axes.bar(
                first_numbers, means, width, below, align="edge", color=_COLOURS[name], label=name
            )
            below = [low + mean for low, mean in zip(below, means, strict=True)]
    axes.set_title("Where each batch spent its time", loc="left", fontsize=10)
    axes.set(ylabel="ms", xlabel="batch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0)
    axes.legend(ncols=6, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2))


def _draw_in_flight(axes: Any, run: TracedRun) -> None:
    changes = []
    for batch in run.batches:
        if batch.worker is not None:
            changes += [(batch.sent, 1, 0), (batch.done, -1, 1), (batch.taken, 0, -1)]
    times, working, ready = [0.0], [0], [0]
    for at, to_working, to_ready in sorted(changes):
        times.append(at)
        working.append(working[-1] + to_working)
        ready.append(ready[-1] + to_ready)
    colours = [_COLOURS["fetch"], _COLOURS["ready"]]
    axes.stackplot(
        times, working, ready, step="post", colors=colours, labels=["with workers", "ready"]
    )
    taken = [batch.taken for batch in run.batches]
    lent = [batch.lent for batch in run.batches]
    axes.step(taken, lent, where="post", color="black", lw=1, label="slots lent")
    axes.set_title("Batches on their way", loc="left", fontsize=10)
    axes.set(ylabel="batches", xlabel="ms")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.25))
