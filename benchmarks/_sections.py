"""Writes the sections of RESULTS.md, one for each benchmark, and the rows of their tables."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

_SECTION = re.compile(r"<!-- begin (\S+) -->\n.*?<!-- end \1 -->\n", re.DOTALL)


def put_section(path: Path, name: str, lines: Sequence[str]) -> None:
    """Replace a section of a page, or append it.

    Args:
        path: The page, which need not exist.
        name: The section's name, which is that of the program that writes it.
        lines: Its lines.
    """
    text = path.read_text() if path.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = "\n".join([f"<!-- begin {name} -->", *lines, f"<!-- end {name} -->", ""])
    for found in _SECTION.finditer(text):
        if found[1] == name:
            path.write_text(text[: found.start()] + new + text[found.end() :])
            return
    path.write_text(text + ("\n" if text else "") + new)


def find_sections(path: Path) -> str:
    """Return all sections of a page unchanged, for a program that rewrites the rest of it."""
    if not path.exists():
        return ""
    return "".join("\n" + found[0] for found in _SECTION.finditer(path.read_text()))


def judge(values: Sequence[float], wanted: float, *, is_most: bool) -> tuple[str, str]:
    """Return the goal of a figure, and whether the median of its rounds reaches it, in words.

    Args:
        values: The figure, or a ratio, by round.
        wanted: The goal: the most that the figure should be, or the least.
        is_most: Whether ``wanted`` is the most; else it is the least.
    """

    def reaches(value: float) -> bool:
        return value <= wanted if is_most else value >= wanted

    is_met, met = reaches(statistics.median(values)), [reaches(value) for value in values]
    verdict = "reached" if is_met else "**falls short**"
    if any(one != is_met for one in met):
        verdict += f" ({sum(met)} of {len(met)} rounds reach it)"
    return f"{'≤' if is_most else '≥'} {wanted:g}", verdict


def write_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows)]


def three_digits(value: float) -> str:
    """Return a figure with three significant digits; from 1,000 on without a fraction."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
