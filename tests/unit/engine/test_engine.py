"""What the engine makes of events, without process, thread or clock (``ScriptedPool``)."""

import time

import pytest

from shmloader.batch.failures import SampleReport
from shmloader.engine.engine import Engine
from shmloader.engine.failures import FailureList, FailureWatch
from shmloader.engine.scheduler import Scheduler
from shmloader.errors import SharedMemoryError
from shmloader.pools.answers import Answer
from tests.pools.scripted import ScriptedPool, next_of


def nothing(pool: ScriptedPool) -> None:
    """No worker does anything."""


def everything(pool: ScriptedPool) -> None:
    """Each worker answers all that it has."""
    pool.answer_all()


def engine_of(idle=everything, worker_count=2, window=4, **options) -> tuple[Engine, ScriptedPool]:
    pool = ScriptedPool(worker_count, idle)
    scheduler = Scheduler(worker_count, window, 1, in_order=True)
    return Engine(pool, scheduler, **({"timeout_s": 0} | options)), pool


def all_of(engine: Engine) -> list[int]:
    found = []
    while True:
        try:
            found.append(next_of(engine))
        except StopIteration:
            return found


def watch(max_failures=None, *, keep_size=False) -> FailureWatch:
    return FailureWatch(FailureList(), max_failures, keep_size=keep_size, replaces=False)


def answer_of(batch: int | None, samples: int) -> Answer:
    """A batch of so many samples, or none because all of them failed."""
    failed = samples if batch is None else 0
    answer = Answer(batch, SampleReport(samples, failed))
    answer.is_empty = batch is None
    return answer


def test_what_is_left_out_is_told_with_the_next_batch():
    engine, pool = engine_of(nothing, watch=watch(), worker_count=1)
    engine.start(iter(range(3)))
    for batch in (None, None, 2):
        pool.answer(0, answer=answer_of(batch, 2))
    assert next_of(engine) == 2
    assert engine.delivery.seq == 2
    assert [ticket.seq for ticket in engine.delivery.left_out] == [0, 1]


def test_what_is_left_out_at_an_epoch_s_end_is_not_told_in_the_next():
    engine, pool = engine_of(nothing, watch=watch(), worker_count=1)
    engine.start(iter(range(2)))
    pool.answer(0, answer=answer_of(0, 2))
    pool.answer(0, answer=answer_of(None, 2))
    assert all_of(engine) == [0]
    pool.idle = everything
    engine.restart(iter(range(2)))
    assert next_of(engine) == 0
    assert engine.delivery.left_out == ()


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
    assert next_of(engine) == 0
    assert pool.now_s == began_s + 0.5


def test_a_slot_that_cannot_be_mapped_costs_its_batch_and_is_filled_again():
    engine, pool = engine_of(nothing, worker_count=1, window=1)

    def refuse(slot_id: int) -> None:
        raise SharedMemoryError("no address space is left")

    pool.memory.lock = refuse
    engine.start(iter(range(4)))
    for _ in range(3):  # there are two slots
        large = Answer("large")
        large.lends = True
        pool.answer(0, answer=large)
        with pytest.raises(SharedMemoryError, match="no address space is left"):
            next_of(engine)
    pool.answer(0)
    assert next_of(engine) == 3


def test_what_is_passed_over_begins_the_time_anew(monkeypatch):
    engine, pool = engine_of(nothing, timeout_s=7, watch=watch(), worker_count=1)
    monkeypatch.setattr(time, "monotonic", lambda: pool.now_s)
    engine.start(iter(range(3)))

    def after_five_seconds(pool: ScriptedPool) -> None:
        pool.now_s += 5
        seq = next(iter(pool.sent[0]))
        pool.answer(0, answer=answer_of(2 if seq == 2 else None, 1))

    pool.idle = after_five_seconds
    assert next_of(engine) == 2
    assert pool.now_s == pytest.approx(115)
