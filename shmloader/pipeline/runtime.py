"""Makes and ends the executors of a pipeline.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new threads. Worker processes persist in this case, too.
"""

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from shmloader.device.device import Destination, DeviceStage
from shmloader.pipeline.config import OpKind, PipelineConfig, RunsOn, StageConfig
from shmloader.pipeline.epoch import Runner
from shmloader.pipeline.executors import ExecutorOp, LoopExecutor, ThreadExecutor
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
        # Those on processes are keyed by the number of their stage, from 1 on.
        self._running: dict[object, Any] = {}
        # The devices of a transfer, which persist with their page locks.
        self._destination: Destination | None = None

    def make(self) -> list[Runner]:
        """Make the executors that are missing. Returns how the source and each stage are run.

        The caller calls :meth:`end` if this raises, or if another thread has called it meanwhile.
        """
        stages, source = self._config.stages, self._config.source
        for stage in stages:
            if stage.device is not None and self._destination is None:
                self._destination = Destination([stage.device])
        processes = self._make_processes()
        read: Any = SourceReader.iterate
        runs_on, kind = RunsOn.SOURCE, OpKind.GENERATOR
        if not isinstance(source, Iterable):
            read = SourceReader.iterate_async
            runs_on, kind = RunsOn.LOOP, OpKind.ASYNC_GENERATOR
        transfer: DeviceStage | None = None
        runners: list[Runner] = []
        for index, stage in enumerate((StageConfig("the source", runs_on, read, kind), *stages)):
            executor, op, lifecycle = processes.get(index), stage.op, stage.lifecycle
            if executor is not None:
                lifecycle = None  # a worker process calls `setup` itself
            else:
                executor = self._executor_of(stage)
            if isinstance(executor, DeviceExecutor):
                op, transfer = executor.copy, executor.stage
            elif transfer is not None:
                op = AfterTransfer(op, stage.kind, transfer)
            if stage.executor is not None:
                op = ExecutorOp(stage.executor, op, stage.kind)
            runners.append((replace(stage, op=op, lifecycle=lifecycle), executor))
        return runners

    def _executor_of(self, stage: StageConfig) -> Any:
        match stage.runs_on:
            case RunsOn.FLOW:
                return None
            case RunsOn.SOURCE:
                return self._started("source", ThreadExecutor, "shmloader_source", 1)
            case RunsOn.EXECUTOR:
                return self._started(RunsOn.EXECUTOR, LoopExecutor, "shmloader_submit")
            case RunsOn.DEVICE:
                return self._started("device", DeviceExecutor, self._destination)
            case RunsOn.LOOP:
                return self._started(RunsOn.LOOP, LoopExecutor, "shmloader_loop")
            case _:
                threads = ("shmloader_pipe", self._config.num_threads)
                return self._started(RunsOn.THREADS, ThreadExecutor, *threads)

    def _started(self, key: object, make: Callable[..., Any], *args: object) -> Any:
        """Return an executor, after it was started if it was missing."""
        executor = self._running.get(key)
        if executor is None:
            # It is listed before it starts: no thread may start unlisted.
            executor = self._running[key] = make(*args)
            executor.start()
        return executor

    def _make_processes(self) -> dict[int, ProcessExecutor]:
        """Start the workers, unless all run: before the first thread of the pipeline."""
        stages = self._config.stages
        numbers = [at for at, stage in enumerate(stages, 1) if stage.runs_on is RunsOn.PROCESSES]
        found = {at: self._running[at] for at in numbers if at in self._running}
        if len(found) < len(numbers) or any(executor.is_broken for executor in found.values()):
            self.end_all()
            for at in numbers:
                # A device reads results out of their slots, which are then page-locked.
                is_read = any(stage.device for stage in stages[at : at + 1])
                locks = self._destination.locks if is_read and self._destination else None
                limit = self._config.lend_limit(at - 1)
                found[at] = ProcessExecutor(stages[at - 1], limit, locks, len(numbers))
                self._running[at] = found[at]
            for executor in found.values():
                executor.start()
        return found

    def close_copies(self) -> None:
        """Free what copies to devices hold of an epoch, after its regular end."""
        executor = self._running.get("device")
        if executor is not None:
            executor.stage.close()

    def end_threads(self) -> None:
        """End all executors but the worker processes. From anywhere, and again."""
        self.end([key for key, one in list(self._running.items()) if not _has_workers(one)])

    def end_all(self) -> None:
        """End all executors. From anywhere, and again."""
        self.end(list(self._running))

    def end(self, keys: list[object]) -> None:
        """End some executors, and wait for them for a moment."""
        ended: list[Any] = []
        deadline = time.monotonic() + _JOIN_S
        uninterruptible(functools.partial(self._end, keys, ended, deadline))

    def _end(self, keys: list[object], ended: list[Any], deadline: float) -> None:
        """Tell executors to end, and wait for them. Called again after an interruption.

        Args:
            keys: Their keys.
            ended: Empty at first. Holds the executors that are not yet waited for.
            deadline: End of the wait, on the clock of ``time.monotonic()``.
        """
        for key in keys:
            if key in self._running:
                ended.append(self._running[key])
                self._running.pop(key, None)
        for executor in ended:
            executor.end()
        ended.sort(key=_has_workers, reverse=True)  # threads may be about to return
        while ended:
            ended[-1].join(deadline - time.monotonic())
            ended.pop()


def _has_workers(executor: object) -> bool:
    return isinstance(executor, ProcessExecutor)
