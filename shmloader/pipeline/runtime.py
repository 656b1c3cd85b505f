"""Makes and ends the executors of a pipeline.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new threads. Worker processes persist in this case, too.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shmloader.device.device import Destination, DeviceStage
from shmloader.pipeline.config import Aggregate, OpKind, Pipe, PipelineConfig, RunsOn
from shmloader.pipeline.epoch import StageExecutor, StageOp
from shmloader.pipeline.executors import FuturesExecutor, ThreadExecutor
from shmloader.pipeline.loop import LoopExecutor
from shmloader.pipeline.processes import ProcessExecutor
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.transfer import AfterTransfer, DeviceExecutor
from shmloader.threads.uninterruptible import uninterruptible

# How long `end` waits for threads, which may be in an op, in seconds.
_JOIN_S = 0.4


_Started = TypeVar("_Started", bound=StageExecutor)


class Executors:
    """The executors of a pipeline. Refers to no pipeline and to no epoch.

    Args:
        config: The stages.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        # How each stage is run; None if all executors but those on processes were ended.
        self._stage_ops: list[StageOp | None] | None = None
        self._running: list[StageExecutor] = []
        # Both are keyed by the index of the stage.
        self._processes: dict[int, ProcessExecutor] = {}
        self._destinations: dict[int, Destination] = {}

    def make(self) -> list[StageOp | None]:
        """Make the executors that are missing. Returns how each stage is run, the source first.

        The caller calls :meth:`end` if this raises, or if another thread has called it meanwhile.
        """
        for index, stage in enumerate(self._config.stages):
            if isinstance(stage, Pipe) and stage.device and index not in self._destinations:
                self._destinations[index] = Destination([stage.device])
        processes = self._make_processes()
        stage_ops = self._stage_ops
        if stage_ops is None:
            stage_ops = self._stage_ops = self._make_stage_ops(processes)
        return stage_ops

    def close_copies(self) -> None:
        """Free what copies to devices hold of an epoch, after its regular end."""
        for executor in self._running:
            if isinstance(executor, DeviceExecutor):
                executor.stage.close()

    def end(self, *, with_processes: bool) -> None:
        """End all executors, or all but the worker processes. From anywhere, and again."""
        deadline = time.monotonic() + _JOIN_S
        uninterruptible(functools.partial(self._end, [], deadline, with_processes=with_processes))

    def _end(self, ended: list[StageExecutor], deadline: float, *, with_processes: bool) -> None:
        """Tell executors to end, and wait for them. Called again after an interruption.

        Args:
            ended: Empty at first. Gets the executors to end, and keeps them for the next call.
            deadline: End of the wait, on the clock of ``time.monotonic()``.
            with_processes: Whether to end worker processes, too.
        """
        ended += self._running
        self._running, self._stage_ops = [], None
        if with_processes:
            ended += self._processes.values()
            self._processes = {}
        with contextlib.ExitStack() as stack:  # an interrupted `join` does not prevent the others
            for executor in reversed(ended):
                stack.callback(uninterruptible, functools.partial(_join, executor, deadline))
            for executor in ended:
                executor.end()

    def _make_processes(self) -> dict[int, ProcessExecutor]:
        """Start the workers that are missing, all before the first thread of the pipeline."""
        processes, started = {}, []
        pipes = {
            index: stage
            for index, stage in enumerate(self._config.stages)
            if isinstance(stage, Pipe) and stage.runs_on is RunsOn.PROCESSES
        }
        for index, pipe in pipes.items():
            executor = self._processes.get(index)
            if executor is None or executor.is_broken:
                self.end(with_processes=False)  # `_stage_ops` has the old executor
                if executor is not None:
                    del self._processes[index]
                    executor.end()
                    uninterruptible(functools.partial(executor.join, _JOIN_S))
                # A device reads results out of their slots, which are then page-locked.
                device = self._destinations.get(index + 1)
                executor = self._processes[index] = ProcessExecutor(
                    pipe,
                    self._config.lend_limit(index),
                    None if device is None else device.locks,
                    len(pipes),
                )
                started.append(executor)
            processes[index] = executor
        for executor in started:
            executor.start()
        return processes

    def _start(self, executor: _Started) -> _Started:
        """Start and return an executor. It is listed before: no thread may start unlisted."""
        self._running.append(executor)
        executor.start()
        return executor

    def _make_stage_ops(self, processes: dict[int, ProcessExecutor]) -> list[StageOp | None]:
        """Make all executors except those on processes, and return how each stage is run."""
        config = self._config
        used = {stage.runs_on for stage in config.stages if isinstance(stage, Pipe)}
        shared: dict[RunsOn, Any] = {}
        on_thread = isinstance(config.source, Iterable)
        if not on_thread or RunsOn.LOOP in used:
            shared[RunsOn.LOOP] = self._start(LoopExecutor())
        if RunsOn.THREADS in used:
            threads = ThreadExecutor("shmloader_pipe", config.num_threads)
            shared[RunsOn.THREADS] = self._start(threads)
        # The source's op is called once, with the reader as the item.
        source: Callable[..., object] = SourceReader.iterate_async
        kind = OpKind.ASYNC_GENERATOR
        iterates: Any = shared.get(RunsOn.LOOP)
        if on_thread:
            source, kind = SourceReader.iterate, OpKind.GENERATOR
            iterates = self._start(ThreadExecutor("shmloader_source", 1))
        stage_ops: list[StageOp | None] = [StageOp("the source", source, kind, iterates)]
        users: dict[int, FuturesExecutor] = {}
        transfer: DeviceStage | None = None
        for index, stage in enumerate(config.stages):
            if isinstance(stage, Aggregate):
                stage_ops.append(None)
                continue
            op: Callable[..., object] = stage.op
            if transfer is not None:
                op = AfterTransfer(op, stage.kind, transfer)
            if stage.runs_on is RunsOn.PROCESSES:
                executor: Any = processes[index]
            elif stage.runs_on is RunsOn.EXECUTOR:
                assert stage.executor is not None
                executor = users.get(id(stage.executor))
                if executor is None:
                    executor = self._start(FuturesExecutor(stage.executor))
                    users[id(stage.executor)] = executor
            elif stage.runs_on is RunsOn.DEVICE:
                executor = self._start(DeviceExecutor(self._destinations[index]))
                op, transfer = executor.copy, executor.stage
            else:
                executor = shared[stage.runs_on]
            stage_ops.append(
                StageOp(
                    stage.name, op, stage.kind, executor,
                    # A worker process calls `setup` itself.
                    lifecycle=None if stage.runs_on is RunsOn.PROCESSES else stage.lifecycle,
                )
            )  # fmt: skip
        return stage_ops


def _join(executor: StageExecutor, deadline: float) -> None:
    executor.join(deadline - time.monotonic())
