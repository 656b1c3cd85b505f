"""The table of a worker's states."""

import itertools

import pytest

from shmloader.engine.workers import WorkerState, WorkerTable
from shmloader.errors import InternalError

GONE, RUNNING, LEAVING, LOST, DEAD = (
    WorkerState.GONE,
    WorkerState.RUNNING,
    WorkerState.LEAVING,
    WorkerState.LOST,
    WorkerState.DEAD,
)

#: How a worker gets into each state.
WAYS = {RUNNING: [], LEAVING: [LEAVING], GONE: [LEAVING, GONE], LOST: [LOST], DEAD: [DEAD]}

#: What may become of it then.
NEXT = {
    RUNNING: {LEAVING, LOST, DEAD},
    LEAVING: {GONE, DEAD},
    GONE: {RUNNING},
    LOST: {RUNNING},
    DEAD: set(),
}


def worker_in(state: WorkerState) -> WorkerTable:
    table = WorkerTable(1, 1)
    for step in WAYS[state]:
        table.move(0, step)
    return table


@pytest.mark.parametrize(("old", "new"), list(itertools.product(WorkerState, repeat=2)))
def test_only_the_moves_of_the_table_are_allowed(old, new):
    table = worker_in(old)
    if new in NEXT[old]:
        table.move(0, new)
        assert table[0].state is new
    else:
        with pytest.raises(InternalError, match=r"worker 0 is .* and cannot be"):
            table.move(0, new)
        assert table[0].state is old


def test_the_last_workers_leave_and_the_first_that_is_missing_is_started():
    """By their numbers alone, so that tables of several ranks agree."""
    table = WorkerTable(5, 4)
    table.move(2, LOST)
    table.wanted_count = 2
    assert [table.next_leaving(), table.next_leaving()] == [table[3], None]
    assert [worker.state for worker in table] == [RUNNING, RUNNING, LOST, LEAVING, GONE]
    assert table.present_count == 3
    table.move(2, RUNNING)
    assert table.next_leaving() is table[2]
    table.wanted_count = 5
    assert table.next_start() is table[4]
    assert table.first(LEAVING) is table[2]
