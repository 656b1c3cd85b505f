"""What the engine makes of events, without process, thread or clock (``ScriptedPool``)."""

import errno
import time

import pytest

from shmloader.batch.failures import SampleReport
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.engine import Engine
from shmloader.engine.failures import FailureList, FailureWatch
from shmloader.engine.inbox import Inbox
from shmloader.errors import (
    ClosedLoaderError,
    LoaderTimeoutError,
    SharedMemoryError,
    TooManyFailures,
    WorkerDiedError,
)
from shmloader.pools.answers import Batch, Empty
from tests.pools.scripted import ScriptedPool


def nothing(pool: ScriptedPool) -> None:
    """No worker does anything."""


def everything(pool: ScriptedPool) -> None:
    """Each worker answers all that it has."""
    pool.answer_all()


def engine_of(idle=everything, worker_count=2, **options) -> tuple[Engine, ScriptedPool]:
    pool = ScriptedPool(worker_count, idle)
    defaults = {"window": 4, "lend_limit": 1, "in_order": True, "timeout_s": 0}
    return Engine(pool, worker_count=worker_count, **(defaults | options)), pool


def all_of(engine: Engine) -> list[int]:
    found = []
    while True:
        try:
            found.append(engine.next_batch())
        except StopIteration:
            return found


# Order -------------------------------------------------------------------------------------


def test_answers_are_put_back_in_order():
    engine, pool = engine_of(nothing)
    engine.start(iter(range(4)))
    assert pool.sent == {0: {0: 0, 2: 2}, 1: {1: 1, 3: 3}}
    for worker_id, seq in ((1, 3), (0, 2), (1, 1), (0, 0)):
        pool.answer(worker_id, seq)
    assert all_of(engine) == [0, 1, 2, 3]


def test_in_any_order_they_come_as_they_arrive():
    engine, pool = engine_of(nothing, in_order=False)
    engine.start(iter(range(4)))
    for worker_id, seq in ((1, 3), (0, 2), (1, 1), (0, 0)):
        pool.answer(worker_id, seq)
    assert all_of(engine) == [3, 2, 1, 0]


def test_one_ticket_is_drawn_for_each_batch_that_is_handed_over():
    drawn = []
    engine, _ = engine_of()
    engine.start(iter(lambda: drawn.append(len(drawn)) or len(drawn) - 1, None))
    for count in range(5):
        assert len(drawn) == 4 + count
        assert engine.next_batch() == count


def test_with_dynamic_dispatch_a_slow_worker_holds_up_its_own_batch_alone():
    engine, pool = engine_of(lambda pool: pool.answer(1), is_dynamic=True, window=3)
    engine.start(iter(range(6)))
    assert pool.sent == {0: {0: 0}, 1: {1: 1}}
    pool.idle = lambda pool: pool.answer(1) if pool.sent[1] else pool.answer(0)
    assert all_of(engine) == [0, 1, 2, 3, 4, 5]


class AnswersWhenAsked(ScriptedPool):
    """Each worker answers when the engine looks for its answer."""

    def poll(self, worker_id, events):
        assert worker_id is not None
        if not self.sent[worker_id]:
            return False
        self.answer(worker_id)
        return self.wait(0, events)


def test_with_dynamic_dispatch_an_answer_that_was_looked_for_makes_room_for_what_waits():
    pool = AnswersWhenAsked(2, nothing)
    engine = Engine(
        pool, worker_count=2, window=3, lend_limit=1, in_order=True, timeout_s=0, is_dynamic=True
    )
    engine.start(iter(range(3)))
    assert pool.sent == {0: {0: 0}, 1: {1: 1}}
    assert all_of(engine) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "needs_thread"),
    [
        ({"window": 2}, False),
        ({"window": 3}, True),
        ({"window": 2, "present": 1}, True),
        ({"window": 2, "sample_timeout_s": 1.0}, True),
        ({"window": 3, "is_dynamic": False}, False),
    ],
)
def test_a_thread_is_needed_where_a_ticket_may_wait_for_a_worker(options, needs_thread):
    engine, _ = engine_of(**{"is_dynamic": True, **options})
    assert engine.needs_thread == needs_thread


