"""An executor of worker processes: the loader's own engine, pool and slots.

::

    whoever brings a result             the executor's thread                       a worker
    ───────────────────────             ─────────────────                       ────────
    task ── a deque, the engine ──────▶ engine.next_batch():
            is woken                    the item is a ticket ── a task ───────▶ op(item), its result
                                                                                written to the slot
    epoch.finished(task, result) ◀───── views of the slot ◀── a layout ────────

A worker's dataset is the op: ``dataset[item]`` calls it. The engine knows one endless epoch, and
gives results as they come; what order they have, and which of them nobody wants any more, is the
flow's affair. So workers persist from one epoch of the pipeline to the next, and an op that was in
work when an epoch was left is finished for nobody.

Guarantees:
    * A task whose epoch was left before it went to a worker is dropped.
    * ``join`` ends the workers within a bounded time, whatever they are at.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from shmloader.batch.fetch import FetchConfig
from shmloader.engine.engine import Engine
from shmloader.engine.inbox import Inbox
from shmloader.errors import ClosedLoaderError
from shmloader.memory.admission import MemoryAdmission, MemoryConfig
from shmloader.memory.limits import control_groups, free_memory
from shmloader.memory.slot import uncapped_slot_bytes
from shmloader.pipeline.epoch import Task
from shmloader.pipeline.ops import OpKind, call_all
from shmloader.pipeline.plan import Pipe
from shmloader.pools.arena import PageLocker
from shmloader.pools.process import ProcessPool
from shmloader.pools.worker_processes import WorkerProcesses
from shmloader.threads.background import BackgroundThread
from shmloader.threads.fork_safety import may_wait_here
from shmloader.threads.uninterruptible import uninterruptible

# How long the workers of all stages, one after the other, may take to come out of their ops before
# they are killed.
_GRACE_S = 0.3


class OpItems:
    """The dataset of a worker: indexed by an item, it gives what the op makes of it."""

    def __init__(self, op: Callable[[Any], Any]) -> None:
        self._op = op

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._op(item)
        except StopIteration as error:
            raise RuntimeError("the op raised StopIteration") from error


def as_it_is(result: Any) -> Any:
    """The collate function of a worker: results are no lists of samples."""
    return result


class _Stop(BaseException):
    """Ends the thread."""


class _Tickets(Inbox):
    """Items on their way to the engine, as many as its window has room for.

    Args:
        window: Most tickets in flight.
    """

    def __init__(self, window: int) -> None:
        super().__init__(_do_nothing)
        self.tasks: collections.deque[Task] = collections.deque()
        #: Those that the engine has, by the number of their ticket.
        self.sent: dict[int, Task] = {}
        self._window = window
        self._next_seq = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        """The next item. On the engine's thread."""
        while self.tasks and len(self.sent) < self._window:
            task = self.tasks.popleft()
            if not task.epoch.is_over:
                self.sent[self._next_seq] = task
                self._next_seq += 1
                return task.job.item
        raise StopIteration

    def __bool__(self) -> bool:
        return bool(self.tasks) and len(self.sent) < self._window


def _do_nothing() -> None:
    """Nobody waits for tickets, nor gives them on demand."""


class _Thread(BackgroundThread):
    """Runs the engine."""

    def __init__(self, name: str, engine: Engine, tickets: _Tickets, gives_many: bool) -> None:
        super().__init__(name)
        self._engine = engine
        self._tickets = tickets
        self._gives_many = gives_many
        self._is_stopping = False

    def wake(self) -> None:
        self._engine.wake()

    def stop(self) -> None:
        """From anywhere; does not wait."""
        self._is_stopping = True
        self.wake()

    def pause_or_stop(self) -> None:
        """Between two of the engine's steps: no lock is held."""
        if self._is_stopping:
            raise _Stop
        self.pause()

    def work(self) -> None:
        with contextlib.suppress(_Stop):
            while not self._is_stopping and self._serve_one():
                pass

    def close_what_it_uses(self) -> None:
        end(self._engine)

    def _serve_one(self) -> bool:
        """Wait for one result and bring it to its epoch; whether there may be a further one."""
        engine, sent = self._engine, self._tickets.sent
        try:
            result = engine.next_batch()
        except _Stop:
            raise
        except BaseException as error:  # noqa: BLE001 - the consumer is told
            delivery = engine.delivery
            if delivery is None:
                self._lose_all(error)
                return False
            task = sent.pop(delivery.seq)
            self._go_on(task.epoch.failed(task, error))
            return not engine.is_closed
        assert engine.delivery is not None
        task = sent.pop(engine.delivery.seq)
        results: tuple[object, ...] = () if result is None else (result,)
        if self._gives_many:
            results = tuple(result)  # type: ignore[arg-type]  # what call_all gave
        del result
        following = task.epoch.finished(task, *results)
        del results, task  # this frame waits next, and must not keep the slot
        self._go_on(following)
        return True

    def _go_on(self, task: Task | None) -> None:
        if task is not None:
            self._tickets.tasks.append(task)

    def _lose_all(self, error: BaseException) -> None:
        """The engine is closed: a worker died, or it cannot go on."""
        lost = [*self._tickets.sent.values(), *self._tickets.tasks]
        self._tickets.sent.clear()
        self._tickets.tasks.clear()
        for task in lost:
            task.epoch.broke(task, error)


