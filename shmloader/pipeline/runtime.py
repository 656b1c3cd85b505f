"""Makes and ends the executors of a pipeline.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new threads. Worker processes persist in this case, too.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable

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


class Executors:
    """The executors of a pipeline. Refers to no pipeline and to no epoch.

    Args:
        config: The stages.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        # Those on processes are keyed by the index of their stage, and so are the destinations.
        self._running: dict[object, StageExecutor] = {}
        self._destinations: dict[int, Destination] = {}

    def make(self) -> list[StageOp | None]:
        """Make the executors that are missing. Returns how each stage is run, the source first.

        The caller calls :meth:`end` if this raises, or if another thread has called it meanwhile.
        """
        pipes = {
            index: stage
            for index, stage in enumerate(self._config.stages)
            if isinstance(stage, Pipe)
        }
        for index, pipe in pipes.items():
            if pipe.device and index not in self._destinations:
                self._destinations[index] = Destination([pipe.device])
        processes = self._make_processes(
            {index: pipe for index, pipe in pipes.items() if pipe.runs_on is RunsOn.PROCESSES}
        )
        if isinstance(self._config.source, Iterable):
            executor = self._started("source", lambda: ThreadExecutor("shmloader_source", 1))
            source = StageOp("the source", SourceReader.iterate, OpKind.GENERATOR, executor)
        else:
            loop = self._started(RunsOn.LOOP, LoopExecutor)
            source = StageOp("the source", SourceReader.iterate_async, OpKind.ASYNC_GENERATOR, loop)
        stage_ops: list[StageOp | None] = [source]
        transfer: DeviceStage | None = None
        for index, stage in enumerate(self._config.stages):
            if isinstance(stage, Aggregate):
                stage_ops.append(None)
                continue
            executor = processes.get(index) or self._executor_of(stage, index)
            op: Callable[..., object] = stage.op
            if isinstance(executor, DeviceExecutor):
                op, transfer = executor.copy, executor.stage
            elif transfer is not None:
                op = AfterTransfer(op, stage.kind, transfer)
            # A worker process calls `setup` itself.
            lifecycle = None if stage.runs_on is RunsOn.PROCESSES else stage.lifecycle
            stage_ops.append(StageOp(stage.name, op, stage.kind, executor, lifecycle))
        return stage_ops

    def _executor_of(self, pipe: Pipe, index: int) -> StageExecutor:
        match pipe.runs_on:
            case RunsOn.EXECUTOR:
                assert pipe.executor is not None
                executor = pipe.executor
                return self._started(id(executor), lambda: FuturesExecutor(executor))
            case RunsOn.DEVICE:
                destination = self._destinations[index]
                return self._started("device", lambda: DeviceExecutor(destination))
            case RunsOn.LOOP:
                return self._started(RunsOn.LOOP, LoopExecutor)
            case _:
                count = self._config.num_threads
                make = functools.partial(ThreadExecutor, "shmloader_pipe", count)
                return self._started(RunsOn.THREADS, make)

    def _started(self, key: object, make: Callable[[], StageExecutor]) -> StageExecutor:
        """Return an executor, after it was started if it was missing."""
        executor = self._running.get(key)
        if executor is None:
            # It is listed before it starts: no thread may start unlisted.
            executor = self._running[key] = make()
            executor.start()
        return executor

    def _make_processes(self, pipes: dict[int, Pipe]) -> dict[int, ProcessExecutor]:
        """Start the workers that are missing, all before the first thread of the pipeline."""
        found: dict[int, ProcessExecutor] = {}
        for index in pipes:
            executor = self._running.get(index)
            if isinstance(executor, ProcessExecutor) and not executor.is_broken:
                found[index] = executor
        missing = pipes.keys() - found.keys()
        if missing:
            self.end(with_processes=False)
        for index in sorted(missing):
            broken = self._running.pop(index, None)
            if broken is not None:
                broken.end()
                uninterruptible(functools.partial(broken.join, _JOIN_S))
            # A device reads results out of their slots, which are then page-locked.
            device = self._destinations.get(index + 1)
            found[index] = self._running[index] = ProcessExecutor(
                pipes[index],
                self._config.lend_limit(index),
                None if device is None else device.locks,
                len(pipes),
            )
        for index in missing:
            found[index].start()
        return found

    def close_copies(self) -> None:
        """Free what copies to devices hold of an epoch, after its regular end."""
        for executor in list(self._running.values()):
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
        running = list(self._running.items())
        for are_processes in (False, with_processes):
            of_kind = [
                each for each in running if isinstance(each[1], ProcessExecutor) is are_processes
            ]
            ended += [executor for _, executor in of_kind]
            for key, _ in of_kind:
                self._running.pop(key, None)
        with contextlib.ExitStack() as stack:  # an interrupted `join` does not prevent the others
            for executor in reversed(ended):
                stack.callback(uninterruptible, functools.partial(_join, executor, deadline))
            for executor in ended:
                executor.end()


def _join(executor: StageExecutor, deadline: float) -> None:
    executor.join(deadline - time.monotonic())
