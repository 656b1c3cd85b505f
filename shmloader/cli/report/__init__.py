"""``shmloader report``: writes a web page that shows a trace, and on request a picture of it.

The page needs no network. Modules: ``data`` (reads a trace), and ``picture`` (draws the charts of
the page with matplotlib).
"""

import argparse
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from shmloader.cli.report.data import TracedBatch, TracedRun, read_trace
from shmloader.cli.report.picture import new_figure, write_picture
from shmloader.cli.target import UsageError
from shmloader.insight.measurements import STAGES

__all__ = ["report"]

# A screen is a few thousand pixels wide. With more batches than that, each bar of a chart is a mean
# of several. This limit keeps the page fast.
_MAX_BATCHES = 20_000


def report(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the trace cannot be read, or the page or the picture cannot be written.
    """
    picture = options.png
    if picture is not None:
        new_figure("--png", picture)
    page = options.output or options.trace.with_suffix(".html")
    if page.absolute() == options.trace.absolute():
        raise UsageError(f"{page} is the trace: name another file for the page (-o)")
    if picture is not None and picture.absolute() in {page.absolute(), options.trace.absolute()}:
        raise UsageError(f"{picture} is the page or the trace: name another file (--png)")
    run = read_trace(options.trace)
    try:
        _write_page(run, page)
        print(f"page: {page}")
        if picture is not None:
            write_picture(run, picture)
            print(f"picture: {picture}")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error


def _write_page(run: TracedRun, path: Path) -> None:
    """Write the page of a run: ``page.html`` with the run's data in it."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_data_of(run), separators=(",", ":"), allow_nan=False)
    fields = {
        # "</script>" would end the script around the data, and "<!--" would change where it ends.
        "data": data.replace("<", "\\u003c"),
        "epochs": html.escape(run.epochs),
        "verdict": re.sub("`(.+?)`", r"<code>\1</code>", html.escape(run.verdict)),
        # The table ends with the verdict, which the page shows at the top.
        "table": html.escape(run.table.removesuffix(run.verdict).rstrip()),
    }
    # All at once, because a field may contain text that looks like the mark of another field.
    page = re.sub("{{([a-z]+)}}", lambda match: fields[match[1]], template)
    path.write_text(page, encoding="utf-8")


def _data_of(run: TracedRun) -> dict[str, Any]:
    batches = run.batches[:_MAX_BATCHES]
    return {
        "stages": STAGES,
        "left_out": len(run.batches) - len(batches),
        "batches": [_row(batch) for batch in batches],
        "begins": _rounded(run.begins),
        "waits": _rounded(run.waits),
        "uses": _rounded(run.uses),
        "figures": run.figures,
        "places": [[colour, text, spent_s * 1e3] for colour, text, spent_s in run.drawn_places()],
    }


def _rounded(spans: list[tuple[float, float]]) -> list[list[float]]:
    return [[round(at, 3), round(took, 3)] for at, took in spans[:_MAX_BATCHES]]


def _row(batch: TracedBatch) -> dict[str, Any]:
    return {
        "n": batch.number,
        "e": batch.epoch,
        "w": batch.worker,
        "asked": round(batch.asked, 4),
        "taken": round(batch.taken, 4),
        "sent": round(batch.sent, 4),
        "began": round(batch.began, 4),
        "done": round(batch.done, 4),
        "stage": round(batch.stage_began, 4),
        "lent": batch.lent,
        "ms": [round(batch.stage_ms.get(name, 0.0), 4) for name in STAGES],
    }