# Restarts ----------------------------------------------------------------------------------


def test_a_lost_worker_is_replaced_and_sent_what_it_had():
    engine, pool = engine_of(nothing, worker_restarts=1)
    engine.start(iter(range(4)))
    pool.answer(1)
    pool.die(0, at=0)
    pool.idle = everything
    assert all_of(engine) == [0, 1, 2, 3]
    assert pool.log.count(("replace", 0)) == 1
    assert engine.counts.restarts == 1


def test_a_batch_that_kills_two_workers_is_not_loaded_a_third_time():
    engine, pool = engine_of(lambda pool: pool.die(0, at=0), worker_restarts=5)
    engine.start(iter(range(4)))
    with pytest.raises(WorkerDiedError, match="not loaded a third time"):
        engine.next_batch()
    assert pool.log.count(("replace", 0)) == 1
    with pytest.raises(ClosedLoaderError):
        engine.next_batch()


def test_without_restarts_a_death_is_told_at_its_ticket_s_place():
    engine, pool = engine_of(nothing)
    engine.start(iter(range(4)))
    pool.die(1, at=1)
    pool.answer(0)
    assert engine.next_batch() == 0
    with pytest.raises(WorkerDiedError, match=r"worker \(pid 1001\) is killed by signal: Killed"):
        engine.next_batch()
    assert ("close",) in pool.log


# Bad samples -------------------------------------------------------------------------------


def watch(max_failures=None, *, keep_size=False) -> FailureWatch:
    return FailureWatch(FailureList(), max_failures, keep_size=keep_size, replaces=False)


def report(samples: int, failed: int) -> SampleReport:
    made = SampleReport()
    made.sample_count, made.failed_count = samples, failed
    return made


def test_a_batch_of_which_nothing_is_left_is_passed_over_and_replaced():
    engine, pool = engine_of(nothing, watch=watch())
    engine.start(iter(range(6)))
    pool.answer(0, answer=Empty(report(2, 2)))
    pool.answer(1, answer=Batch(1, report=report(2, 0)))
    assert engine.next_batch() == 1
    assert engine.delivery.left_out == (0,)
    # One ticket in place of each.
    assert pool.sent == {0: {2: 2, 4: 4}, 1: {3: 3, 5: 5}}


def test_too_many_failures_close_the_engine():
    engine, pool = engine_of(nothing, watch=watch(1))
    engine.start(iter(range(4)))
    pool.answer(0, answer=Batch(0, report=report(4, 1)))
    pool.answer(1, answer=Batch(1, report=report(4, 1)))
    assert engine.next_batch() == 0
    with pytest.raises(TooManyFailures, match="2 of the 8 samples"):
        engine.next_batch()
    assert ("close",) in pool.log


def test_an_epoch_in_which_all_samples_failed_raises_at_its_end():
    engine, pool = engine_of(nothing, watch=watch())
    engine.start(iter(range(1)))
    pool.answer(0, answer=Empty(report(3, 3)))
    with pytest.raises(TooManyFailures, match="all 3 samples of the epoch failed"):
        engine.next_batch()


def test_what_is_left_out_at_an_epoch_s_end_is_not_told_in_the_next():
    engine, pool = engine_of(nothing, watch=watch(), worker_count=1)
    engine.start(iter(range(2)))
    pool.answer(0, answer=Batch(0, report=report(2, 0)))
    pool.answer(0, answer=Empty(report(2, 2)))
    assert all_of(engine) == [0]
    pool.idle = everything
    engine.restart(iter(range(2)))
    assert engine.next_batch() == 0
    assert engine.delivery.left_out == ()


# Samples that hang -------------------------------------------------------------------------


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_worker_in_a_sample_that_hangs_is_replaced_and_the_sample_named(is_dynamic):
    engine, pool = engine_of(nothing, sample_timeout_s=2, is_dynamic=is_dynamic)
    engine.start(iter(range(4)))
    pool.hang(0, seq=0, sample=3)
    pool.idle = everything
    assert all_of(engine) == [0, 1, 2, 3]
    assert [one for one in pool.log if one[0] in ("kill", "replace")] == [
        ("kill", 0),
        ("replace", 0),
    ]
    assert pool.sent_hung == {0: {3: "Worker 0 (pid 1000) was killed in it."}}
    assert engine.counts.restarts == 1


