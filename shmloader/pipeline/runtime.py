"""Owns what runs for a pipeline: its executors, and the present epoch.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new threads. Worker processes persist in this case, too.
"""

import atexit
import contextlib
import functools
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from shmloader.device.device import Destination, DeviceStage
from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.grammar import described_type
from shmloader.pipeline.config import Aggregate, OpKind, Pipe, PipelineConfig, RunsOn
from shmloader.pipeline.epoch import Epoch, StageExecutor, StageOp
from shmloader.pipeline.executors import FuturesExecutor, ThreadExecutor
from shmloader.pipeline.failures import FailedItem
from shmloader.pipeline.loop import LoopExecutor
from shmloader.pipeline.processes import ProcessExecutor
from shmloader.pipeline.source import SourceReader, fresh, is_sync
from shmloader.pipeline.stages import Checkpoint
from shmloader.pipeline.transfer import AfterTransfer, DeviceExecutor
from shmloader.pools.slot_memory import PageLocker
from shmloader.threads.uninterruptible import uninterruptible

# How long `end` waits for threads, which may be in an op, in seconds.
_JOIN_S = 0.4


_Started = TypeVar("_Started", bound=StageExecutor)


class PipelineRuntime:
    """Owns all that must end when a pipeline is stopped or garbage. Does not refer to the pipeline.

    Attributes:
        epoch: The present epoch, over or not; None before the first.
        pid: The process that the runtime belongs to: it began the first epoch. None before that.

    Args:
        config: The stages.
        failures: The pipeline's list of failures.
    """

    def __init__(self, config: PipelineConfig, failures: FailureList[FailedItem]) -> None:
        self._config = config
        self._failures = failures
        self.pid: int | None = None
        self.epoch: Epoch | None = None
        self._epoch_count = 0
        self._end_count = 0
        # Where the next epoch begins; None for the beginning.
        self._start: Checkpoint | None = None
        # Ends everything at the interpreter's exit.
        self._at_exit: Callable[[], None] | None = None
        # All executors but those on processes. None when there are none, as after a left epoch.
        self._executors: list[StageExecutor] | None = None
        self._stage_ops: list[StageOp | None] = []
        # Both are keyed by the index of the stage.
        self._processes: dict[int, ProcessExecutor] = {}
        self._destinations: dict[int, Destination] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether an epoch has begun and is not over."""
        return self.epoch is not None and not self.epoch.is_over

    def describe(self) -> str:
        """Return in words whether an epoch is under way, and how the last one ended."""
        epoch = self.epoch
        if epoch is None:
            return "not started"
        if not epoch.is_over:
            return "running"
        return f"ended: {epoch.over_because}" if epoch.over_because else "ended"

    def check_process(self) -> None:
        """Raise ClosedLoaderError in a forked child, if the parent has begun an epoch."""
        if self.pid not in (None, os.getpid()):
            raise ClosedLoaderError("the pipeline belongs to the process that started it")

    def begin_epoch(self) -> Epoch:
        """Begin an epoch. Makes the executors that are missing.

        Raises:
            RuntimeError: If the source is an iterator, and an epoch has used it.
            ClosedLoaderError: If another thread has ended everything meanwhile.
        """
        self.pid = os.getpid()
        end_count = self._end_count
        source = self._config.source
        is_used = self._epoch_count and isinstance(source, Iterator | AsyncIterator)
        if is_used and self._start is None:
            raise RuntimeError(
                f"the pipeline's source, {described_type(source)}, is an iterator, and an earlier "
                "epoch has taken items from it: give add_source an iterable that can be iterated "
                "again (an object with __iter__), or build a pipeline for each epoch"
            )
        try:
            processes = self._make_processes()
            if self._executors is None:
                executors: list[StageExecutor] = []
                try:
                    self._stage_ops = self._make_stage_ops(executors, processes)
                finally:
                    self._executors = executors
            self._epoch_count += 1
            reader = SourceReader(
                source,
                self._next_start(),
                self._config.snapshot_every,
                is_resumed=self._start is not None,
            )
            epoch = self.epoch = Epoch(self._config, self._stage_ops, self._failures, reader)
            self._start = None
            self._end_at_exit()
            epoch.begin()
        except BaseException:
            if self.epoch is not None:
                self.epoch.let_go()
            self.end()
            raise
        if self._end_count != end_count:  # `end` may have seen only a part of what was made
            self.end()
            raise ClosedLoaderError("the pipeline was stopped while it started")
        return epoch

    def _next_start(self) -> Checkpoint | None:
        if self._config.why_not_resumable():
            return None
        return fresh(self._config.source) if self._start is None else self._start

    # States ---------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return where an epoch begins that continues after the last delivered item.

        Assumes that the pipeline can be resumed.
        """
        epoch = None if self._start is not None else self.epoch
        found = self._next_start() if epoch is None else epoch.delivered
        assert found is not None
        return found

    def resume(self, start: Checkpoint) -> None:
        """Have the next epoch begin at a checkpoint, whose state the source has loaded already."""
        self._start = start

    # Ends -----------------------------------------------------------------------------------

    def _end_at_exit(self) -> None:
        """Have everything ended at the interpreter's exit, if a stage has a ``teardown``.

        Otherwise the exit only parks the threads.
        """
        lifecycles = (stage.lifecycle for stage in self._config.stages if isinstance(stage, Pipe))
        has_teardown = any(one is not None and one.teardown is not None for one in lifecycles)
        if has_teardown and self._at_exit is None:
            self._at_exit = functools.partial(_end_runtime, weakref.ref(self))
            atexit.register(self._at_exit)

    def finish_epoch(self) -> None:
        """Free what executors hold of an epoch after its regular end. The executors persist."""
        for executor in self._executors or ():
            if isinstance(executor, DeviceExecutor):
                executor.stage.close()

    def leave_epoch(self, why: str) -> None:
        """Leave the present epoch, and end all executors except those on processes.

        May be called from anywhere, and again.
        """
        if self.epoch is not None:
            self.epoch.leave(why)
        self._end(with_processes=False)

    def end(self) -> None:
        """End everything. May be called from anywhere, and again."""
        self._end_count += 1
        if self.epoch is not None:
            self.epoch.leave("it was stopped")
        self._end(with_processes=True)
        at_exit, self._at_exit = self._at_exit, None
        if at_exit is not None:
            atexit.unregister(at_exit)

    def _end(self, *, with_processes: bool) -> None:
        if os.getpid() != self.pid:
            return  # in a forked child, none of the threads runs
        deadline = time.monotonic() + _JOIN_S
        uninterruptible(
            functools.partial(self._end_executors, [], deadline, with_processes=with_processes)
        )

    def _end_executors(
        self, ended: list[StageExecutor], deadline: float, *, with_processes: bool
    ) -> None:
        """Tell executors to end, and wait for them. Called again after an interruption.

        Args:
            ended: Empty at first. Gets the executors to end, and keeps them for the next call.
            deadline: End of the wait, on the clock of ``time.monotonic()``.
            with_processes: Whether to end worker processes, too.
        """
        ended += self._executors or ()
        self._executors = None
        if with_processes:
            ended += self._processes.values()
            self._processes = {}
        with contextlib.ExitStack() as stack:  # an interrupted `join` does not prevent the others
            for executor in reversed(ended):
                stack.callback(uninterruptible, functools.partial(_join, executor, deadline))
            for executor in ended:
                executor.end()

    # Executors ------------------------------------------------------------------------------

    def _make_processes(self) -> dict[int, ProcessExecutor]:
        """Start the workers that are missing, all before the first thread of the pipeline."""
        processes: dict[int, ProcessExecutor] = {}
        started = []
        pipes = {
            index: stage
            for index, stage in enumerate(self._config.stages)
            if isinstance(stage, Pipe) and stage.runs_on is RunsOn.PROCESSES
        }
        for index, pipe in pipes.items():
            executor = self._processes.get(index)
            if executor is not None and executor.is_broken:
                del self._processes[index]
                executor.end()
                uninterruptible(functools.partial(executor.join, _JOIN_S))
                executor = None
            if executor is None:
                self.leave_epoch("its workers were ended")  # `_stage_ops` has the old executor
                lend_limit, locker = self._config.lend_limit(index), self._locker_after(index)
                executor = ProcessExecutor(pipe, lend_limit, locker, len(pipes))
                self._processes[index] = executor
                started.append(executor)
            processes[index] = executor
        for executor in started:
            executor.start()
        return processes

    def _locker_after(self, index: int) -> PageLocker | None:
        """Return the page locks for a stage's slots, if the next stage copies them to a device."""
        for following in self._config.stages[index + 1 : index + 2]:
            if isinstance(following, Pipe) and following.runs_on is RunsOn.DEVICE:
                return self._destination(index + 1, following).locks
        return None

    def _destination(self, index: int, pipe: Pipe) -> Destination:
        if index not in self._destinations:
            self._destinations[index] = Destination([pipe.device])
        return self._destinations[index]

    def _make_stage_ops(
        self, executors: list[StageExecutor], processes: dict[int, ProcessExecutor]
    ) -> list[StageOp | None]:
        """Make all executors except those on processes, and return how each stage is run.

        Args:
            executors: Gets each new executor as soon as it is made.
            processes: The executors on processes, by the index of their stage.
        """
        config = self._config
        used = {stage.runs_on for stage in config.stages if isinstance(stage, Pipe)}
        shared: dict[RunsOn, Any] = {}
        on_thread = is_sync(config.source)
        if not on_thread or RunsOn.LOOP in used:
            shared[RunsOn.LOOP] = _start(LoopExecutor(), executors)
        if RunsOn.THREADS in used:
            threads = ThreadExecutor("shmloader_pipe", config.num_threads)
            shared[RunsOn.THREADS] = _start(threads, executors)
        iterates: Any = shared.get(RunsOn.LOOP)
        if on_thread:
            iterates = _start(ThreadExecutor("shmloader_source", 1), executors)
        # Called once, with the reader as the item.
        op: Callable[..., object] = SourceReader.iterate_async
        kind = OpKind.ASYNC_GENERATOR
        if on_thread:
            op, kind = SourceReader.iterate, OpKind.GENERATOR
        stage_ops: list[StageOp | None] = [StageOp("the source", op, kind, iterates)]
        transfer: DeviceStage | None = None
        for index, stage in enumerate(config.stages):
            if isinstance(stage, Aggregate):
                stage_ops.append(None)
                continue
            op = stage.op
            if transfer is not None:
                op = AfterTransfer(op, stage.kind, transfer)
            if stage.runs_on is RunsOn.PROCESSES:
                executor: Any = processes[index]
            elif stage.runs_on is RunsOn.EXECUTOR:
                assert stage.executor is not None
                executor = _start(FuturesExecutor(stage.executor), executors)
            elif stage.runs_on is RunsOn.DEVICE:
                executor = _start(DeviceExecutor(self._destination(index, stage)), executors)
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


def _start(executor: _Started, executors: list[StageExecutor]) -> _Started:
    """Start and return an executor. It is listed before: no thread may start unlisted."""
    executors.append(executor)
    executor.start()
    return executor


def _end_runtime(reference: "weakref.ref[PipelineRuntime]") -> None:
    runtime = reference()
    if runtime is not None:
        runtime.end()
