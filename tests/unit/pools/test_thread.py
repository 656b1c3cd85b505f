"""When a thread is left behind, and when it is not."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.pools.thread import ThreadPool
from shmloader.pools.thread_task import ThreadConfig
from tests.process.support import Calls


def test_a_thread_that_has_gone_on_to_another_batch_is_not_left_behind() -> None:
    begun, go = threading.Event(), threading.Event()

    def load(index: int) -> int:
        begun.set()
        assert go.wait(20)
        return index

    answers = []
    events: Any = SimpleNamespace(
        answered=lambda seq, epoch, worker_id, answer: answers.append((seq, answer.content))
    )
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False)
    config = ThreadConfig(plan, Calls(load, 9), list, "raise")
    pool = ThreadPool(1, weakref.ref(config))
    try:
        ticket: Any = SimpleNamespace(seq=4, indices=[7], hung=None)
        pool.send(ticket, 0)
        assert begun.wait(20)
        assert not pool.kill(0, 3)
        go.set()
        assert pool.wait(20, events)
    finally:
        go.set()
        pool.close()
    assert answers == [(4, [7])]
