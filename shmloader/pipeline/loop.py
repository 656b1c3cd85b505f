"""An executor of coroutines and async generators: an event loop on a daemon thread.

Guarantees:
    * ``end`` cancels all coroutines, and the asyncio tasks that ops have begun. A coroutine that
      resists being cancelled is abandoned. One that blocks the loop is left behind with its thread,
      which keeps neither the caller nor the interpreter alive.
    * Contexts of stages are torn down on the loop when all cancelled coroutines have ended, or
      after ``_CANCEL_S`` seconds.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

from shmloader.interruptions import is_interruption
from shmloader.pipeline.config import OpKind
from shmloader.pipeline.epoch import Task
from shmloader.pipeline.executors import EXIT_S, refuse_coroutine
from shmloader.pipeline.lifecycle import LoopContexts
from shmloader.threads.background import BackgroundThread

# How long coroutines may take to end after they were cancelled, in seconds.
_CANCEL_S = 0.3


class _LoopThread(BackgroundThread):
    """The loop's thread. It can pause between two callbacks of the loop."""

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.loop = asyncio.new_event_loop()
        self._is_stopped = False

    def wake(self) -> None:
        """Make the thread pause. Called from the thread that asks for the pause."""
        self.call(self.pause)

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function, unless the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError as error:
            if is_interruption(error):
                raise

    def stop(self) -> None:
        """End the loop. Called on the loop."""
        self._is_stopped = True
        self.loop.stop()

    def work(self) -> None:
        try:
            asyncio.set_event_loop(self.loop)
            while not self._is_stopped:
                # If an asyncio task of an op raises SystemExit or KeyboardInterrupt, `run_forever`
                # raises it, too. The coroutine that awaits the task gets it, so the loop continues.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


class LoopExecutor:
    """Runs coroutines and async generators on an event loop with a thread of its own.

    One asyncio task runs a job and those that follow from it. It runs an async generator to the
    generator's end, and sleeps while the epoch has no space for results. The generator cannot move
    to another asyncio task, since its timeouts and task groups belong to the task that runs it.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._thread = _LoopThread(name)
        self._contexts = LoopContexts()
        self._running_end: asyncio.Task[None] | None = None
        self._waiting: collections.deque[Task] = collections.deque()
        self._is_called = False
        self._is_ending = False
        self._running: set[asyncio.Task[None]] = set()
        # Suspended async generators, by id() of their jobs: each resumes when its future is set.
        self._suspended: dict[int, asyncio.Future[None]] = {}

    def start(self) -> None:
        """Start the thread. The caller ends the executor if this raises."""
        self._thread.start()

    def put(self, task: Task) -> None:
        """Run a task on the loop, or resume an async generator. From any thread."""
        self._waiting.append(task)
        if not self._is_called:
            self._is_called = True
            self._thread.call(self._take_all)

    def _take_all(self) -> None:
        """Start all waiting tasks. On the loop."""
        self._is_called = False
        while self._waiting:
            task = self._waiting.popleft()
            if not self._resume(task) and not self._is_ending and not task.epoch.is_over:
                running = self._thread.loop.create_task(self._work(task))
                self._running.add(running)
                running.add_done_callback(self._running.discard)

    def _resume(self, task: Task) -> bool:
        """Resume the suspended generator of a task. Returns False if there is none."""
        suspended = self._suspended.pop(id(task.job), None)
        if suspended is not None and not suspended.done():
            suspended.set_result(None)
        return suspended is not None

    async def _work(self, first: Task) -> None:
        task: Task | None = first
        while task is not None and not task.epoch.is_over:
            task = await self._serve(task)
            if task is not None and self._resume(task):
                return

    async def _serve(self, task: Task) -> Task | None:
        context: tuple[object, ...] = ()
        try:
            if task.stage.lifecycle is not None:
                context = (await self._contexts.context_of(task.stage.lifecycle),)
        except BaseException as error:
            if self._is_ending and isinstance(error, asyncio.CancelledError):
                raise
            return task.epoch.failed_to_set_up(task, error)
        try:
            return await self._run(task, context)
        except asyncio.CancelledError as error:
            if self._is_ending:
                raise
            return task.epoch.failed(task, error)  # raised by the op itself
        except BaseException as error:  # noqa: BLE001 - raised to the consumer
            return task.epoch.failed(task, error)

    async def _run(self, task: Task, context: tuple[object, ...]) -> Task | None:
        job, stage, epoch = task.job, task.stage, task.epoch
        job.began_ns = time.monotonic_ns()
        if stage.kind is OpKind.ASYNC_GENERATOR:
            results = cast("AsyncGenerator[object]", stage.op(job.item, *context))
            async with contextlib.aclosing(results):
                async for result in results:
                    if not epoch.yielded(task, result):
                        await self._suspend(task)
                    job.began_ns = time.monotonic_ns()
            return epoch.finished(task)
        result = await cast("Awaitable[object]", stage.op(job.item, *context))
        refuse_coroutine(result, stage.name)
        return epoch.finished(task) if result is None else epoch.finished(task, result)

    async def _suspend(self, task: Task) -> None:
        """Wait until the generator's result was passed on, and its job was put here again."""
        # Keyed by the job, which comes back in another `Task`. No step of the loop lies between the
        # result and this line, so the job cannot have come back before.
        suspended = self._suspended[id(task.job)] = self._thread.loop.create_future()
        try:
            await suspended
        finally:
            self._suspended.pop(id(task.job), None)

    def end(self) -> None:
        """Cancel all coroutines and end the loop. From any thread; does not wait."""
        self._is_ending = True
        self._thread.call(self._end_here)

    def _end_here(self) -> None:
        if self._running_end is not None:  # `end` was called again
            return
        self._waiting.clear()
        left = asyncio.all_tasks(self._thread.loop)  # including those that ops have begun
        for task in left:
            task.cancel()
        ending = self._thread.loop.create_task(self._stop_when_cancelled(left))
        self._running_end = ending  # the loop itself holds tasks weakly

    async def _stop_when_cancelled(self, left: set[asyncio.Task[Any]]) -> None:
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        await self._contexts.close()
        self._thread.stop()

    def join(self, deadline: float) -> None:
        """Wait for the thread after ``end``, until ``deadline`` (``time.monotonic()``)."""
        self._thread.join(deadline - time.monotonic())
