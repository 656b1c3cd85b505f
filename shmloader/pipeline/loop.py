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
import inspect
import time
from collections.abc import Callable
from typing import Any

from shmloader.pipeline.config import Lifecycle, OpKind, refuse_coroutine
from shmloader.pipeline.executors import EXIT_S, results_of
from shmloader.pipeline.stages import Job
from shmloader.threads.background import BackgroundThread

# How long coroutines may take to end after they were cancelled, in seconds.
_CANCEL_S = 0.3


class LoopExecutor(BackgroundThread):
    """Runs coroutines and async generators on an event loop with a thread of its own.

    One asyncio task runs a job and those that follow from it. It runs an async generator to the
    generator's end, and sleeps while the epoch has no space for results. The generator cannot move
    to another asyncio task, since its timeouts and task groups belong to the task that runs it.
    """

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(self) -> None:
        super().__init__("shmloader_loop")
        self._loop = asyncio.new_event_loop()
        # The running or finished `setup` of each stage.
        self._contexts: dict[Lifecycle, asyncio.Task[Any]] = {}
        self._waiting: collections.deque[Job] = collections.deque()
        self._is_called = self._is_ending = self._is_stopped = False
        # The loop itself holds asyncio tasks weakly.
        self._running: set[asyncio.Task[None]] = set()
        # Suspended async generators: each resumes when its future is set.
        self._suspended: dict[Job, asyncio.Future[None]] = {}

    def wake(self) -> None:
        """Make the thread pause. Called from the thread that asks for the pause."""
        self._call(self.pause)

    def _call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def work(self) -> None:
        """Run the loop until :meth:`end`."""
        try:
            asyncio.set_event_loop(self._loop)
            while not self._is_stopped:
                # If an asyncio task of an op raises SystemExit or KeyboardInterrupt, `run_forever`
                # raises it, too. The coroutine that awaits the task gets it, so the loop continues.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    def put(self, job: Job) -> None:
        """Run a job on the loop, or resume an async generator. From any thread."""
        self._waiting.append(job)
        if not self._is_called:
            self._is_called = True
            self._call(self._start_all)

    def _start_all(self) -> None:
        """Start all waiting jobs. On the loop."""
        self._is_called = False
        while self._waiting:
            job = self._waiting.popleft()
            if not self._resume(job) and not self._is_ending:
                self._start(self._work(job))

    def _start(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _resume(self, job: Job) -> bool:
        """Resume the suspended generator of a job. Returns False if there is none."""
        suspended = self._suspended.pop(job, None)
        if suspended is not None and not suspended.done():
            suspended.set_result(None)
        return suspended is not None

    async def _work(self, first: Job) -> None:
        job: Job | None = first
        while job is not None and not job.epoch.is_over and not self._resume(job):
            job = await self._serve(job)

    async def _serve(self, job: Job) -> Any:
        epoch, lifecycle = job.epoch, job.op.lifecycle
        context: tuple[object, ...] | None = None
        try:
            context = () if lifecycle is None else (await self._context_of(lifecycle),)
            return await self._execute(job, context)
        except BaseException as error:
            if self._is_ending and isinstance(error, asyncio.CancelledError):
                raise
            if context is None:
                return epoch.failed_for_good(job, error, in_setup=True)
            return epoch.failed(job, error)

    async def _context_of(self, lifecycle: Lifecycle) -> Any:
        """Return the stage's context. Raises what ``setup`` raises.

        One asyncio task calls ``setup``, and all coroutines of the stage wait for that task. If one
        of them is cancelled, the task continues.
        """
        setup = self._contexts.get(lifecycle)
        if setup is None:
            setup = self._contexts[lifecycle] = self._loop.create_task(_call_and_await(lifecycle))
        return await asyncio.shield(setup)

    async def _execute(self, job: Job, context: tuple[object, ...]) -> Any:
        op, epoch = job.op, job.epoch
        job.began_ns = time.monotonic_ns()
        if op.kind is OpKind.ASYNC_GENERATOR:
            async with contextlib.aclosing(op.op(job.item, *context)) as results:
                async for result in results:
                    if not epoch.yielded(job, result):
                        await self._suspend(job)
                    job.began_ns = time.monotonic_ns()
            return epoch.finished(job)
        result = await op.op(job.item, *context)
        refuse_coroutine(result, f"the op of stage '{op.name}'")
        return epoch.finished(job, results_of(result, op.kind))

    async def _suspend(self, job: Job) -> None:
        """Wait until the generator's result was passed on, and its job was put here again."""
        # No step of the loop lies between the result and this line, so the job cannot have come
        # back before.
        suspended = self._suspended[job] = self._loop.create_future()
        try:
            await suspended
        finally:
            self._suspended.pop(job, None)

    def end(self) -> None:
        """Cancel all coroutines and end the loop. From any thread; does not wait."""
        self._call(self._cancel_all)

    def _cancel_all(self) -> None:
        if not self._is_ending:  # else `end` was called again
            self._is_ending = True
            self._waiting.clear()
            left = asyncio.all_tasks(self._loop)  # including those that ops have begun
            for task in left:
                task.cancel()
            self._start(self._stop_when_cancelled(left))

    async def _stop_when_cancelled(self, left: set[asyncio.Task[Any]]) -> None:
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        while self._contexts:
            lifecycle, setup = self._contexts.popitem()
            if setup.done() and not setup.cancelled() and setup.exception() is None:
                with lifecycle.logged():
                    result = lifecycle.tear_down(setup.result())
                    if inspect.isawaitable(result):
                        await result
        self._is_stopped = True
        self._loop.stop()


async def _call_and_await(lifecycle: Lifecycle) -> Any:
    context = lifecycle.setup()
    return await context if inspect.isawaitable(context) else context
