"""When the engine looks again at what its workers do, and what a timeout says of them."""

from dataclasses import replace

import pytest

from shmloader.engine.scheduler import Scheduler
from shmloader.engine.workers import end_hanging, late_batch
from shmloader.pools.status_page import AtWork, Phase

TIMEOUT_S = 60.0


class Pool:
    """What a pool with a queue says of its workers, and whom it was told to end."""

    has_queue = True

    def __init__(self, *left_s: float) -> None:
        self._left_s = left_s
        self.ended: list[int] = []

    def pid(self, worker_id: int) -> int:
        return 812 + worker_id

    def was_at(self, worker_id: int) -> AtWork:
        left_s = self._left_s[worker_id]
        return AtWork(Phase.LOADING, 0, worker_id, 1.0, sample=0, sample_left_s=left_s)

    ask = was_at

    def kill(self, worker_id: int) -> None:
        self.ended.append(worker_id)


@pytest.mark.parametrize(
    ("left_s", "ended", "wait_s"),
    [
        ((60.0, 60.0), [], 60.0),
        ((5.0, 3.0), [], 3.0),
        ((5.0, -1.0), [1], 5.0),
        ((-1.0, 5.0), [0], 5.0),
        ((0.0, -1.0), [0, 1], 60.0),
    ],
)
def test_a_worker_that_is_late_is_ended_and_the_others_are_looked_at_in_time(left_s, ended, wait_s):
    pool = Pool(*left_s)
    scheduler = Scheduler(2, 2, 0, in_order=True, has_queue=True)
    for seq in range(2):
        assert scheduler.offer([seq]).seq == seq
    assert end_hanging(pool, scheduler, TIMEOUT_S) == wait_s
    assert pool.ended == ended
    for worker_id in ended:
        assert scheduler.workers[worker_id].hang == (
            f"Worker {worker_id} (pid {812 + worker_id}) took longer than 60 s (sample_timeout) "
            f"for a sample of batch {worker_id} (index {worker_id}). "
        )
        (hung,) = scheduler.tickets[worker_id].hung.values()
        assert hung == f"Worker {worker_id} (pid {812 + worker_id}) was killed in it."


STACK = """  File "/home/me/data.py", line 7 in decode
  File "/home/me/data.py", line 3 in __getitem__
  File "/site/shmloader/batch/fetch.py", line 1 in load"""


def test_an_error_shows_the_code_of_the_user_in_which_a_sample_hung():
    pool = Pool(-1.0)
    pool.ask = lambda worker_id: replace(pool.was_at(0), stack=STACK)
    scheduler = Scheduler(1, 1, 0, in_order=True, has_queue=True)
    ticket = scheduler.offer([0])
    assert end_hanging(pool, scheduler, TIMEOUT_S) == TIMEOUT_S
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
    pool = Pool(-1.0)
    looks = iter([pool.was_at(0), again])
    pool.was_at = lambda worker_id: next(looks)
    scheduler = Scheduler(1, 2, 0, in_order=True, has_queue=True)
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
    pool = Pool(1.0, 1.0)
    pool.was_at = pool.ask = lambda worker_id: AtWork(Phase.LOADING, epoch, worker_id, 1.0)
    scheduler = Scheduler(2, 4, 0, in_order=in_order, has_queue=True)
    for seq in range(4):
        scheduler.offer([seq])
    head, first, *_ = str(late_batch(5, pool, scheduler)).splitlines()
    assert head == (
        f"DataLoader timed out after 5 seconds, waiting for {awaited}. No batch is lost. A for "
        "loop ends here; call next() on the same iterator to go on waiting, or raise timeout=. "
        "With worker processes, sample_timeout= replaces one whose sample hangs."
    )
    assert first == f"Worker 0 (pid 812) has been loading {loaded} for 1.0 s."
