"""The table of arguments in the documentation has each argument with its default."""

import inspect
import itertools
import re
from pathlib import Path

import pytest

from shmloader import DataLoader, ShardedDataLoader

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "arguments.md"
LOADERS = {"`DataLoader`": DataLoader, "`ShardedDataLoader`": ShardedDataLoader}


def read_rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def arguments() -> list[dict[str, str]]:
    """Return the rows of arguments, by column, each with its group."""
    header, _, *rows = read_rows()
    group, found = "", []
    for row in rows:
        assert len(row) == len(header), row
        if row[0].startswith("**"):
            group = row[0]
        else:
            found.append({"group": group, **dict(zip(header, row, strict=True))})
    return found


def written(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default!r}`"


@pytest.mark.parametrize("column", LOADERS)
def test_each_argument_is_in_the_table_with_its_default(column) -> None:
    table = {row["Argument"].strip("`"): row[column] for row in arguments()}
    signature = inspect.signature(LOADERS[column])
    expected = {name: written(each.default) for name, each in signature.parameters.items()}
    assert {name: default for name, default in table.items() if default != "–"} == expected


def test_no_argument_is_there_twice_and_each_is_explained() -> None:
    names = [row["Argument"] for row in arguments()]
    assert len(set(names)) == len(names)
    for row in arguments():
        assert row["What it means"].endswith("."), row
        assert [row[column] for column in LOADERS] != ["–", "–"], row


def test_the_groups_are_those_of_the_docstring() -> None:
    """Of ``DataLoader``; ``ShardedDataLoader`` refers to it for most of its arguments."""
    text = inspect.getdoc(DataLoader).partition("Args:\n")[2].partition("\nAttributes:")[0]
    found = re.findall(r"^    (?:(\*\*.+?\*\*)|(\w+):)", text, re.MULTILINE)
    groups = itertools.accumulate((group for group, _ in found), lambda old, new: new or old)
    documented = {name: group for group, (_, name) in zip(groups, found, strict=True) if name}
    table = {
        row["Argument"].strip("`"): row["group"]
        for row in arguments()
        if row["`DataLoader`"] != "–"
    }
    assert table == documented