def test_a_replacement_for_a_hung_sample_takes_no_restart_and_counts_as_no_death():
    """Four samples of one batch hang, one after the other, and then its worker dies once."""
    engine, pool = engine_of(nothing, sample_timeout_s=2, worker_restarts=1)
    engine.start(iter(range(4)))
    left = [5, 3, 1, 0]

    def hang_again(pool: ScriptedPool) -> None:
        if left:
            pool.hang(0, seq=0, sample=left.pop())
        else:
            pool.die(0, at=0)
            pool.idle = everything

    pool.idle = hang_again
    assert all_of(engine) == [0, 1, 2, 3]
    assert sorted(pool.sent_hung[0]) == [0, 1, 3, 5]
    assert engine.counts.restarts == 5


def test_a_sample_that_has_time_left_is_looked_at_again_when_it_has_not(monkeypatch):
    engine, pool = engine_of(nothing, sample_timeout_s=2)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(4)))
    pool.hang(0, seq=0, sample=0, left_s=0.5)
    began_s = pool.now_s

    def look(pool: ScriptedPool) -> None:
        if pool.hanging and pool.now_s == began_s:
            pool.hang(0, seq=0, sample=0, left_s=0.0)
        elif not pool.hanging:
            pool.answer_all()

    pool.idle = look
    assert engine.next_batch() == 0
    assert pool.now_s == began_s + 0.5


def test_a_worker_that_hangs_while_an_epoch_is_left_is_replaced_for_the_next():
    engine, pool = engine_of(nothing, sample_timeout_s=2)
    engine.start(iter(range(4)))
    pool.answer(1)
    pool.answer(0)
    assert engine.next_batch() == 0
    pool.hang(0, seq=2, sample=0)
    pool.idle = everything
    engine.restart(iter(range(4, 8)))
    assert all_of(engine) == [4, 5, 6, 7]
    assert pool.log.count(("replace", 0)) == 1
    assert not pool.sent_hung


# Epochs ------------------------------------------------------------------------------------


def test_a_further_epoch_begins_when_all_workers_have_left_the_one_before():
    engine, pool = engine_of(nothing)
    engine.start(iter(range(9)))
    pool.answer(0)
    assert engine.next_batch() == 0
    engine.restart(iter([10, 11]))
    pool.idle = everything
    assert all_of(engine) == [10, 11]
    assert pool.log == []  # the same workers


def test_a_worker_that_is_lost_between_epochs_is_replaced_for_the_next():
    engine, pool = engine_of(worker_restarts=1)
    engine.start(iter(range(4)))
    assert all_of(engine) == [0, 1, 2, 3]
    pool.die(1)
    engine.restart(iter(range(4)))
    assert all_of(engine) == [0, 1, 2, 3]
    assert pool.log == [("replace", 1)]


def test_a_worker_that_is_lost_while_an_epoch_is_left_begins_the_next_one_at_its_start():
    streams = DatasetCheckpoints.at_beginning(2, base_seed=1)
    engine, pool = engine_of(worker_restarts=1, checkpoints=streams)
    engine.start(iter(range(8)))
    assert [engine.next_batch() for _ in range(4)] == [0, 1, 2, 3]
    begin = pool.start_epoch

    def lose_instead(worker_id: int, epoch: int) -> None:
        if worker_id == 0:
            begin(worker_id, epoch)
        else:
            pool.die(worker_id)

    pool.start_epoch = lose_instead
    engine.restart(iter(range(4)))
    assert ("resume", 1, 0) in pool.log, "not behind the batches of the epoch before"
    assert all_of(engine) == [0, 1, 2, 3]


