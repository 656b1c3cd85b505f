"""Makes and ends the executors of a pipeline.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new threads. Worker processes persist in this case, too.
"""

import contextlib
import time
from collections.abc import Iterable
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
        # The device of a transfer, which persists with its page locks.
        self._destination: Destination | None = None
        self.transfer: DeviceStage | None = None

    def make(self) -> list[tuple[StageConfig, Any]]:
        """Make the executors that are missing. Returns how the source and each stage are run.

        The caller calls :meth:`end` if this raises.
        """
        config = self._config
        if self._ending:  # an earlier end was interrupted
            self.end()
        devices = [stage.device for stage in config.stages if stage.device is not None]
        if devices and self._destination is None:
            self._destination = Destination(devices)
        self._make_processes()
        self.transfer = None
        is_async = not isinstance(config.source, Iterable)
        read: Any = SourceReader.iterate_async if is_async else SourceReader.iterate
        source = StageConfig("the source", "source", read, makes_many=True)
        runners = [(source, self._get("coroutine" if is_async else "source"))]
        for index, stage in enumerate(config.stages):
            run, made = replace(stage, transfer=self.transfer), None
            if stage.kind == "executor":
                run = replace(run, op=submitting(stage))
            if stage.kind == "device":
                made = self._get("device")
                self.transfer = made.stage
                run = replace(run, op=made.copy, setup=made.stage.start)
            elif stage.kind != "aggregate":
                made = self._get(index if stage.kind == "process" else stage.kind)
            runners.append((run, made))
        return runners

    def _get(self, key: Any) -> Any:
        """Return an executor, after it was started if it was missing."""
        if key not in self._running:
            made: Any
            match key:
                case "device":
                    assert self._destination is not None
                    made = DeviceExecutor(self._destination)
                case "coroutine":
                    made = LoopExecutor("shmloader_loop")
                case "executor":
                    made = LoopExecutor("shmloader_submit")
                case "thread":
                    made = ThreadExecutor("shmloader_pipe", self._config.num_threads)
                case "source":
                    made = ThreadExecutor("shmloader_source", 1)
            self._running[key] = made  # listed before it starts: no thread may start unlisted
            made.start()
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
