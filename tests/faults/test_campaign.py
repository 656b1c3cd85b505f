"""A sample of the fault campaign that covers what its parts are pairwise; see ``pairs_of``.

Every cell runs with ``make faults``. Here a trial is forked from an interpreter that has imported
torch and nothing of ours. Two run at a time: ahead of the tests that wait for them, unless
pytest-xdist runs several tests at a time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from tests.faults.campaign import COST, run_cells
from tests.faults.cells import all_cells, cell_of, effect_of, pairs_of, pairwise
from tests.faults.chaos import Chaos
from tests.faults.harness import Starter, Verdict, run_trial

pytestmark = pytest.mark.timeout(300)

SAMPLE = list(pairwise(all_cells(), COST))


@pytest.fixture
def nothing_remains() -> None:
    """In place of the check after each test: trials go on meanwhile, and are checked one by one."""


class Verdicts:
    """Of trials that run in the background; asked for one by one."""

    def __init__(self, ids: list[str]) -> None:
        self._stopping = threading.Event()
        self._arrived: dict[str, queue.SimpleQueue[Verdict]] = {
            name: queue.SimpleQueue() for name in ids
        }
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        cells = [cell_of(name) for name in self._arrived]
        for verdict in run_cells(cells, jobs=2, is_fresh=False, stopping=self._stopping):
            self._arrived[verdict.cell.id].put(verdict)

    def of(self, name: str) -> Verdict:
        return self._arrived[name].get(timeout=240)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()


class VerdictsOnDemand:
    """Of trials that run when they are asked for."""

    def __init__(self) -> None:
        self._starter = Starter(is_fresh=False)

    def of(self, name: str) -> Verdict:
        return run_trial(cell_of(name), self._starter)

    def close(self) -> None:
        self._starter.close()


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[Verdicts | VerdictsOnDemand]:
    """Of the cells that this run of pytest has selected."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        on_demand = VerdictsOnDemand()
        yield on_demand
        on_demand.close()
        return
    found = Verdicts(
        [
            item.callspec.params["cell"].id
            for item in request.session.items
            if getattr(item, "originalname", "") == "test_a_fault_is_seen_for_what_it_is"
        ]
    )
    yield found
    found.close()


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.id)
def test_a_fault_is_seen_for_what_it_is(cell, verdicts) -> None:
    verdict = verdicts.of(cell.id)
    if verdict.problems:
        pytest.fail("\n".join([cell.effect.value, *verdict.problems]), pytrace=False)


def test_the_sample_covers_all_pairs() -> None:
    every = {pair for cell in all_cells() for pair in pairs_of(cell)}
    assert {pair for cell in SAMPLE for pair in pairs_of(cell)} == every


def test_after_a_few_kills_at_random_times_nothing_is_amiss() -> None:
    chaos = Chaos(seed=5, kills=12)
    chaos.run(jobs=2)
    assert chaos.done >= 12
    assert chaos.problems == []


def test_an_id_names_its_cell() -> None:
    for cell in all_cells():
        assert cell_of(cell.id) == cell
        assert effect_of(cell.fault, cell.point, cell.mode) is cell.effect
    for name in ("", "sigkill@task-fork", "plain@task-fork-plain", "sigkill@task-thread-plain"):
        with pytest.raises(ValueError, match="no cell"):
            cell_of(name)
