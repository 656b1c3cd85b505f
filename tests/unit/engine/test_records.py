"""The tables of slots and of workers: every move, and which slot is taken."""

import pytest

from shmloader.engine.records import SlotState, SlotTable, WorkerState, WorkerTable
from shmloader.errors import InternalError

FREE, TAKEN, LENT = SlotState


def test_slots_are_made_up_to_the_capacity_and_no_further():
    table = SlotTable(capacity=2)
    assert [table.take(), table.take()] == [0, 1]
    with pytest.raises(InternalError, match="all slots are in use"):
        table.take()


def test_the_slot_that_was_freed_last_is_taken_first():
    table = SlotTable(capacity=9)
    for taken in [table.take() for _ in range(3)]:
        table.free(taken)
    assert [table.take() for _ in range(4)] == [2, 1, 0, 3]


def test_the_first_worker_that_is_missing_is_started():
    table = WorkerTable(5, 3)
    assert table.present_count == 3
    assert table.next_missing() is None
    table.wanted_count = 5
    assert table.next_missing() is table[3]
    table[2].state = WorkerState.LOST
    assert table.next_missing() is table[2]
