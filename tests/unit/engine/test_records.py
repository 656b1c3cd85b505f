"""The tables of slots and of workers: every move, and which slot is taken."""

import pytest

from shmloader.engine.records import SlotState, SlotTable, WorkerState, WorkerTable
from shmloader.errors import InternalError

FREE, TAKEN, LENT = SlotState


def table_with_slot(state: SlotState) -> tuple[SlotTable, int]:
    table = SlotTable(capacity=3)
    slot_id = table.take(worker_id=0)
    if state is LENT:
        table.lend(slot_id)
    elif state is FREE:
        table.free(slot_id)
    return table, slot_id


@pytest.mark.parametrize(
    ("old", "move", "new"), [(TAKEN, "lend", LENT), (TAKEN, "free", FREE), (LENT, "free", FREE)]
)
def test_a_legal_move_changes_the_state(old, move, new):
    table, slot_id = table_with_slot(old)
    getattr(table, move)(slot_id)
    assert table.states[slot_id] is new
    assert table.free_ids == ([slot_id] if new is FREE else [])
    assert table.lent_count == (new is LENT)


@pytest.mark.parametrize(("old", "move"), [(FREE, "lend"), (FREE, "free"), (LENT, "lend")])
def test_an_illegal_move_is_refused_and_changes_nothing(old, move):
    table, slot_id = table_with_slot(old)
    before = ([*table.states], [*table.free_ids], table.lent_count)
    with pytest.raises(InternalError, match=rf"slot {slot_id} is with {old.value}"):
        getattr(table, move)(slot_id)
    assert (table.states, table.free_ids, table.lent_count) == before


def test_slots_are_made_up_to_the_capacity_and_no_further():
    table = SlotTable(capacity=2)
    assert [table.take(0), table.take(1)] == [0, 1]
    with pytest.raises(InternalError, match="all slots are in use"):
        table.take(0)


def test_a_free_slot_is_taken_before_a_new_one_is_made():
    table = SlotTable(capacity=9)
    table.free(table.take(0))
    assert table.take(1) == 0


def freed(*worker_ids: int) -> SlotTable:
    """A table whose slot i was filled by the i-th of these workers; freed in that order."""
    table = SlotTable(capacity=len(worker_ids))
    for slot_id in [table.take(worker_id) for worker_id in worker_ids]:
        table.free(slot_id)
    return table


def test_a_worker_gets_the_slot_that_it_filled_last():
    assert freed(7, 8, 9).take(worker_id=7) == 0
    assert freed(7, 8, 7, 9).take(worker_id=7) == 2


def test_a_worker_with_no_slot_of_its_own_gets_the_one_freed_last():
    assert freed(7, 8, 9).take(worker_id=1) == 2


def test_a_slot_belongs_to_the_worker_that_filled_it_last():
    table = freed(7, 8)
    slot_id = table.take(worker_id=9)
    assert slot_id == 1
    table.free(slot_id)
    assert table.take(worker_id=7) == 0
    assert table.take(worker_id=8) == 1


RUNNING, LEAVING, GONE, LOST, _ = WorkerState


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
    assert table.next_missing() is table[4]
    assert table.first(LEAVING) is table[2]
