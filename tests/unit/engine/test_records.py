"""The tables of slots and of workers: every move, and which slot is taken."""

import pytest

from shmloader.engine.records import SlotState, SlotTable, WorkerState, WorkerTable
from shmloader.errors import InternalError

FREE, TAKEN, LENT = SlotState


def test_slots_are_made_up_to_the_capacity_and_no_further():
    table = SlotTable(capacity=2)
    assert [table.take(0), table.take(1)] == [0, 1]
    with pytest.raises(InternalError, match="all slots are in use"):
        table.take(0)


@pytest.mark.parametrize(
    ("fillers", "worker_id", "slot_id"),
    [
        ((0,), 1, 0),  # a free slot, before a new one is made
        ((7, 8, 9), 7, 0),  # the slot that the worker filled
        ((7, 8, 7, 9), 7, 2),  # that it filled last
        ((7, 8, 9), 1, 2),  # the one freed last, with none of its own
    ],
)
def test_a_worker_gets_the_free_slot_that_is_most_likely_warm(fillers, worker_id, slot_id):
    """Slot i was filled by the i-th of these workers; they are freed in that order."""
    table = SlotTable(capacity=9)
    for taken in [table.take(filler) for filler in fillers]:
        table.free(taken)
    assert table.take(worker_id) == slot_id
    table.free(slot_id)
    assert table.take(worker_id) == slot_id, "it belongs to the worker that filled it last"


def test_the_first_worker_that_is_missing_is_started():
    table = WorkerTable(5, 3)
    assert table.present_count == 3
    assert table.next_missing() is None
    table.wanted_count = 5
    assert table.next_missing() is table[3]
    table[2].state = WorkerState.LOST
    assert table.next_missing() is table[2]
