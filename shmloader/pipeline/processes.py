"""Runs a stage's op in worker processes, with the loader's own engine, pool and slots.

::

    any thread that brings a result     the executor's thread                   a worker
    ───────────────────────────────     ─────────────────────                   ────────
    job ── a deque; wakes the ────────▶ engine.next_batch():
            engine                      the item is a ticket ── a task ───────▶ op(item), its result
                                                                                written to the slot
    flow.finished(job, result) ◀─────── views of the slot ◀── a layout ────────

For the workers, the op looks like a dataset: ``dataset[item]`` calls it. The engine sees one
endless epoch, and returns results as they come. The flow puts them in order if asked to, and drops
them if it was left. So workers persist from one epoch of the pipeline to the next.

Guarantees:
    * A job whose epoch was left before it went to a worker is dropped.
    * ``join`` ends the workers within a bounded time, even if ops are blocked.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import FetchConfig
from shmloader.engine.delivery import Instead
from shmloader.engine.engine import Engine, OwnThread, Stopped
from shmloader.engine.scheduler import Scheduler
from shmloader.errors import ClosedLoaderError
from shmloader.memory.arena import Arena
from shmloader.memory.flat import is_debugging
from shmloader.memory.limits import MemoryConfig
from shmloader.pipeline.config import StageConfig, call_all, results_of
from shmloader.pipeline.stages import Job
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.process import ProcessPool
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.starting import OwnWorkers
from shmloader.pools.task_queue import TaskQueue

# How long the workers of all stages, one stage after the other, may take to leave their ops before
# they are killed, in seconds.
_GRACE_S = 0.3


class OpItems:
    """The dataset of a worker: indexed by an item, it returns the op's result.

    If ``setup`` has failed, it returns a ``RemoteError``.

    Args:
        op: The op.
        setup: Called before the first item; None if the stage has none.
    """

    def __init__(self, op: Callable[..., Any], setup: Callable[[], Any] | None) -> None:
        self.op, self._setup = op, setup
        self._context: tuple[Any, ...] = ()

    def __getitem__(self, item: Any) -> Any:
        if self._setup is not None and not self._context:
            try:
                self._context = (self._setup(),)
            except Exception as error:  # noqa: BLE001 - raised to the consumer
                return RemoteError.of(error, "in a worker process")
        return self.op(item, *self._context)


def unchanged(result: Any) -> Any:
    """Return the result: the collate function of a worker, whose results are not samples."""
    return result


class ProcessExecutor(OwnThread):
    """Runs the jobs of one stage in worker processes. Its thread runs the engine.

    The constructor starts the workers, and may fork. So it is called before the pipeline starts a
    thread.

    Args:
        stage: The stage.
        lend_limit: How many results may lie in their slots at once; further ones are copied out.
        locker: Page-locks the slots, if a device reads results out of them; else None.
        executor_count: How many such executors the pipeline has.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If the op cannot be pickled for a start
            method that needs it.
        OSError: If there are no descriptors or processes left.
    """

    def __init__(
        self, stage: StageConfig, lend_limit: int, locker: PageLocker | None, executor_count: int
    ) -> None:
        super().__init__(f"shmloader_{stage.name}"[:15])
        self._stage = stage
        self._window = window = stage.capacity
        # Jobs that the engine has not taken yet, and those that it has, by their tickets' numbers.
        self._jobs: collections.deque[Job] = collections.deque()
        self._sent: dict[int, Job] = {}
        self._numbers = itertools.count()
        op = functools.partial(call_all, stage.op) if stage.makes_many else stage.op
        count, memory = stage.concurrency, MemoryConfig(stage.concurrency, window + lend_limit)
        arena = Arena.create(None, window + lend_limit)
        config = FetchConfig(is_iterable=False, auto_collation=False, drop_last=False)
        tasks = TaskConfig(config, arena, TaskQueue(), memory, is_debugging())
        objects = (OpItems(op, stage.setup), None, unchanged, "raise")
        seed, names = int(torch.empty((), dtype=torch.int64).random_()), (stage.title,)
        starter = OwnWorkers(None, count, objects, tasks, seed, names)
        grace_s = _GRACE_S / executor_count
        pool = ProcessPool(starter, tasks, count, locker, may_replace=False, grace_s=grace_s)
        scheduler = Scheduler(count, window, lend_limit, in_order=False, has_queue=True)
        self.engine = Engine(pool, scheduler, timeout_s=0)
        self.engine.resume()
        pool.enable_wake()
        self.engine.attach(self)

    # What the engine asks of its thread: see :class:`shmloader.engine.engine.OwnThread`. Jobs come
    # without a request, and workers are not replaced, so that no call starts one. --------------

    @property
    def has_ticket(self) -> bool:
        """Whether there is a job, and space for it in the engine's window."""
        return bool(self._jobs) and len(self._sent) < self._window

    def next_ticket(self) -> object:
        """Return the next job's item, or raise StopIteration for now."""
        while self.has_ticket:
            job = self._jobs.popleft()
            if not job.flow.is_over:
                self._sent[next(self._numbers)] = job
                return job.item
        raise StopIteration

    def work(self) -> None:
        """Run the engine until :meth:`end`, or until it is closed."""
        with contextlib.suppress(Stopped):
            while not self.is_stopping and not self.engine.is_closed:
                self._serve_one()

    def close_what_it_uses(self) -> None:
        """Close the engine, which no thread runs any more."""
        self.engine.close()

    def _serve_one(self) -> None:
        """Wait for a result, and bring it to its flow."""
        engine = self.engine
        result, error = None, None
        try:
            result = engine.next_batch()
        except Exception as raised:  # noqa: BLE001 - raised to the consumer
            error = raised.error if isinstance(raised, Instead) else raised
        delivery = engine.delivery
        if delivery is None:
            # The engine is closed, because a worker died or it cannot continue.
            assert error is not None
            for job in [*self._sent.values(), *self._jobs]:
                job.flow.failed(job, error, is_lost=True)
            self._sent.clear()
            engine.close()
            return
        job = self._sent.pop(delivery.seq)
        if error is not None:
            following = job.flow.failed(job, error)
        elif type(result) is RemoteError:
            failed = result.rebuilt("It was raised in a worker process.")
            following = job.flow.failed(job, failed, in_setup=True)
        else:
            op_ns = delivery.times.work[1] if delivery.times else 0  # in the dataset, the op
            following = job.flow.finished(job, results_of(self._stage, result), op_ns)
        if following is not None:
            self._jobs.append(following)

    @property
    def is_broken(self) -> bool:
        """Whether no further task can run, since a worker has died."""
        return self.engine.is_closed

    def put(self, job: Job) -> None:
        """Have a worker run a job. From any thread."""
        self._jobs.append(job)
        self.wake()
        # Checked last: after an earlier check, the engine could still close and not see the job.
        if self.engine.is_closed:
            error = ClosedLoaderError("the stage's workers have been ended")
            job.flow.failed(job, error, is_lost=True)

    def end(self) -> None:
        """Have the thread end. From any thread; does not wait."""
        self.is_stopping = True
        self.wake()

    def join(self, timeout_s: float | None) -> bool:
        """End the workers after ``end``, and free all slots but those under live tensors.

        The wait for the workers may take a moment more than ``timeout_s``.
        """
        has_ended = self.ends_in(timeout_s)
        if has_ended:
            self.engine.close()
            self._sent.clear()
            self._jobs.clear()
        return has_ended
