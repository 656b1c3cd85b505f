"""What runs for a pipeline: its executors, and the present epoch. Does not hold the pipeline.

Executors are made when the pipeline starts, and persist from one epoch to the next. If an epoch was
left before its end, threads may still be in its ops: they are left behind, and the next epoch gets
new ones. Worker processes persist.
"""

import collections.abc
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Protocol

from shmloader.device.device import DeviceStage
from shmloader.device.target import Destination
from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.pipeline.device_future import AfterTransfer, DeviceFuture
from shmloader.pipeline.epoch import Call, Epoch, StageExecutor
from shmloader.pipeline.executor_stage import ExecutorStage
from shmloader.pipeline.failures import FailedItem
from shmloader.pipeline.loop import LoopExecutor
from shmloader.pipeline.ops import OpKind
from shmloader.pipeline.plan import Group, Pipe, Plan, Where
from shmloader.pipeline.processes import ProcessExecutor
from shmloader.pipeline.threads import ThreadExecutor
from shmloader.pools.arena import PageLocker
from shmloader.threads.uninterruptible import uninterruptible

# How long an end waits for threads, which may be in an op.
_JOIN_S = 0.4

#: Batches that a device's stage may have under way.
_AHEAD = 2

SOURCE = "the source"


class _Ending(StageExecutor, Protocol):
    """An executor, as whoever ends it sees it."""

    def end(self) -> None:
        """Tell it to end; from anywhere, does not wait."""

    def join(self, deadline: float) -> object:
        """Wait for its end, until ``deadline`` (``time.monotonic()``)."""


class _DeviceExecutor(ThreadExecutor):
    """One thread that copies batches to a device.

    Args:
        destination: The device.
    """

    def __init__(self, destination: Destination) -> None:
        backend = destination.backends[0]
        assert backend is not None
        self.stage = DeviceStage(backend, destination.locks, _AHEAD)
        super().__init__(DeviceStage.name, 1, self.stage.start)

    def copy(self, batch: object) -> DeviceFuture:
        """Start a batch's copy. On the thread."""
        try:
            return DeviceFuture(self.stage, self.stage.run(batch))
        finally:
            del batch  # a traceback keeps this frame, which must not keep the slot

    def join(self, deadline: float) -> bool:
        """As a thread executor's; waits for the copies under way, too."""
        has_ended = super().join(deadline)
        if has_ended:
            self.stage.close()
        return has_ended


