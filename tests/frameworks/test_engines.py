"""Which engine runs under each framework, whether its batches are torch's, and the page of it."""

import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from tests.docs.test_blocks import ROOT, blocks_of, run_pasted
from tests.frameworks.scenarios import SCENARIOS, Seen
from tests.frameworks.support import assert_equal, engines, seed_everything

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

WORKERS = [0, 2]

PAGE = ROOT / "docs" / "howto" / "frameworks.md"
BLOCKS = [
    pytest.param(block, id=block.name)
    for block in blocks_of(PAGE)
    if "shmloader.integrations" in block.code
]
BEGIN, END = "<!-- table: tests/frameworks/test_engines.py -->", "<!-- end of the table -->"


def run(name: str, cls: Any, workers: int, folder: Path) -> tuple[Seen, set[str]]:
    seed_everything()
    with engines() as found:
        seen = SCENARIOS[name].run(cls, workers, folder)
    return seen, found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], set[str]]:
    """The engines that were found, by scenario and way ("class", "install")."""
    return {}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_batches_are_those_of_torch_on_either_engine(name, workers, tmp_path, found):
    theirs, on = run(name, TorchLoader, workers, tmp_path)
    assert on == {"torch"}
    with shmloader.installed() as report:
        ours, on = run(name, TorchLoader, workers, tmp_path)
    assert {row.engine for row in report.loaders} == on
    assert_equal(ours, theirs)
    found.setdefault((name, "install"), set()).update(on)
    if SCENARIOS[name].takes_class:
        ours, on = run(name, shmloader.DataLoader, workers, tmp_path)
        assert_equal(ours, theirs)
        found.setdefault((name, "class"), set()).update(on)


def table(found: dict[tuple[str, str], set[str]]) -> str:
    """The table of the documentation, of the engines that were found."""
    lines = [
        "| framework | `shmloader.DataLoader` as it is | `install()` | adapter | why |",
        "|---|---|---|---|---|",
    ]
    for name, scenario in SCENARIOS.items():
        ways = [
            "yes" if found.get((name, way)) == {"shmloader"} else "no"
            for way in ("class", "install")
        ]
        cells = [scenario.name, *ways, scenario.adapter or "–", scenario.why or "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_in_the_documentation_is_what_was_found(found):
    if len({name for name, _ in found}) < len(SCENARIOS):
        pytest.skip("not all scenarios were run")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    committed, after = rest.split(END)
    if os.environ.get("SHMLOADER_WRITE_TABLE"):
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")
    assert committed.strip() == table(found), (
        "run make test-frameworks with SHMLOADER_WRITE_TABLE=1"
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_the_page_run_as_pasted(block, tmp_path, monkeypatch):
    run_pasted([block], tmp_path, monkeypatch)


def test_the_page_has_blocks_for_frameworks():
    assert len(BLOCKS) >= 3
