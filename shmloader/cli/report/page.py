"""Writes the page: ``page.html``, with the run's data in it. Nothing is loaded from elsewhere."""

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from shmloader.cli.report.data import BatchOfTrace, RunOfTrace
from shmloader.insight.measurements import STAGES

# A screen has some thousand columns: of more batches, each bar is a mean anyway, and the page
# stays quick.
_MOST_BATCHES = 20_000


def write_page(run: RunOfTrace, path: Path) -> None:
    """Write the page of a run.

    Raises:
        OSError: If it cannot be written.
    """
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_data_of(run), separators=(",", ":"), allow_nan=False)
    parts = {
        # "</script>" would end the script that it stands in, and "<!--" change where it ends.
        "data": data.replace("<", "\\u003c"),
        "epoch": html.escape(run.epoch),
        "verdict": re.sub("`(.+?)`", r"<code>\1</code>", html.escape(run.verdict)),
        # The table ends in the verdict, which stands at the top.
        "table": html.escape(run.table.removesuffix(run.verdict).rstrip()),
    }
    # All at once: a part may have text that looks like the place of another.
    page = re.sub("{{([a-z]+)}}", lambda found: parts[found[1]], template)
    path.write_text(page, encoding="utf-8")


def _data_of(run: RunOfTrace) -> dict[str, Any]:
    batches = run.batches[:_MOST_BATCHES]
    return {
        "parts": STAGES,
        "left_out": len(run.batches) - len(batches),
        "batches": [_row(batch) for batch in batches],
        "begins": [[round(at, 3), round(took, 3)] for at, took in run.begins[:_MOST_BATCHES]],
        "waits": [[round(at, 3), round(took, 3)] for at, took in run.waits[:_MOST_BATCHES]],
        "figures": run.figures,
    }


def _row(batch: BatchOfTrace) -> dict[str, Any]:
    parts = [round(batch.parts.get(name, 0.0), 4) for name in STAGES]
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
        "parts": parts,
    }
