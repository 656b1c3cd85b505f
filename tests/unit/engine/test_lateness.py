"""Whom a timeout asks, in which order, and what it says of them."""

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


def test_a_batch_of_another_epoch_is_told_by_its_number_alone():
    pool = Threads(loading(0, epoch=7), IDLE, IDLE)
    head, first, *_ = told(pool, set(), in_order=True)
    assert "Batch 0 (index 0) waits for a worker. " in head
    assert first == "Worker thread 0 has been loading batch 0 for 1.0 s."
