"""When the engine looks again at what its workers do, and what a timeout says of them."""

from dataclasses import replace

import pytest

from shmloader.engine.scheduler import Scheduler
from shmloader.engine.workers import end_hanging, late_batch
from shmloader.pools.status_page import AtWork, Phase

TIMEOUT_S = 60.0


class Threads:
    """What a pool with a queue says of its workers, and whom it was told to end."""

    has_queue = True

    def __init__(self, *left_s: float) -> None:
        self._left_s = left_s
        self.ended: list[int] = []

    def pid(self, worker_id: int) -> None:
        """None."""

    def was_at(self, worker_id: int) -> AtWork:
        left_s = self._left_s[worker_id]
        return AtWork(Phase.LOADING, 0, worker_id, 1.0, sample=0, sample_left_s=left_s)

    ask = was_at

    def kill(self, worker_id: int, seq: int) -> bool:
        assert seq == worker_id
        self.ended.append(worker_id)
        return True


@pytest.mark.parametrize(
    ("left_s", "ended", "wait_s"),
    [
        ((60.0, 60.0), [], 60.0),
        ((5.0, 3.0), [], 3.0),
        ((5.0, -1.0), [1], 0.0),
        ((-1.0, 5.0), [0], 0.0),
        ((0.0, -1.0), [0, 1], 0.0),
    ],
)
def test_a_worker_that_was_ended_is_replaced_before_the_engine_waits(left_s, ended, wait_s):
    pool = Threads(*left_s)
    scheduler = Scheduler(2, 2, 0, in_order=True, has_queue=True, has_slots=False)
    for seq in range(2):
        assert scheduler.offer([seq]).seq == seq
    assert end_hanging(pool, scheduler, TIMEOUT_S) == wait_s
    assert pool.ended == ended
    for worker_id in ended:
        assert scheduler.workers[worker_id].hang == (
            f"Worker thread {worker_id} took longer than 60 s (sample_timeout) for a sample of "
            f"batch {worker_id} (index {worker_id}). "
        )
        (hung,) = scheduler.tickets[worker_id].hung.values()
        assert hung == f"Worker thread {worker_id} was left behind in it."


STACK = """  File "/home/me/data.py", line 7 in decode
  File "/home/me/data.py", line 3 in __getitem__
  File "/site/shmloader/batch/fetch.py", line 1 in load"""


def test_an_error_shows_the_code_of_the_user_in_which_a_sample_hung():
    pool = Threads(-1.0)
    pool.pid = lambda worker_id: 812
    pool.ask = lambda worker_id: replace(pool.was_at(0), stack=STACK)
    scheduler = Scheduler(1, 1, 0, in_order=True, has_queue=True, has_slots=False)
    ticket = scheduler.offer([0])
    assert end_hanging(pool, scheduler, TIMEOUT_S) == 0
    assert ticket.hung[0] == (
        "Worker 0 (pid 812) was killed in it, the innermost call first:\n"
        '  File "/home/me/data.py", line 7 in decode\n'
        '  File "/home/me/data.py", line 3 in __getitem__'
    )


def at_sample(sample: int, *, seq: int = 0, left_s: float) -> AtWork:
    return AtWork(Phase.LOADING, 0, seq, 1.0, sample=sample, sample_left_s=left_s)


@pytest.mark.parametrize(
    "again",
    [
        at_sample(1, left_s=TIMEOUT_S),
        at_sample(0, seq=1, left_s=TIMEOUT_S),
        at_sample(0, left_s=TIMEOUT_S),
        AtWork(Phase.IDLE, 0, 0, 0.0),
    ],
    ids=["another sample", "another batch", "a coroutine that has begun", "idle"],
)
def test_a_worker_that_goes_on_while_it_is_asked_is_not_ended(again):
    pool = Threads(-1.0)
    looks = iter([pool.was_at(0), again])
    pool.was_at = lambda worker_id: next(looks)
    scheduler = Scheduler(1, 2, 0, in_order=True, has_queue=True, has_slots=False)
    for seq in range(2):
        scheduler.offer([seq])
    assert end_hanging(pool, scheduler, TIMEOUT_S) == TIMEOUT_S
    assert pool.ended == []
    assert all(ticket.hung is None for ticket in scheduler.tickets)


@pytest.mark.parametrize(
    ("in_order", "awaited"), [(True, "batch 0 (index 0)"), (False, "any of 4 batches")]
)
@pytest.mark.parametrize(("epoch", "loaded"), [(0, "batch 0 (index 0)"), (7, "batch 0")])
def test_a_timeout_says_what_is_awaited_and_what_each_worker_does(in_order, awaited, epoch, loaded):
    pool = Threads(1.0, 1.0)
    pool.was_at = pool.ask = lambda worker_id: AtWork(Phase.LOADING, epoch, worker_id, 1.0)
    scheduler = Scheduler(2, 4, 0, in_order=in_order, has_queue=True, has_slots=False)
    for seq in range(4):
        scheduler.offer([seq])
    head, first, *_ = str(late_batch(5, pool, scheduler)).splitlines()
    assert head == (
        f"DataLoader timed out after 5 seconds, waiting for {awaited}. No batch is lost. A for "
        "loop ends here; call next() on the same iterator to go on waiting, or raise timeout=. "
        "Without executor=, sample_timeout= replaces a worker whose sample hangs."
    )
    assert first == f"Worker thread 0 has been loading {loaded} for 1.0 s."
