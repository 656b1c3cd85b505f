"""Whom a timeout asks, in which order, and what it says of them."""

import pytest

from shmloader.engine.lateness import late_in_threads
from shmloader.workers.board import AtWork, Phase
from shmloader.workers.thread_task import ThreadAnswer, ThreadTask

EPOCH = 2


class Threads:
    """What a pool of threads says of itself."""

    worker_count = 3

    def __init__(self, *at_work: AtWork) -> None:
        self._at_work = at_work

    def pid(self, worker_id: int) -> None:
        """None."""

    def ask(self, worker_id: int) -> AtWork:
        return self._at_work[worker_id]


def task(seq: int, worker_id: int | None, *, is_ready: bool = False) -> ThreadTask:
    answer = ThreadAnswer() if is_ready else None
    return ThreadTask(seq, EPOCH, [seq], None, worker_id, answer)


def loading(epoch: int, seq: int) -> AtWork:
    return AtWork(Phase.LOADING, epoch, seq, 1.0)


def told(pool: Threads, tasks: list[ThreadTask], *, in_order: bool) -> list[str]:
    return str(late_in_threads(5, pool, tasks, EPOCH, in_order=in_order)).splitlines()


IDLE = AtWork(Phase.IDLE, 0, 0, 3.0)


@pytest.mark.parametrize("worker_id", [0, 1, 2])
def test_who_has_what_is_waited_for_comes_first(worker_id):
    at_work = [IDLE] * 3
    at_work[worker_id] = loading(EPOCH, 4)
    tasks = [task(4, worker_id), task(5, 0, is_ready=True), task(6, None)]
    head, first, *others = told(Threads(*at_work), tasks, in_order=True)
    assert f"Batch 4 (indices 4) is with worker thread {worker_id}. No batch is lost" in head
    assert first == f"Worker thread {worker_id} has been loading batch 4 (indices 4) for 1.0 s."
    idle = [number for number in range(3) if number != worker_id]
    assert others == [f"Worker thread {number} has had nothing to do for 3.0 s." for number in idle]


def test_out_of_order_all_that_have_not_come_are_waited_for():
    pool = Threads(IDLE, loading(EPOCH, 6), loading(EPOCH, 4))
    tasks = [task(4, 2), task(5, 0, is_ready=True), task(6, 1), task(7, None)]
    head, *work = told(pool, tasks, in_order=False)
    for seq, place in ((4, "is with worker thread 2"), (6, "is with worker thread 1")):
        assert f"Batch {seq} (indices {seq}) {place}. " in head
    assert "Batch 7 (indices 7) waits for a worker. " in head
    assert "Batch 5" not in head
    assert [line.split()[2] for line in work] == ["2", "1", "0"]


def test_a_batch_of_the_epoch_before_is_told_by_its_number_alone():
    pool = Threads(loading(EPOCH - 1, 4), IDLE, IDLE)
    _, first, *_ = told(pool, [task(4, None)], in_order=True)
    assert first == "Worker thread 0 has been loading batch 4 for 1.0 s."
