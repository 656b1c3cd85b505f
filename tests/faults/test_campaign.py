"""The fault campaign's own parts. Its cells run by ``make sample`` and ``make faults``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.campaign import COST, run_cells
from tests.faults.cells import all_cells, cell_of, effect_of, pairs_of, pairwise
from tests.faults.chaos import Chaos

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def nothing_remains() -> None:
    """In place of the check after each test: trials are processes of their own."""


def test_the_sample_covers_all_pairs() -> None:
    every = {pair for cell in all_cells() for pair in pairs_of(cell)}
    sample = list(pairwise(all_cells(), COST))
    assert {pair for cell in sample for pair in pairs_of(cell)} == every
    assert {cell.method for cell in sample} == {"fork", "spawn", "forkserver"}


def test_cells_run_and_are_judged() -> None:
    names = [
        "sigkill@task-fork-plain",
        "plain@getitem-fork-restarts",
        "sigint@main-next-fork-device",
    ]
    verdicts = list(run_cells([cell_of(name) for name in names], jobs=2, is_fresh=False))
    assert sorted(verdict.cell.id for verdict in verdicts) == sorted(names)
    assert [verdict.problems for verdict in verdicts] == [[], [], []]


def test_after_a_few_kills_at_random_times_nothing_is_amiss() -> None:
    chaos = Chaos(seed=5, kills=12)
    chaos.run(jobs=2)
    assert chaos.done >= 12
    assert not chaos.problems, "\n".join(text for _, text in chaos.problems)


def test_chaos_tells_problems_by_their_sort() -> None:
    chaos = Chaos(seed=5, kills=0)
    chaos.tell(3, Counter(), ["hang:\na stack", "leak: a process"])
    chaos.tell(4, Counter(), ["leak: a file", "wrong batch: leak: none", "other problem: x"])
    assert chaos.verdict == "1 hangs, 1 wrong batches, 2 leaks, 1 other problems"


def test_an_id_names_its_cell() -> None:
    for cell in all_cells():
        assert cell_of(cell.id) == cell
        assert effect_of(cell.fault, cell.point, cell.mode) is cell.effect
    for name in ("", "sigkill@task-fork", "plain@task-fork-plain", "sigkill@task-thread-plain"):
        with pytest.raises(ValueError, match="no cell"):
            cell_of(name)
