"""Makes all executors of a pipeline. Runs ops in worker processes, with the loader's own engine.

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
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shmloader.batch.fetch import FetchConfig
from shmloader.device.device import Destination
from shmloader.engine.delivery import Instead
from shmloader.engine.engine import Engine, OwnThread, Stopped
from shmloader.engine.scheduler import Scheduler
from shmloader.errors import ClosedLoaderError
from shmloader.insight.measurements import work_of
from shmloader.memory.arena import Arena
from shmloader.memory.limits import MemoryConfig
from shmloader.pipeline.config import PipelineConfig, StageConfig, results_of
from shmloader.pipeline.executors import DeviceExecutor, LoopExecutor, ThreadExecutor
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.stages import Job
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.process import ProcessPool
from shmloader.pools.starting import OwnWorkers, remedied
from shmloader.pools.status_page import StatusPage
from shmloader.pools.task_queue import TaskQueue

# How long `end` waits for threads, which may be in an op, in seconds.
_JOIN_S = 0.4

# Results of a stage that may lie in their slots at once.
_LEND_LIMIT = 64

# How long the workers of all stages, one stage after the other, may take to leave their ops before
# they are killed, in seconds.
_GRACE_S = 0.3


class OpItems:
    """The dataset of a worker: indexed by an item, it returns the op's result or results."""

    def __init__(self, stage: StageConfig) -> None:
        self.op, self._makes_many = stage.op, stage.makes_many

    def __getitem__(self, item: Any) -> Any:
        result = self.op(item)
        return list(result) if self._makes_many else result


def unchanged(result: Any) -> Any:
    """Return the result, which is no list of samples: the collate function of a worker."""
    return result


class ProcessExecutor(OwnThread):
    """Runs the jobs of one stage in worker processes. Its thread runs the engine.

    The constructor starts the workers, and may fork. So it is called before the pipeline starts a
    thread. ``locker`` page-locks the slots if a device reads results out of them.
    """

    def __init__(self, stage: StageConfig, locker: Any, executor_count: int) -> None:
        super().__init__(f"shmloader_{stage.name}"[:15])
        self._stage = stage
        self._window = window = stage.capacity
        # Jobs that the engine has not taken yet, and those that it has, by their tickets' numbers.
        self._jobs: collections.deque[Job] = collections.deque()
        self._sent: dict[int, Job] = {}
        self._numbers = itertools.count()
        count, memory = stage.concurrency, MemoryConfig(stage.concurrency, window + _LEND_LIMIT)
        config = FetchConfig(is_iterable=False, auto_collation=False, drop_last=False)
        with remedied():
            arena = Arena.create(None, window + _LEND_LIMIT)
            tasks = TaskConfig(config, arena, StatusPage(count), TaskQueue(), memory)
        objects = (OpItems(stage), None, unchanged, "raise")
        seed, names = int(torch.empty((), dtype=torch.int64).random_()), (stage.title,)
        starter = OwnWorkers(None, count, objects, tasks, seed, names)
        grace_s = _GRACE_S / executor_count
        pool = ProcessPool(starter, tasks, count, locker, may_replace=False, grace_s=grace_s)
        scheduler = Scheduler(count, window, _LEND_LIMIT, in_order=False, has_queue=True)
        self.engine = Engine(pool, scheduler, timeout_s=0)
        self.engine.resume()
        pool.enable_wake()
        self.engine.attach(self)

    # What the engine asks of its thread: see :class:`shmloader.engine.engine.OwnThread`. Jobs come
    # without a request, and workers are not replaced, so that no call starts one. --------------

    def next_ticket(self) -> object:
        """Return the next job's item, or raise StopIteration for now.

        There may be none, or no space for it in the engine's window.
        """
        while self._jobs and len(self._sent) < self._window:
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
        else:
            op_ns = work_of(delivery.times).fetch_ns if delivery.times else 0  # in the op
            following = job.flow.finished(job, results_of(self._stage, result), op_ns)
        if following is not None:
            self._jobs.append(following)

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


# All of a pipeline -------------------------------------------------------------------------


class Executors:
    """Makes and ends the executors of a pipeline. Refers to no pipeline and to no epoch.

    They persist from one epoch to the next. If an epoch was left before its end, threads may still
    be in its ops: they are left behind, and the next epoch gets new ones. Processes persist.
    ``transfer`` copies batches to a device, if a stage does.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        # By the kind of the stages that they run; those on processes by the stage's index.
        self._running: dict[object, Any] = {}
        self._ending: list[Any] = []
        # The device of a transfer, which persists with its page locks.
        self._destination: Any = None
        self.transfer: Any = None

    def make(self) -> list[tuple[StageConfig, Any]]:
        """Make the executors that are missing. Returns how the source and each stage are run.

        The caller calls :meth:`end` if this raises.
        """
        config = self._config
        if self._ending:  # an earlier end was interrupted
            self.end()
        device = config.stages[-1].device if config.stages else None
        if device is not None and self._destination is None:
            self._destination = Destination(device)
        self._make_processes()
        source = StageConfig("the source", "source", SourceReader.iterate, makes_many=True)
        runners = [(source, self._get("source"))]
        for index, stage in enumerate(config.stages):
            run, made = stage, None
            if stage.kind == "device":
                made = self._get("device")
                self.transfer = made.stage
                run = replace(stage, op=made.copy)
            elif stage.kind != "aggregate":
                made = self._get(index if stage.kind == "process" else stage.kind)
            runners.append((run, made))
        return runners

    def _get(self, key: Any) -> Any:
        """Return an executor, after it was started if it was missing."""
        if key not in self._running:
            makers: dict[str, Callable[[], Any]] = {
                "source": lambda: ThreadExecutor("shmloader_source", 1),
                "thread": lambda: ThreadExecutor("shmloader_pipe", self._config.num_threads),
                "coroutine": lambda: LoopExecutor("shmloader_loop"),
                "device": lambda: DeviceExecutor(self._destination),
            }
            made = self._running[key] = makers[key]()  # listed before it starts
            made.start()
        return self._running[key]

    def _make_processes(self) -> None:
        """Start the workers, unless all run: before the first thread of the pipeline."""
        stages = self._config.stages
        indices = [index for index, stage in enumerate(stages) if stage.kind == "process"]
        running = [self._running[index] for index in indices if index in self._running]
        if len(running) == len(indices) and not any(one.engine.is_closed for one in running):
            return
        self.end()
        for index in indices:
            # A device reads the last results out of their slots, which are then page-locked.
            is_read = self._destination is not None and index == len(stages) - 2
            locks = self._destination.locks if is_read else None
            self._running[index] = ProcessExecutor(stages[index], locks, len(indices))
        for index in indices:
            self._running[index].start()

    def end(self, *, with_processes: bool = True) -> None:
        """End the executors, and wait for them for a moment. From anywhere, and again."""
        deadline = time.monotonic() + _JOIN_S
        for key, executor in list(self._running.items()):
            if with_processes or not isinstance(executor, ProcessExecutor):
                self._ending.append(executor)
                self._running.pop(key, None)
        for executor in self._ending:
            executor.end()
        # The workers last, since the threads may be about to return.
        self._ending.sort(key=lambda one: isinstance(one, ProcessExecutor))
        for executor in list(self._ending):
            executor.join(deadline - time.monotonic())
            with contextlib.suppress(ValueError):  # another thread has ended it
                self._ending.remove(executor)
