"""``shmloader.sequence.prefetch``: the engine behind a sequence."""

import os
import signal

import pytest
import torch

from shmloader import SharedMemoryError, WorkerDiedError
from shmloader.loader import resumable
from shmloader.sequence import prefetch, smap
from tests.process.support import Bad, Gate, Slots, wait_for_end, wait_until

SOON_S = 20.0


@pytest.fixture(params=["thread", "process"])
def method(request):
    return request.param


def test_items_are_computed_ahead_as_many_as_may_be_buffered():
    asked, leads = [], []
    index = 0

    def note(number):
        asked.append(number)
        leads.append(number - index)
        return number

    items = prefetch(smap(note, range(100)), 2, max_buffered=4)
    assert asked == []
    for index in range(20):
        assert items[index] == index
        wait_until(lambda index=index: len(asked) > index + 4, SOON_S)
    assert max(leads) == 4
    assert sorted(asked) == list(range(24))  # nobody begins anew while the reader reads on
    items.close()


def test_a_jump_keeps_the_worker():
    items = prefetch(smap(lambda _: os.getpid(), range(30)), 1, "process")
    assert len({items[index] for index in (0, 1, 20, 5, 5, 6)}) == 1


def test_reading_on_goes_on_and_another_item_begins_anew(method):
    items = prefetch(smap(lambda number: number * 2, range(30)), 2, method, max_buffered=3)
    assert [items[index] for index in range(10)] == list(range(0, 20, 2))
    assert items[20] == 40
    assert items[21] == 42
    assert items[21] == 42
    assert items[-1] == 58
    assert items[0] == 0
    assert list(items) == list(range(0, 60, 2))
    assert list(items[25:]) == [50, 52, 54, 56, 58]


def test_without_memfd_torchs_workers_load_the_items(monkeypatch):
    monkeypatch.setattr(resumable, "why_unsupported", lambda: "so")
    items = prefetch(smap(lambda number: (number, os.getpid()), range(30)), 2, "process")
    with pytest.warns(RuntimeWarning, match="runs on torch's own workers"):
        assert items[0][0] == 0
    assert [items[index][0] for index in range(1, 6)] == [1, 2, 3, 4, 5]
    pids = {items[20][1], items[21][1], items[3][1], items[4][1]}  # a jump keeps the workers
    assert len(pids) == 2
    assert [number for number, _ in items] == list(range(30))
    items.close()
    for pid in pids:
        wait_for_end(pid)
    with pytest.warns(RuntimeWarning, match="runs on torch's own workers"):
        assert items[7][0] == 7
    items.close()


def test_an_empty_sequence_has_no_items(method):
    items = prefetch([], 1, method)
    assert list(items) == []
    with pytest.raises(IndexError):
        items[0]


@pytest.mark.sampled(1)
def test_a_failed_item_raises_and_the_next_ones_come(method):
    def op(number):
        if number in {1, 3}:
            raise Bad(f"no {number}")
        return number

    items = prefetch(smap(op, range(5)), 2, method)
    assert items[0] == 0
    with pytest.raises(Bad, match="no 1"):
        items[1]
    assert items[2] == 2
    with pytest.raises(Bad, match="no 3"):
        items[3]
    assert items[4] == 4


def test_items_of_processes_lie_in_slots_under_a_cap(slots: Slots):
    large = smap(lambda number: torch.full((100_000,), number, dtype=torch.uint8), range(20))
    items = prefetch(large, 2, "process", max_buffered=4, shm_size="8MiB")
    for index, item in enumerate(items):
        assert bool((item == index).all())
    assert 1 <= len(slots.maps()) <= 4 + 4
    assert sum(slots.maps().values()) <= 8 << 20
    del item
    items.close()
    assert slots.maps() == {}
    tight = prefetch(large, 1, "process", max_buffered=1, shm_size="384KiB")
    with pytest.raises(SharedMemoryError):
        tight[0]


def test_a_dead_worker_is_told_and_the_next_item_has_a_new_one():
    gate = Gate()

    def op(number):
        if number == 1:
            gate.open()
            gate.wait_until_open(60)
            gate.pass_through()
        return os.getpid()

    items = prefetch(smap(op, range(9)), 1, "process", max_buffered=1)
    pid = items[0]
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    with pytest.raises(WorkerDiedError):
        items[1]
    assert items[2] != pid


def test_a_start_hook_runs_in_each_worker(method):
    state = {"started": 0}

    def hook():
        state["started"] += 1

    items = prefetch(smap(lambda _: state["started"], range(4)), 1, method, start_hook=hook)
    assert list(items) == [1, 1, 1, 1]


def test_a_sequence_has_the_length_that_it_had_when_it_was_made():
    numbers = list(range(5))
    items = prefetch(numbers, 1, max_buffered=1)
    assert items[0] == 0
    numbers.extend(range(5))
    with pytest.raises(IndexError):
        items[7]
    assert list(items) == list(range(5))


def test_a_forked_child_has_workers_of_its_own(method):
    lazy = prefetch(range(4), 1, method)
    assert lazy[0] == 0
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if list(lazy) == [0, 1, 2, 3] else 2
            lazy.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lazy[1] == 1
