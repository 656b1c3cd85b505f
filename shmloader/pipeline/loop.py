"""An executor of coroutines: one event loop, on a daemon thread.

One coroutine runs one job after the other, as long as there is a next at once. That of an async
generator stays with it to its end, at rest while there is no room for its results: what such a
generator does (a timeout, a task group) may belong to the task that runs it.

Guarantees:
    * ``end`` cancels what runs, and the tasks that ops have begun. A coroutine that does not let
      itself be cancelled, or holds up the loop, is left behind with its thread, which keeps neither
      the caller nor the interpreter.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

from shmloader.pipeline.epoch import Task
from shmloader.pipeline.ops import OpKind, refuse_coroutine
from shmloader.pipeline.threads import EXIT_S
from shmloader.threads.background import BackgroundThread

# How long coroutines may take to be cancelled.
_CANCEL_S = 0.3


class _LoopThread(BackgroundThread):
    """The loop's thread. Parks between two callbacks of the loop."""

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.loop = asyncio.new_event_loop()
        self._is_stopped = False

    def wake(self) -> None:
        """Have it stand still; from the thread that asks."""
        self.call(self.pause)

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function; nothing once it has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """End the loop. On it."""
        self._is_stopped = True
        self.loop.stop()

    def work(self) -> None:
        try:
            asyncio.set_event_loop(self.loop)
            while not self._is_stopped:
                # A task of the op's own that raises SystemExit or KeyboardInterrupt ends the run.
                # Whoever awaits the task has it raised, so the loop goes on.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


class LoopExecutor:
    """Runs coroutines and async generators on a loop of its own.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._host = _LoopThread(name)
        self._waiting: collections.deque[Task] = collections.deque()
        self._is_called = False
        self._is_ending = False
        self._running: set[asyncio.Task[None]] = set()
        # Async generators at rest: each goes on when its future has a result.
        self._resting: dict[int, asyncio.Future[None]] = {}
        self._host.start()

    def put(self, task: Task) -> None:
        """Have a task run, or an async generator go on. From any thread."""
        self._waiting.append(task)
        if not self._is_called:
            self._is_called = True
            self._host.call(self._take_all)

    def _take_all(self) -> None:
        """Start what waits. On the loop."""
        self._is_called = False
        while self._waiting:
            task = self._waiting.popleft()
            if not self._resumes(task) and not self._is_ending and not task.epoch.is_over:
                running = self._host.loop.create_task(self._work(task))
                self._running.add(running)
                running.add_done_callback(self._running.discard)

    def _resumes(self, task: Task) -> bool:
        """Whether a task is that of a generator at rest, which goes on now."""
        resting = self._resting.pop(id(task.job), None)
        if resting is not None and not resting.done():
            resting.set_result(None)
        return resting is not None

    async def _work(self, first: Task) -> None:
        task: Task | None = first
        while task is not None and not task.epoch.is_over:
            task = await self._serve(task)
            if task is not None and self._resumes(task):
                return

    async def _serve(self, task: Task) -> Task | None:
        try:
            return await self._run(task)
        except asyncio.CancelledError as error:
            if self._is_ending:
                raise
            return task.epoch.failed(task, error)  # of the op itself: nobody else has cancelled it
        except BaseException as error:  # noqa: BLE001 - the consumer is told
            return task.epoch.failed(task, error)

    async def _run(self, task: Task) -> Task | None:
        job, call, epoch = task.job, task.call, task.epoch
        if call.kind is OpKind.ASYNC_GENERATOR:
            results = cast("Callable[[object], AsyncGenerator[object]]", call.op)(job.item)
            async with contextlib.aclosing(results):
                async for result in results:
                    if not epoch.gave(task, result):
                        await self._rest(task)
            return epoch.finished(task)
        result = await cast("Callable[[object], Awaitable[object]]", call.op)(job.item)
        refuse_coroutine(result, call.name)
        return epoch.finished(task) if result is None else epoch.finished(task, result)

    async def _rest(self, task: Task) -> None:
        """Wait until the generator's result was passed on, and it was put in here again."""
        # By the job: each time it is put in here as another task. No step of the loop lies between
        # the result and this line, so the call cannot have come before.
        resting = self._resting[id(task.job)] = self._host.loop.create_future()
        try:
            await resting
        finally:
            self._resting.pop(id(task.job), None)

    def end(self) -> None:
        """Cancel what runs, and end the loop. From anywhere; does not wait."""
        self._is_ending = True
        self._host.call(self._end_here)

    def _end_here(self) -> None:
        self._waiting.clear()
        left = asyncio.all_tasks(self._host.loop)  # those that ops have begun, too
        for task in left:
            task.cancel()
        ending = self._host.loop.create_task(self._stop_when_cancelled(left))
        self._running_end = ending  # the loop itself holds tasks weakly

    async def _stop_when_cancelled(self, left: set[asyncio.Task[Any]]) -> None:
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        self._host.stop()

    def join(self, deadline: float) -> None:
        """After ``end``: wait for the thread, until ``deadline`` (``time.monotonic()``)."""
        self._host.join(deadline - time.monotonic())
