"""Writes results into ``docs/reliability.md``: a section for each command."""

import datetime as dt
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def where_and_when() -> str:
    """Return the date, the machine, and the versions."""
    return (
        f"{dt.datetime.now(tz=dt.UTC).date()}, {os.cpu_count()} cores, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head, *rows]]
    return [lines[0], "|---" * (lines[0].count(" | ") + 1) + "|", *lines[1:]]


def write(section: str, *lines: str) -> None:
    """Replace the lines between the section's marks."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    body = "\n".join([begin, *lines, end])
    text = re.sub(f"{begin}.*?{end}", lambda _: body, PAGE.read_text(), flags=re.DOTALL)
    PAGE.write_text(text)
