"""How the thread that runs an engine ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmloader.device.exchange import UserThreadCall
from shmloader.device.stage import PassThroughStage
from shmloader.device.thread import EngineThread
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
