"""Makes and ends the executors of a pipeline.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new threads. Worker processes persist in this case, too.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from shmloader.device.device import Destination, DeviceStage
from shmloader.pipeline.config import PipelineConfig, StageConfig
from shmloader.pipeline.executors import DeviceExecutor, LoopExecutor, ThreadExecutor, submitting
from shmloader.pipeline.processes import ProcessExecutor
from shmloader.pipeline.source import SourceReader

# How long `end` waits for threads, which may be in an op, in seconds.
_JOIN_S = 0.4


class Executors:
    """The executors of a pipeline. Refers to no pipeline and to no epoch.

    Attributes:
        transfer: Copies batches to a device; None if no stage does.

    Args:
        config: The pipeline.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        # By the kind of the stages that they run; those on processes by the stage's index.
        self._running: dict[object, Any] = {}
        self._ending: list[Any] = []
        # The devices of a transfer, which persist with their page locks.
        self._destination: Destination | None = None
        self.transfer: DeviceStage | None = None

    def make(self) -> list[tuple[StageConfig, Any]]:
        """Make the executors that are missing. Returns how the source and each stage are run.

        The caller calls :meth:`end` if this raises.
        """
        stages = self._config.stages
        if self._ending:  # an earlier end was interrupted
            self.end()
        for stage in stages:
            if stage.device is not None and self._destination is None:
                self._destination = Destination([stage.device])
        self._make_processes()
        is_async = not isinstance(self._config.source, Iterable)
        read: Any = SourceReader.iterate_async if is_async else SourceReader.iterate
        source = StageConfig("the source", "source", read, makes_many=True)
        self.transfer = None
        runners = [self._runner(replace(source, kind="coroutine") if is_async else source, -1)]
        runners[0] = (source, runners[0][1])
        return runners + [self._runner(stage, index) for index, stage in enumerate(stages)]

    def _runner(self, stage: StageConfig, index: int) -> tuple[StageConfig, Any]:
        """Return a stage as it is run, and what runs it."""
        made: Any = None
        stage = replace(stage, transfer=self.transfer)
        match stage.kind:
            case "source":
                made = self._get("source", ThreadExecutor, "shmloader_source", 1)
            case "thread":
                made = self._get(
                    "thread", ThreadExecutor, "shmloader_pipe", self._config.num_threads
                )
            case "coroutine":
                made = self._get("coroutine", LoopExecutor, "shmloader_loop")
            case "executor":
                made = self._get("executor", LoopExecutor, "shmloader_submit")
                stage = replace(stage, op=submitting(stage))
            case "process":
                made = self._running[index]
            case "device":
                made = self._get("device", DeviceExecutor, self._destination)
                self.transfer = made.stage
                stage = replace(stage, op=made.copy, setup=made.stage.start)
        return stage, made

    def _get(self, key: object, make: Callable[..., Any], *args: object) -> Any:
        """Return an executor, after it was started if it was missing."""
        if key not in self._running:
            # It is listed before it starts: no thread may start unlisted.
            self._running[key] = make(*args)
            self._running[key].start()
        return self._running[key]

    def _make_processes(self) -> None:
        """Start the workers, unless all run: before the first thread of the pipeline."""
        stages = self._config.stages
        indices = [index for index, stage in enumerate(stages) if stage.kind == "process"]
        running = [self._running[index] for index in indices if index in self._running]
        if len(running) == len(indices) and not any(one.is_broken for one in running):
            return
        self.end()
        for index in indices:
            # A device reads results out of their slots, which are then page-locked.
            is_read = any(stage.device for stage in stages[index + 1 : index + 2])
            locks = self._destination.locks if is_read and self._destination else None
            limit = self._config.lend_limit(index)
            self._running[index] = ProcessExecutor(stages[index], limit, locks, len(indices))
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