def test_a_slot_that_cannot_be_mapped_costs_its_batch_and_is_filled_again():
    engine, pool = engine_of(nothing, worker_count=1, window=1)

    def refuse(slot_id: int) -> None:
        raise SharedMemoryError("no address space is left")

    pool.memory.lock = refuse
    engine.start(iter(range(4)))
    for _ in range(3):  # there are two slots
        large = Batch("large")
        large.lends = True
        pool.answer(0, answer=large)
        with pytest.raises(SharedMemoryError, match="no address space is left"):
            engine.next_batch()
    pool.answer(0)
    assert engine.next_batch() == 3


# How many workers --------------------------------------------------------------------------


def test_a_wanted_worker_is_started_and_an_unwanted_one_ends_when_it_is_idle():
    engine, pool = engine_of(is_dynamic=True, present=1, window=4)
    numbers = iter(range(100))
    # As the user's thread draws.
    inbox = Inbox(lambda _: inbox.put(next(numbers), engine.wake))
    engine.attach(inbox, lambda: None, lambda function: function())

    def take(count: int) -> list[int]:
        found = []
        for _ in range(count):
            found.append(engine.next_batch())
            inbox.ask(False)
        return found

    for _ in range(2):  # a worker's share of the window
        inbox.ask(False)
    engine.want_workers(2)
    assert take(3) == [0, 1, 2]
    assert pool.log == [("start", 1)]
    assert engine.present_workers == 2
    assert next(numbers) == 7, "two tickets more were asked for, for the second worker"
    engine.want_workers(1)
    assert take(6) == [3, 4, 5, 6, 8, 9]
    assert pool.log == [("start", 1), ("retire", 1)]
    assert pool.sent[1] == {}
    assert engine.present_workers == 1


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "no descriptors are left"), RuntimeError("torch's is locked")]
)
def test_a_worker_that_cannot_be_started_is_not_tried_again_before_one_is_wanted(error, caplog):
    engine, pool = engine_of(is_dynamic=True, present=1, window=4)
    numbers = iter(range(100))
    # As the user's thread draws.
    inbox = Inbox(lambda _: inbox.put(next(numbers), engine.wake))
    engine.attach(inbox, lambda: None, lambda function: function())
    start = pool.start

    def refuse(worker_id: int) -> None:
        pool.log.append(("refuse", worker_id))
        raise error

    pool.start = refuse
    engine.want_workers(2)
    for number in range(5):
        inbox.ask(False)
        assert engine.next_batch() == number
    assert pool.log == [("refuse", 1)]
    assert [one.getMessage() for one in caplog.records] == [f"num_workers stays at 1: {error}"]
    pool.start = start
    engine.want_workers(2)
    inbox.ask(False)
    assert engine.next_batch() == 5
    assert pool.log == [("refuse", 1), ("start", 1)]
    assert engine.present_workers == 2


# Timeouts ----------------------------------------------------------------------------------


def test_a_late_batch_raises_after_its_time_and_comes_afterwards(monkeypatch):
    engine, pool = engine_of(nothing, timeout_s=7)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(4)))
    began_s = pool.now_s
    with pytest.raises(LoaderTimeoutError, match="timed out after 7 seconds"):
        engine.next_batch()
    assert pool.now_s - began_s == pytest.approx(7)
    pool.answer(0)
    assert engine.next_batch() == 0


def test_what_is_passed_over_begins_the_time_anew(monkeypatch):
    engine, pool = engine_of(nothing, timeout_s=7, watch=watch(), worker_count=1)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(3)))

    def after_five_seconds(pool: ScriptedPool) -> None:
        pool.now_s += 5
        seq = next(iter(pool.sent[0]))
        pool.answer(0, answer=Batch(2, report=report(1, 0)) if seq == 2 else Empty(report(1, 1)))

    pool.idle = after_five_seconds
    assert engine.next_batch() == 2
    assert pool.now_s == pytest.approx(115)


def test_workers_that_do_not_leave_an_epoch_in_time_close_the_engine(monkeypatch):
    engine, pool = engine_of(nothing, timeout_s=7)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(4)))
    pool.start_epoch = lambda worker_id, epoch: None
    with pytest.raises(LoaderTimeoutError, match="timed out after 7 seconds"):
        engine.restart(iter(range(4)))
    assert ("close",) in pool.log
