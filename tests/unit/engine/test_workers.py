"""The table of a worker's states."""

import itertools

import pytest

from shmloader.engine.workers import WorkerState, WorkerTable
from shmloader.errors import InternalError

GONE, STARTING, READY, LEAVING, LOST, DEAD = (
    WorkerState.GONE,
    WorkerState.STARTING,
    WorkerState.READY,
    WorkerState.LEAVING,
    WorkerState.LOST,
    WorkerState.DEAD,
)

#: How a worker gets into each state.
WAYS = {
    STARTING: [],
    READY: [READY],
    LEAVING: [LEAVING],
    GONE: [LEAVING, GONE],
    LOST: [LOST],
    DEAD: [DEAD],
}

#: What may become of it then.
NEXT = {
    STARTING: {READY, LEAVING, LOST, DEAD},
    READY: {LEAVING, LOST, DEAD},
    LEAVING: {STARTING, READY, GONE, LOST, DEAD},
    GONE: {STARTING},
    LOST: {STARTING},
    DEAD: set(),
}


def worker_in(state: WorkerState) -> WorkerTable:
    table = WorkerTable(1, 1)
    for step in WAYS[state]:
        table.move(0, step)
    return table


@pytest.mark.sampled(32)
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


@pytest.mark.parametrize("state", WorkerState)
def test_what_is_counted_is_what_is_so(state):
    table = worker_in(state)
    assert table.present_count == (state not in {GONE, LEAVING})
    assert table.are_all_dead == (state in {GONE, LEAVING, DEAD})
    assert (table.first_dead() is table[0]) == (state is DEAD)
    assert (table.next_restart() is table[0]) == (state is LOST)
    assert (table.next_start() is table[0]) == (state is GONE)
    assert (table.next_stop() is table[0]) == (state is LEAVING)


@pytest.mark.parametrize("end", [GONE, LOST, DEAD])
def test_what_is_known_of_a_process_is_forgotten_with_it(end):
    table = worker_in(LEAVING)
    worker = table[0]
    worker.last_answer_ns = 5
    table.move(0, end)
    assert worker.last_answer_ns == 0


def test_the_last_workers_leave_first_and_the_first_stay_first():
    table = WorkerTable(4, 4)
    table.wanted_count = 2
    table.balance()
    assert [worker.state for worker in table] == [STARTING, STARTING, LEAVING, LEAVING]
    table.wanted_count = 3
    table.balance()
    assert [worker.state for worker in table] == [STARTING, STARTING, STARTING, LEAVING]


def test_a_worker_that_is_lost_does_not_leave():
    table = WorkerTable(2, 2)
    table.move(0, LOST)
    table.move(1, LOST)
    table.wanted_count = 1
    table.balance()
    assert [worker.state for worker in table] == [LOST, LOST]


@pytest.mark.parametrize(("answer_ns", "state"), [(0, STARTING), (7, READY)])
def test_a_worker_that_stays_is_what_it_was(answer_ns, state):
    table = worker_in(LEAVING)
    table[0].last_answer_ns = answer_ns
    table.let_all_stay()
    assert table[0].state is state
    assert table.wanted_count == 1


def test_which_workers_are_wanted_depends_on_their_number_alone():
    """So that tables of several ranks agree, whatever has happened in each."""
    table = WorkerTable(4, 3)
    table.move(2, LOST)
    table.wanted_count = 2
    table.balance()
    assert [worker.state for worker in table] == [STARTING, STARTING, LOST, GONE]
    assert table.next_start() is None
    table.move(2, STARTING)
    table.balance()
    assert [worker.state for worker in table] == [STARTING, STARTING, LEAVING, GONE]
    table.wanted_count = 4
    table.balance()
    assert table[2].state is STARTING
    assert table.next_start() is table[3]
