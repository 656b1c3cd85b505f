"""What the engine says of its workers, as torch does, and when it ends one that is late."""

from dataclasses import replace

import pytest

from shmloader.engine.records import Worker
from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.engine.workers import (
    describe_death,
    describe_end,
    describe_indices,
    describe_loading,
    describe_restart,
    describe_work,
    end_hanging,
    late_batch,
)
from shmloader.grammar import describe_worker
from shmloader.pools.answers import Death
from shmloader.pools.status_page import AtWork, Phase


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (None, "the next sample"),
        ([None], "the next sample"),
        ([None] * 32, "the next 32 samples"),
        ([None, 3], "indices None, 3"),
        ([2624, 2625, 2626], "indices 2624 to 2626"),
        ((5, 6), "indices 5 to 6"),
        ([-1, 0, 1], "indices -1 to 1"),
        ([7], "index 7"),
        (["a"], "index 'a'"),
        ([3, 1, 2], "indices 3, 1, 2"),
        ([1, 1], "indices 1, 1"),
        ([], "no indices"),
        (list(range(0, 20, 2)), "10 indices: 0, 2, 4, 6, 8, 10, 12, 14, …"),
        (list(range(0, 16, 2)), "indices 0, 2, 4, 6, 8, 10, 12, 14"),
        (["a", ("b", 1)], "indices 'a', ('b', 1)"),
        (17, "index 17"),
        ("key", "index 'key'"),
    ],
)
def test_indices_are_told_in_a_few_words(indices, text):
    assert describe_indices(indices) == text


def test_a_long_index_does_not_make_a_long_text():
    assert len(describe_indices("x" * 10_000)) < 100
    assert len(describe_indices(["x" * 10_000] * 10_000)) < 500


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (-9, "DataLoader worker (pid 812) is killed by signal: Killed. "),
        (-11, "DataLoader worker (pid 812) is killed by signal: Segmentation fault. "),
        (3, "DataLoader worker (pid 812) exited unexpectedly with exit code 3. Details are lost"),
        (0, "DataLoader worker (pid 812) exited unexpectedly with exit code 0. "),
        (None, "DataLoader worker (pid 812) exited unexpectedly. "),
        (-60, "DataLoader worker (pid 812) is killed by signal: "),
        (-7, "DataLoader worker (pid 812) is killed by signal: Bus error. It is possible that"),
    ],
)
def test_a_worker_s_end_is_told_in_torch_s_words(exit_code, text):
    assert describe_end(Death(812, exit_code)).startswith(text)


def test_a_death_says_what_the_worker_had_to_load():
    ticket = Ticket(41, 3, 0, list(range(2624, 2688)))
    assert describe_death(3, Death(812, -9), ticket) == (
        "DataLoader worker (pid 812) is killed by signal: Killed. "
        "Worker 3 was loading batch 41 (indices 2624 to 2687). If nobody sent the signal, the "
        "kernel's out-of-memory killer did: lower num_workers or prefetch_factor, or allow more "
        "memory."
    )
    assert describe_death(3, Death(812, -15), None).endswith("Worker 3 had no batch to load.")


def test_a_worker_is_told_by_its_process_or_as_a_thread():
    assert describe_worker(3, 812) == "worker 3 (pid 812)"
    assert describe_worker(3, None) == "worker thread 3"
    assert describe_worker(3, 0) == "worker 3"
    ticket = Ticket(41, 3, 0, [7])
    told = "was loading batch 41 (index 7)."
    assert describe_loading(ticket, 812) == f"Worker 3 (pid 812) {told}"
    assert describe_loading(ticket, None) == f"Worker thread 3 {told}"


USERS = """  File "/data/set.py", line 7 in decode
  File "/data/set.py", line 3 in __getitem__"""
STACK = f"""{USERS}
  File "/lib/shmloader/batch/maker.py", line 120 in make
  File "/lib/shmloader/pools/batch_server.py", line 300 in _make"""

INIT_STACK = """  File "/data/set.py", line 9 in connect
  File "/lib/shmloader/pools/worker_dataset.py", line 340 in introduce
  File "/lib/shmloader/pools/worker.py", line 210 in _prepare"""


@pytest.mark.parametrize(
    ("at_work", "ticket", "text"),
    [
        (
            AtWork(Phase.LOADING, 0, 41, 4.81, STACK),
            Ticket(41, 3, 0, [7]),
            f"loading batch 41 (index 7) for 4.8 s, the innermost call first:\n{USERS}",
        ),
        (
            AtWork(Phase.LOADING, 0, 41, 4.81, INIT_STACK),
            None,
            f"loading batch 41 for 4.8 s, the innermost call first:\n{INIT_STACK.splitlines()[0]}",
        ),
        (
            AtWork(Phase.LOADING, 0, 41, 4.81, is_stopped=True),
            None,
            "loading batch 41 for 4.8 s; the process is stopped (SIGSTOP).",
        ),
        (AtWork(Phase.IDLE, 0, 0, 2, STACK), None, "idle for 2.0 s."),
        (AtWork(Phase.STARTING, 0, 0, 2), None, "starting for 2.0 s."),
    ],
)
def test_what_a_worker_is_at(at_work, ticket, text):
    assert describe_work(3, 812, at_work, ticket) == f"Worker 3 (pid 812) has been {text}"


@pytest.mark.parametrize(("unfinished", "again"), [([5, 7], "5, 7"), ([], "none")])
def test_a_restart_says_why_and_what_is_loaded_again(unfinished, again):
    end = f"Worker 1 is replaced. Batches loaded again: {again}."
    killed, lost = Death(812, -9), Death(812, None, reason="the node is gone")
    for death, hang, why in (
        (killed, "", "DataLoader worker (pid 812) is killed by signal: Killed. "),
        (killed, "Worker 1 took longer. ", "Worker 1 took longer. "),
        (lost, "", "DataLoader worker exited unexpectedly: the node is gone. "),
    ):
        worker = Worker(1, death=death, unfinished=unfinished, hang=hang)
        assert describe_restart(worker) == why + end


TIMEOUT_S = 60.0


class Pool:
    """What a pool with a queue says of its workers, and whom it was told to end."""

    has_queue = True

    def __init__(self, *left_s: float) -> None:
        self._left_s = left_s
        self.ended: list[int] = []

    def pid(self, worker_id: int) -> int:
        return 812 + worker_id

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:
        left_s = self._left_s[worker_id]
        return AtWork(Phase.LOADING, 0, worker_id, 1.0, sample=0, sample_left_s=left_s)

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


def test_an_error_shows_the_code_of_the_user_in_which_a_sample_hung():
    pool = Pool(-1.0)
    at_work = pool.was_at(0)
    pool.was_at = lambda _, with_stack=False: replace(at_work, stack=STACK if with_stack else "")
    scheduler = Scheduler(1, 1, 0, in_order=True, has_queue=True)
    ticket = scheduler.offer([0])
    assert end_hanging(pool, scheduler, TIMEOUT_S) == TIMEOUT_S
    killed = "Worker 0 (pid 812) was killed in it, the innermost call first:"
    assert ticket.hung[0] == f"{killed}\n{USERS}"


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
    late = pool.was_at(0)
    looks = iter([late, late, again])
    pool.was_at = lambda *_, **__: next(looks)
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
    pool.was_at = lambda worker_id, **_: AtWork(Phase.LOADING, epoch, worker_id, 1.0)
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
