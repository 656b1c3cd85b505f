"""When a thread is left behind."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.pools.thread import ThreadConfig, ThreadPool
from tests.process.support import Calls


class Answers(list[tuple[int, Any]]):
    """What is told of a pool: the numbers of its tickets, and their batches."""

    def answered(self, seq: int, epoch: int, worker_id: int, answer: Any) -> None:
        self.append((seq, answer.content))


@contextlib.contextmanager
def opened(load: Callable[[int], Any]) -> Iterator[ThreadPool]:
    """One thread, which was sent ticket 4 with index 7."""
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False)
    config = ThreadConfig(plan, Calls(load, 9), list, "raise")
    ticket: Any = SimpleNamespace(seq=4, indices=[7], hung=None)
    with contextlib.closing(ThreadPool(1, weakref.ref(config))) as pool:
        pool.send(ticket, 0)
        yield pool


def test_a_thread_that_has_gone_on_to_another_batch_is_not_left_behind() -> None:
    begun, go = threading.Event(), threading.Event()
    answers: Any = Answers()

    def load(index: int) -> int:
        begun.set()
        assert go.wait(20)
        return index

    with opened(load) as pool:
        try:
            assert begun.wait(20)
            assert not pool.kill(0, 3)
        finally:
            go.set()
        assert pool.wait(20, answers)
    assert answers == [(4, [7])]
