"""Writes results into ``docs/reliability.md``: a section for each command."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.faults.cells import FAULTS, METHODS, MODES, POINTS, Cell, all_cells

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def write_campaign(results: Iterable[tuple[Cell, bool]]) -> None:
    """Write the table of faults and points.

    Args:
        results: Each cell that was run, and whether it was right.
    """
    table: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    methods: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    total: Counter[bool] = Counter()
    for cell, is_right in results:
        table[cell.fault.name, cell.point.name][is_right] += 1
        methods[cell.method] += 1
        modes[cell.mode.name] += 1
        total[is_right] += 1
    points = [name for name in POINTS if any(place == name for _, place in table)]
    lines = [
        (
            f"{_where_and_when()}. **{total.total()} of {len(all_cells())} cells were run: "
            f"{total[True]} right, {total[False]} not.**"
        ),
        "",
        "By start method: "
        + _listed(methods, METHODS)
        + ". By mode: "
        + _listed(modes, MODES)
        + ".",
        "",
        (
            "A number is how many trials of this fault at this point were right, over all start "
            "methods and modes. Where some were not, the field has two numbers: right / all. In an "
            "empty field, the fault and the point do not combine."
        ),
        "",
        "| fault | " + " | ".join(points) + " |",
        "|---|" + "---|" * len(points),
    ]
    for fault in FAULTS:
        fields = [_count(table.get((fault, point))) for point in points]
        if any(fields):
            lines.append(f"| {fault} | " + " | ".join(fields) + " |")
    _replace("campaign", lines)


def write_chaos(
    seed: int, kills: int, minutes: float, counts: Counter[str], verdict: str, problems: list[str]
) -> None:
    """Write the results of the kills at random times.

    Args:
        seed: Seed of the run.
        kills: Number of kills.
        minutes: How long the run took.
        counts: How often each thing happened.
        verdict: How many problems of each sort there were.
        problems: The problems, in words.
    """
    lines = [
        (
            f"{_where_and_when()}; {minutes:.0f} minutes, `--seed {seed}`: **{kills} kills, "
            f"{verdict}**."
        ),
        "",
        "| | |",
        "|---|---|",
        *[f"| {name} | {counts[name]:,} |" for name in sorted(counts)],
        "",
        (
            "A step is a batch that was checked, the end of an epoch, a death that an error "
            "reported, or a worker that was replaced. The separate counts of these are only of the "
            "programs that were not killed in the end."
        ),
        *[f"- {problem.splitlines()[0]}" for problem in problems],
    ]
    _replace("chaos", lines)


def write_host(seed: int, kills: int, minutes: float, table: dict[str, dict[str, int]]) -> None:
    """Write the results of the kills among the ranks of a host.

    Args:
        seed: Seed of the run.
        kills: Number of kills.
        minutes: How long the run took.
        table: For each victim, the counts by their headings.
    """
    total: Counter[str] = Counter()
    for counts in table.values():
        total.update(counts)
    names = [name for name in next(iter(table.values())) if name != "kills"]
    problems = ", ".join(f"{total[name]} {name}" for name in names[:-1])
    lines = [
        (
            f"{_where_and_when()}; {minutes:.0f} minutes, `--seed {seed}`: **{kills} kills, "
            f"{problems}**."
        ),
        "",
        "| killed | " + " | ".join(["times", *names]) + " |",
        "|---|" + "---|" * (len(names) + 1),
        *[
            f"| {victim} | " + " | ".join(f"{count:,}" for count in counts.values()) + " |"
            for victim, counts in table.items()
        ],
    ]
    _replace("host", lines)


def write_environments(results: Iterable[tuple[str, str, str]]) -> None:
    """Write the table of environments.

    Args:
        results: For each trial: the environment, the loader, and the outcome. Environments whose
            names differ only in the name of an error at the end share a row.
    """
    kinds: dict[str, None] = {}
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, loader, outcome in results:
        kind, _, variant = name.rpartition(" ") if _VARIANT.search(name) else (name, "", "")
        kinds[loader] = None
        row = table.setdefault(kind, {}).setdefault(loader, {})
        row.setdefault(outcome, []).append(variant)
    lines = [
        f"{_where_and_when()}, workers by fork.",
        "",
        "| where | " + " | ".join(kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for kind, row in table.items():
        fields = [_outcomes(row.get(loader, {})) for loader in kinds]
        lines.append(f"| {kind} | " + " | ".join(fields) + " |")
    _replace("environments", lines)


_VARIANT = re.compile(r" E[A-Z]+$")


def _outcomes(found: dict[str, list[str]]) -> str:
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{outcome} ({', '.join(names)})" for outcome, names in found.items())


def _where_and_when() -> str:
    return (
        f"{dt.datetime.now(tz=dt.UTC).date()}, {os.cpu_count()} cores, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def _listed(counts: Counter[str], order: Iterable[str]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in order if counts[name])


def _count(found: Counter[bool] | None) -> str:
    if found is None:
        return ""
    return f"{found[True]} / {found.total()}" if found[False] else str(found[True])


def _replace(section: str, lines: list[str]) -> None:
    """Replace the lines between the section's marks."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    text = PAGE.read_text()
    body = "\n".join([begin, *lines, end])
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: body, text, flags=re.DOTALL))