def end(engine: Engine) -> None:
    """Close an engine that no thread runs any more."""
    try:
        engine.close()
    finally:
        engine.detach()  # it need not wait for the collector of cycles


class ProcessExecutor:
    """Runs one stage's tasks in worker processes.

    Start it before any thread of the pipeline: it may fork.

    Args:
        pipe: The stage.
        lent: Most results that lie in their slots at once; beyond, they are copied out.
        locker: Locks the slots' pages, if a device reads results out of them.
        sibling_count: How many such executors the pipeline has.
    """

    def __init__(
        self, pipe: Pipe, lent: int, locker: PageLocker | None, sibling_count: int = 1
    ) -> None:
        """Start the workers.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If the op cannot be pickled for a start
                method that needs it.
            OSError: If there are no descriptors or processes left.
        """
        self._pipe = pipe
        gives_many = pipe.kind is OpKind.GENERATOR
        op = functools.partial(call_all, pipe.op) if gives_many else pipe.op
        root = Path("/")
        demand = MemoryConfig(
            pipe.concurrency, 0, lent, None, free_memory(root, control_groups(root)), str(root),
            pipe.places,
        )  # fmt: skip
        workers = WorkerProcesses(
            None,
            pipe.concurrency,
            (OpItems(op), as_it_is, None, "raise"),
            FetchConfig(is_iterable=False, auto_collation=False, drop_last=False),
            int(torch.empty((), dtype=torch.int64).random_()),
            demand,
            grace_s=_GRACE_S / sibling_count,
        )
        self._pool = ProcessPool(
            workers,
            slot_bytes=uncapped_slot_bytes(),
            slot_count=pipe.places + lent,
            locker=locker,
            admission=MemoryAdmission(demand),
        )
        self._engine = Engine(
            self._pool,
            worker_count=pipe.concurrency,
            window=pipe.places,
            lend_limit=lent,
            in_order=False,
            timeout_s=0,
            is_dynamic=True,
        )
        self._tickets = _Tickets(pipe.places)
        self._thread = _Thread(
            f"shmloader_{pipe.name}"[:15], self._engine, self._tickets, gives_many
        )
        self._pool.enable_wake()
        self._engine.attach(self._tickets, self._thread.pause_or_stop, _call)

    def start(self) -> None:
        """Start the thread, after all workers of the pipeline."""
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether it runs nothing any more: a worker has died."""
        return self._engine.is_closed

    @property
    def pids(self) -> list[int]:
        """Process numbers of the workers."""
        return [process.pid or 0 for process in self._pool.processes]

    def put(self, task: Task) -> None:
        """Have a worker run a task. From any thread."""
        self._tickets.tasks.append(task)
        self._engine.wake()
        if self._engine.is_closed:  # looked at last: else nobody might take it
            task.epoch.broke(task, ClosedLoaderError("the stage's workers have been ended"))

    def end(self) -> None:
        """Have the thread end; from anywhere, does not wait."""
        self._thread.stop()

    def join(self, deadline: float) -> None:
        """After ``end``: end the workers and free the slots, but for those under live tensors.

        Args:
            deadline: Until when to wait for the thread, as ``time.monotonic()`` has it; workers
                have a moment more.
        """
        uninterruptible(functools.partial(self._join, deadline))

    def _join(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if not self._thread.join(left_s) and self._thread.leave_closing():
            # We are on a thread of ours, by way of the garbage collector; or it is stuck in reading
            # a result. It looks at what we would close, but for the workers.
            if may_wait_here():
                self._engine.end_workers()
            return
        end(self._engine)
        self._tickets.tasks.clear()
        self._tickets.sent.clear()


def _call(function: Callable[[], None]) -> None:
    function()