class Running:
    """What must be ended when a pipeline is stopped, or garbage.

    Attributes:
        epoch: The present one, over or not; None before the first.
        pid: Of the process that it belongs to: the one that began the first epoch.

    Args:
        plan: The stages.
        listed: Where failures are listed.
    """

    def __init__(self, plan: Plan, listed: FailureList[FailedItem]) -> None:
        self._plan = plan
        self._listed = listed
        self.pid: int | None = None
        self.epoch: Epoch | None = None
        self._epoch_count = 0
        self._end_count = 0
        # Ended when an epoch is left; None: there are none.
        self._executors: list[_Ending] | None = None
        self._calls: list[Call | None] = []
        self._processes: dict[int, ProcessExecutor] = {}
        self._destinations: dict[int, Destination] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether an epoch has begun, and is not over."""
        return self.epoch is not None and not self.epoch.is_over

    @property
    def process_executors(self) -> list[ProcessExecutor]:
        """Those of the stages on processes, in order."""
        return list(self._processes.values())

    def begin_epoch(self) -> Epoch:
        """Begin an epoch, with executors made where there are none.

        Raises:
            RuntimeError: If the source is an iterator, and an epoch has used it.
            ClosedLoaderError: If another thread has ended everything meanwhile.
        """
        self.pid = os.getpid()
        end_count = self._end_count
        source = self._plan.source
        if self._epoch_count and isinstance(source, Iterator | AsyncIterator):
            raise RuntimeError(
                f"the pipeline's source, a {type(source).__name__}, is an iterator, and an epoch "
                "has used it up or taken some of it: give add_source an iterable that can be "
                "iterated again (an object with __iter__), or build a pipeline for each epoch"
            )
        try:
            self._make_crews()
            self._epoch_count += 1
            epoch = self.epoch = Epoch(self._plan, self._calls, self._listed)
            epoch.begin()
        except BaseException:
            if self.epoch is not None:
                self.epoch.let_go()
            self.end()
            raise
        if self._end_count != end_count:  # it may have seen a part of what was made
            self.end()
            raise ClosedLoaderError("the pipeline was stopped while it started")
        return epoch

    def settle(self) -> None:
        """An epoch was told to its end: executors stay, but for what they hold of it."""
        for executor in self._executors or ():
            if isinstance(executor, _DeviceExecutor):
                executor.stage.close()

    def leave_epoch(self, why: str) -> None:
        """Leave the present epoch, wherever it is. May be called from anywhere, and again."""
        if self.epoch is not None:
            self.epoch.leave(why)
        self._end(with_processes=False)

    def end(self) -> None:
        """End everything. May be called from anywhere, and again."""
        self._end_count += 1
        if self.epoch is not None:
            self.epoch.leave("it was stopped")
        self._end(with_processes=True)

    def _end(self, *, with_processes: bool) -> None:
        if os.getpid() != self.pid:
            return  # a forked child: nothing of it runs here
        deadline = time.monotonic() + _JOIN_S
        uninterruptible(
            functools.partial(self._end_crews, [], deadline, with_processes=with_processes)
        )

    def _end_crews(self, ended: list[_Ending], deadline: float, *, with_processes: bool) -> None:
        """Tell executors to end, and wait for them; again after an interruption.

        Args:
            ended: Those that were to be ended before the interruption.
            deadline: Until when to wait, as ``time.monotonic()`` has it.
            with_processes: Whether worker processes are ended, too.
        """
        ended += self._executors or ()
        self._executors = None
        if with_processes:
            ended += self._processes.values()
            self._processes = {}
        with contextlib.ExitStack() as stack:  # one that is interrupted keeps none of the others
            for executor in reversed(ended):
                stack.callback(uninterruptible, functools.partial(_join, executor, deadline))
            for executor in ended:
                executor.end()

    # Executors -------------------------------------------------------------------------------

    def _make_crews(self) -> None:
        processes = self._make_processes()
        if self._executors is None:
            executors: list[_Ending] = []
            try:
                self._calls = self._make_executors(executors, processes)
            finally:
                self._executors = executors

    def _make_processes(self) -> dict[int, ProcessExecutor]:
        """Start workers where there are none, before any thread of the pipeline's; all of them."""
        plan, started, processes = self._plan, [], {}
        wanted = {
            place: stage
            for place, stage in enumerate(plan.stages)
            if isinstance(stage, Pipe) and stage.where is Where.PROCESSES
        }
        for place, pipe in wanted.items():
            known = self._processes.get(place)
            if known is not None and known.is_broken:
                del self._processes[place]
                known.end()
                known.join(time.monotonic() + _JOIN_S)
                known = None
            if known is None:
                # Calls of another executor's are no use any more.
                self.leave_epoch("its workers were ended")
                lent, locker = plan.lent_after(place), self._locker_of(place)
                executor = ProcessExecutor(pipe, lent, locker, len(wanted))
                self._processes[place] = known = executor
                started.append(executor)
            processes[place] = known
        for executor in started:
            executor.start()
        return processes

    def _locker_of(self, place: int) -> PageLocker | None:
        """What locks a stage's slots: if a device comes next, which reads results out of them."""
        first, *following = self._plan.stages[place : place + 2]
        if not isinstance(first, Pipe) or first.where is not Where.PROCESSES:
            return None
        for pipe in following:
            if isinstance(pipe, Pipe) and pipe.where is Where.DEVICE:
                return self._destination(place + 1, pipe).locks
        return None

    def _destination(self, place: int, pipe: Pipe) -> Destination:
        if place not in self._destinations:
            self._destinations[place] = Destination([pipe.device])
        return self._destinations[place]

    def _make_executors(
        self, executors: list[_Ending], processes: dict[int, ProcessExecutor]
    ) -> list[Call | None]:
        plan = self._plan
        pipes = [stage for stage in plan.stages if isinstance(stage, Pipe)]
        is_async = not isinstance(plan.source, collections.abc.Iterable)
        loop: LoopExecutor | None = None
        if is_async or any(pipe.where is Where.LOOP for pipe in pipes):
            loop = LoopExecutor("shmloader_loop")
            executors.append(loop)
        threads: ThreadExecutor | None = None
        if any(pipe.where is Where.THREADS for pipe in pipes):
            threads = ThreadExecutor("shmloader_pipe", plan.num_threads)
            executors.append(threads)
        device_executor: _DeviceExecutor | None = None
        calls: list[Call | None] = [self._source_call(loop, executors)]
        for place, stage in enumerate(plan.stages):
            if isinstance(stage, Group):
                calls.append(None)
                continue
            executor: Any
            op: Callable[[Any], object] = stage.op
            if stage.where is Where.PROCESSES:
                executor = processes[place]
            elif stage.where is Where.LOOP:
                executor = loop
            elif stage.where is Where.THREADS:
                executor = threads
            elif stage.where is Where.EXECUTOR:
                assert stage.executor is not None
                executor = ExecutorStage(stage.executor)
                executors.append(executor)
            else:
                device_executor = executor = _DeviceExecutor(self._destination(place, stage))
                op = executor.copy
                executors.append(executor)
            if device_executor is not None and executor is not device_executor:
                op = AfterTransfer(op, stage.kind, device_executor.stage)
            calls.append(Call(stage.name, op, stage.kind, executor))
        return calls

    def _source_call(self, loop: LoopExecutor | None, executors: list[_Ending]) -> Call:
        source = self._plan.source
        if not isinstance(source, collections.abc.Iterable):
            assert loop is not None
            results = functools.partial(_iterate_async, source)
            return Call(SOURCE, results, OpKind.ASYNC_GENERATOR, loop, is_source=True)
        executor = ThreadExecutor("shmloader_source", 1)
        executors.append(executor)
        return Call(
            SOURCE, functools.partial(_iterate, source), OpKind.GENERATOR, executor, is_source=True
        )

    def check_process(self) -> None:
        """Raise ClosedLoaderError in a child that was forked while epochs were told here."""
        if self.pid not in (None, os.getpid()):
            raise ClosedLoaderError("the pipeline belongs to the process that started it")


def _join(executor: _Ending, deadline: float) -> None:
    executor.join(deadline)


def _iterate(source: Iterable[Any], _: object) -> Iterator[Any]:
    """The source as an op; its thread is the only one that iterates it."""
    return iter(source)


async def _iterate_async(source: AsyncIterable[Any], _: object) -> AsyncIterator[Any]:
    async for item in source:
        yield item
