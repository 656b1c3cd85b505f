"""Which four figures of RESULTS.md stand for the rest? Draws the chart of the README.

Reads the tables that ``peers.py`` has written, so it measures nothing itself. For each figure, the
chart has our best loader, torch's, and the best other loader. We lose in one of the four.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "RESULTS.md"
PICTURE = Path(__file__).parent / "results" / "summary.svg"

OURS = "shmloader"
TORCH = "torch"


class Bars(NamedTuple):
    """A group of bars.

    Attributes:
        heading: The heading of the table in RESULTS.md, or how it begins.
        column: The column of the figures.
        title: What the chart calls it.
        less: Whether less is better.
    """

    heading: str
    column: str
    title: str
    less: bool = False


ROWS = (
    Bars("### B, 38 MB", "GB/s", "batches of 38 MB, GB/s"),
    Bars("## K:", "batches/s", "TensorDataset of a million rows, batches/s"),
    Bars("## D:", "samples/s", "JPEG files, decoded by Pillow, samples/s"),
    Bars(
        "### G, spawn\n",
        "PSS of all processes, MB more",
        "a million strings, spawn, MB of memory: less is better",
        less=True,
    ),
)


def read_table(text: str, heading: str, column: str) -> dict[str, float]:
    """Return the medians of one column, by loader. A loader that has none is left out."""
    begin = text.index(heading)
    rows = []
    for line in text[begin:].splitlines()[1:]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    place = rows[0].index(column)
    figures = {}
    for cells in rows[2:]:
        number = re.match(r"[-+]?[\d,]*\.?\d+", cells[place])
        if number:
            figures[cells[0]] = float(number[0].replace(",", ""))
    return figures


def pick(figures: dict[str, float], *, less: bool) -> dict[str, float]:
    """Return the figures of our best, of torch, and of the best other, in this order."""
    best = min if less else max
    ours = [name for name in figures if name.split(",")[0] == OURS]
    others = [name for name in figures if name not in (*ours, TORCH, "bare work")]
    names = (best(ours, key=figures.__getitem__), TORCH, best(others, key=figures.__getitem__))
    return {name: figures[name] for name in names}


def draw(text: str, path: Path) -> None:
    """Draw the chart as SVG."""
    import matplotlib as mpl  # noqa: PLC0415 - not everywhere, and only needed here

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "shmloader", "font.size": 9})
    figure, axes = plt.subplots(len(ROWS), 1, figsize=(7.2, 5.4), facecolor="white")
    for axis, row in zip(axes, ROWS, strict=True):
        picked = pick(read_table(text, row.heading, row.column), less=row.less)
        names, values = list(picked), list(picked.values())
        colours = ["#2563eb", "#9ca3af", "#d1d5db"]
        axis.barh(range(len(names)), values, color=colours, height=0.72)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xticks([])
        axis.set_xlim(0, max(values) * 1.12)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.set_title(row.title, loc="left", fontsize=9.5, fontweight="bold")
        for place, value in enumerate(values):
            shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
            axis.annotate(shown, (value, place), (4, 0), textcoords="offset points", va="center")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Draw the chart, and return the exit code."""
    draw(RESULTS.read_text(), PICTURE)
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
