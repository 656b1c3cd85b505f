"""A pool that exists for the tests: its one worker is the thread that waits for it."""

import collections
import os
from collections.abc import Callable
from typing import Any

from shmloader.batch.failures import RemoteError
from shmloader.insight.measurements import Counts, Readings
from shmloader.interruptions import Wakeup
from shmloader.pools.answers import Answer
from shmloader.pools.status_page import AtWork, Phase


class CallingPool:
    has_queue = True
    memory = None

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.counts, self.readings = Counts(), Readings()
        self.is_waiting = False
        self._make = make
        self._tasks: collections.deque[tuple[int, int, Any]] = collections.deque()
        self._wakeup = Wakeup()
        self._pid = os.getpid()
        self._at_work = AtWork(Phase.IDLE, 0, 0, 0.0)

    @property
    def is_inherited(self) -> bool:
        return os.getpid() != self._pid

    def send(self, ticket: Any, epoch: int) -> None:
        self._tasks.append((ticket.seq, epoch, ticket.indices))

    def recall(self) -> list[int]:
        recalled = [seq for seq, _, _ in self._tasks]
        self._tasks.clear()
        return recalled

    def start_epoch(self, worker_id: int, epoch: int) -> bool:
        return True

    def resume(self, worker_id: int, checkpoint: object) -> None: ...

    def poll(self, events: Any, worker_id: int = -1) -> bool:
        if not self._tasks:
            return False
        seq, epoch, indices = self._tasks.popleft()
        self._at_work = AtWork(Phase.LOADING, epoch, seq, 0.0)
        try:
            answer = Answer(self._make(indices))
        except Exception:
            answer = Answer(error=RemoteError.caught("on the thread that waits"))
        self._at_work = AtWork(Phase.IDLE, 0, 0, 0.0)
        events.answered(seq, epoch, 0, answer)
        return True

    def wait(self, timeout_s: float | None, events: Any) -> bool:
        self.is_waiting = True
        if not self._tasks:
            self._wakeup.wait(timeout_s)
        self.is_waiting = False
        return self.poll(events)

    def wake(self) -> None:
        self._wakeup.set()

    def enable_wake(self) -> None: ...

    def pid(self, worker_id: int) -> None: ...

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:
        return self._at_work

    def end_workers(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._tasks.clear()
        self._wakeup.set()
