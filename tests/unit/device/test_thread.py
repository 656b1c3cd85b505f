"""How the thread that runs an engine ends, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmloader.device.exchange import UserThreadCall
from shmloader.device.stage import PassThroughStage
from shmloader.device.thread import EngineThread, ThreadOwner
from shmloader.engine.engine import Engine
from tests.pools.scripted import ScriptedPool
from tests.process.support import wait_until


class Restarting:
    """An engine that has the user's thread replace a worker for each batch."""

    is_dynamic = is_closed = False
    delivery = None

    def __init__(self) -> None:
        self.replaced = 0

    def attach(
        self,
        inbox: object,
        pause: Callable[[], None],
        have_done: Callable[[Callable[[], None]], None],
        may_deliver: object,
    ) -> None:
        self.have_done = have_done

    def replace(self) -> None:
        self.replaced += 1

    def next_batch(self) -> int:
        self.have_done(self.replace)
        return self.replaced

    def wake(self) -> None: ...


def test_a_thread_that_waits_for_the_user_s_ends_when_it_is_told_to() -> None:
    engine: Any = Restarting()
    thread = EngineThread(engine, PassThroughStage())
    thread.attach()
    thread.start()
    wait_until(lambda: isinstance(thread.results.first, UserThreadCall))
    assert thread.stop(5)
    assert engine.replaced == 0


def test_an_epoch_that_is_left_has_all_workers_load_what_was_drawn() -> None:
    """So that their random number generators advance as those of torch's workers do."""
    pool: Any = ScriptedPool(2, lambda pool: None)
    engine = Engine(pool, worker_count=2, window=4, lend_limit=1, in_order=True, timeout_s=0)
    owner = ThreadOwner(engine, PassThroughStage())
    thread = owner.begin()
    for number in range(3):  # the thread has not taken them yet
        thread.inbox.put(number, engine.wake)
    assert pool.sent == {0: {}, 1: {}}
    owner.end_epoch()
    assert pool.sent == {0: {0: 0, 2: 2}, 1: {1: 1}}
    assert owner.thread is None


def test_workers_end_at_once_though_the_thread_is_stuck_and_closes_the_rest() -> None:
    pool: Any = ScriptedPool(2, lambda pool: None)
    engine = Engine(pool, worker_count=2, window=4, lend_limit=1, in_order=True, timeout_s=0)
    owner = ThreadOwner(engine, PassThroughStage())
    thread: Any = owner.begin()
    thread.stop = lambda timeout_s: False
    owner.end()
    assert pool.log == [("end",)]
    assert engine.is_closed
    thread.close_what_it_uses()
    assert pool.log[-1] == ("close",)
