"""A pool without processes, threads or clock: the test says what its workers do, and when."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.engine.delivery import Instead
from shmloader.insight.measurements import Counts, Readings
from shmloader.pools.answers import Answer, Death
from shmloader.pools.status_page import AtWork, Phase


def next_of(engine: Any) -> Any:
    """The next batch of an engine; what comes in its place is raised, as ``next()`` does it."""
    return call_of(engine.next_batch)


def call_of(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of an engine, and raise what an ``Instead`` carries."""
    try:
        return function(*args)
    except Instead as instead:
        error = instead.error
    raise error


class Content:
    def __init__(self, batch: Any, *, lends: bool) -> None:
        self.batch, self.lends = batch, lends

    def read(self, slot: object, lease: object) -> Any:
        return self.batch


class ScriptedPool:
    """A pool whose workers do only what the test says by :meth:`answer` and similar methods.

    Attributes:
        hanging: By worker, the sample that hangs in it.
        sent_hung: By ticket, the samples that were sent along as hung.
        sent: By worker, the indices of the tickets that it has not answered, by their numbers.
        log: What the engine asked the pool to do with workers and slots, in order.
        now_s: The time for :meth:`wait`. A wait that gets no event takes its whole timeout.
        idle: Called when the engine waits and there is no event, so that the test can make one.
    """

    has_queue = is_inherited = False
    is_waiting = False

    def __init__(self, worker_count: int, idle: Callable[[ScriptedPool], None]) -> None:
        self.memory: Any = SimpleNamespace(
            counts=Counts(),
            ended=(),
            is_short=False,
            batches=0,
            mapped=lambda slot_id: None,
            slots=[None] * 100,
            locks_pages=True,
        )
        self.counts, self.readings = self.memory.counts, Readings()
        self.sent: dict[int, dict[int, Any]] = {number: {} for number in range(worker_count)}
        self.log: list[tuple[Any, ...]] = []
        self.now_s = 100.0
        self.idle = idle
        self.epoch = 0
        self.hanging: dict[int, AtWork] = {}
        self.sent_hung: dict[int, dict[int, str]] = {}
        self._events: collections.deque[tuple[Any, ...]] = collections.deque()

    # What the test says --------------------------------------------------------------------

    def answer(
        self,
        worker_id: int,
        seq: int | None = None,
        answer: Answer | None = None,
        *,
        lends: bool = False,
    ) -> None:
        """Answer a worker's oldest task, or the one with a number, by default with its indices."""
        tasks = self.sent[worker_id]
        seq = next(iter(tasks)) if seq is None else seq
        indices = tasks.pop(seq)
        answer = answer or Answer(indices)
        answer.content = Content(answer.content, lends=lends)
        self._events.append(("answered", seq, self.epoch, worker_id, answer))

    def answer_all(self) -> None:
        for worker_id, tasks in self.sent.items():
            for _ in range(len(tasks)):
                self.answer(worker_id)

    def hang(self, worker_id: int, seq: int, sample: int, left_s: float = 0.0) -> None:
        """Let a worker hang in a sample of a ticket, with so much time left for the sample."""
        self.hanging[worker_id] = AtWork(
            Phase.LOADING, self.epoch, seq, 1.0, sample=sample, sample_left_s=left_s
        )

    def die(self, worker_id: int, at: int | None = None) -> None:
        """Lose a worker, which was loading ticket ``at``."""
        self.sent[worker_id].clear()
        self._events.append(("lost", worker_id, Death(1000 + worker_id, -9)))

    # What the engine asks -------------------------------------------------------------------

    def send(self, ticket: Any, epoch: int) -> None:
        self.sent[ticket.worker_id][ticket.seq] = ticket.indices
        if ticket.hung:
            self.sent_hung[ticket.seq] = dict(ticket.hung)

    def recall(self) -> list[int]:
        return []

    def start_epoch(self, worker_id: int, epoch: int) -> bool:
        self._events.append(("epoch_entered", worker_id, Checkpoint()))
        self.epoch = epoch
        return False

    def poll(self, events: Any, worker_id: int = -1) -> bool:
        return False

    def wait(self, timeout_s: float | None, events: Any) -> bool:
        until_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        if not self._events:
            self.idle(self)
        if until_s is not None and self.now_s > until_s:
            self.now_s = until_s  # events are later than the timeout
            return False
        if not self._events:
            assert until_s is not None, "the engine would wait for ever"
            self.now_s = until_s
            return False
        while self._events:
            name, *values = self._events.popleft()
            if name == "epoch_entered":  # after all tasks of the epoch before
                for seq in list(self.sent[values[0]]):
                    self.sent[values[0]].pop(seq)
                    events.answered(seq, self.epoch - 1, values[0], Answer())
            getattr(events, name)(*values)
        return True

    def pid(self, worker_id: int) -> int:
        return 1000 + worker_id

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:
        if worker_id in self.hanging:
            return self.hanging[worker_id]
        seq = next(iter(self.sent[worker_id]), None)
        if seq is None:
            return AtWork(Phase.IDLE, 0, 0, 0.0)
        return AtWork(Phase.LOADING, self.epoch, seq, 0.0)

    def kill(self, worker_id: int) -> None:
        self.log.append(("kill", worker_id))
        self.hanging.pop(worker_id)
        self.sent[worker_id].clear()
        self._events.append(("lost", worker_id, Death(1000 + worker_id, -9)))

    def start(self, worker_id: int) -> None:
        self.log.append(("start", worker_id))

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        self.log.append(("resume", worker_id, checkpoint.given))

    def wake(self) -> None: ...

    enable_wake = wake

    def end_workers(self) -> None:
        self.log.append(("end",))

    def close(self) -> None:
        self.log.append(("close",))
