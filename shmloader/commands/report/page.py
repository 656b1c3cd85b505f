"""Writes the page: ``page.html``, with the run's data in it. Nothing is loaded from elsewhere."""

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from shmloader.commands.report.data import BatchOfTrace, RunOfTrace
from shmloader.stats.times import STAGES
from shmloader.stats.units import seconds

# A screen has some thousand columns: of more batches, each bar is a mean anyway, and the page
# stays quick.
_MOST_BATCHES = 20_000


def write_page(run: RunOfTrace, path: Path) -> None:
    """Write the page of a run.

    Raises:
        OSError: If it cannot be written.
    """
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_data_of(run), separators=(",", ":"))
    # "</script>" would end the script that it stands in.
    page = template.replace("{{data}}", data.replace("</", "<\\/"))
    page = page.replace("{{epoch}}", html.escape(epoch_of(run)))
    verdict = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(run.verdict))
    page = page.replace("{{verdict}}", verdict)
    # The table ends in the verdict, which stands at the top.
    table = run.table.removesuffix(run.verdict).rstrip()
    page = page.replace("{{table}}", html.escape(table))
    path.write_text(page, encoding="utf-8")


def _data_of(run: RunOfTrace) -> dict[str, Any]:
    batches = run.batches[:_MOST_BATCHES]
    return {
        "parts": STAGES,
        "left_out": len(run.batches) - len(batches),
        "batches": [_row(batch) for batch in batches],
        "begins": [[round(at, 3), round(took, 3)] for at, took in run.begins],
        "waits": [[round(at, 3), round(took, 3)] for at, took in run.waits[:_MOST_BATCHES]],
        "figures": figures_of(run),
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


def epoch_of(run: RunOfTrace) -> str:
    """What the verdict and the figures are of: there may be other epochs in the trace."""
    return f"epoch {run.stats['epoch']}"


def figures_of(run: RunOfTrace) -> list[tuple[str, str]]:
    """The figures that stand at the top: a name and a value."""
    stats = run.stats
    wait = stats["wait"]
    figures = [
        ("waited for data", f"{wait['share']:.0%}, {seconds(wait['total_s'])}"),
        ("of that, first batch", seconds(wait["startup_s"])),
        ("next(), median", seconds(wait["p50_s"])),
        ("next(), 99 % within", seconds(wait["p99_s"])),
    ]
    workers = [worker for worker in stats["workers"] if worker["batches"]]
    if workers:
        busy = sum(worker["busy_share"] for worker in workers) / len(workers)
        figures.append(("workers busy", f"{busy:.0%} of {len(workers)}"))
    figures.append(("samples a second", f"{stats['samples_per_s']:,.0f}"))
    return figures
