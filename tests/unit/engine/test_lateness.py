"""Whom a timeout asks, in which order, and what it says of them."""

import pytest

from shmloader.engine.lateness import late_batch
from shmloader.engine.scheduler import Scheduler
from shmloader.pools.status_page import AtWork, Phase


class Threads:
    """What a pool with a queue says of its workers."""

    has_queue = True

    def __init__(self, *at_work: AtWork) -> None:
        self._at_work = at_work

    def pid(self, worker_id: int) -> None:
        """None."""

    def was_at(self, worker_id: int) -> AtWork:
        return self._at_work[worker_id]

    ask = was_at


def loading(seq: int, epoch: int = 0) -> AtWork:
    return AtWork(Phase.LOADING, epoch, seq, 1.0)


def told(pool: Threads, answered: set[int], *, in_order: bool) -> list[str]:
    """What is told of tickets 0 to 3, of which some are answered."""
    scheduler = Scheduler(3, 4, 0, in_order=in_order, has_queue=True)
    for seq in range(4):
        assert scheduler.offer([seq]).seq == seq
    for seq in answered:
        scheduler.answered(seq, 0, object(), taker=0)
    return str(late_batch(5, pool, scheduler, [0, 1, 2])).splitlines()


IDLE = AtWork(Phase.IDLE, 0, 0, 3.0)


@pytest.mark.parametrize("worker_id", [0, 1, 2])
def test_who_has_what_is_waited_for_comes_first(worker_id):
    at_work = [IDLE] * 3
    at_work[worker_id] = loading(0)
    head, first, *others = told(Threads(*at_work), {1}, in_order=True)
    assert f"Batch 0 (index 0) is with worker thread {worker_id}. No batch is lost" in head
    assert first == f"Worker thread {worker_id} has been loading batch 0 (index 0) for 1.0 s."
    idle = [number for number in range(3) if number != worker_id]
    assert others == [f"Worker thread {number} has been idle for 3.0 s." for number in idle]


def test_out_of_order_all_that_have_not_come_are_waited_for():
    pool = Threads(IDLE, loading(2), loading(0))
    head, *work = told(pool, {1}, in_order=False)
    for seq, place in ((0, "is with worker thread 2"), (2, "is with worker thread 1")):
        assert f"Batch {seq} (index {seq}) {place}. " in head
    assert "Batch 3 (index 3) waits for a worker. " in head
    assert "Batch 1" not in head
    assert [line.split()[2] for line in work] == ["2", "1", "0"]


def test_a_batch_of_another_epoch_is_told_by_its_number_alone():
    pool = Threads(loading(0, epoch=7), IDLE, IDLE)
    head, first, *_ = told(pool, set(), in_order=True)
    assert "Batch 0 (index 0) waits for a worker. " in head
    assert first == "Worker thread 0 has been loading batch 0 for 1.0 s."
