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
from collections.abc import Callable
from typing import Any

from shmloader.interruptions import is_interruption
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

    Attributes:
        loop: The event loop.
    """

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(self) -> None:
        super().__init__("shmloader_loop")
        self.loop = asyncio.new_event_loop()
        # The running or finished `setup` of each stage.
        self._contexts: dict[Lifecycle, asyncio.Task[Any]] = {}
        self._ending: asyncio.Task[None] | None = None
        self._waiting: collections.deque[Job] = collections.deque()
        self._is_called = False
        self._is_ending = False
        self._is_stopped = False
        self._running: set[asyncio.Task[None]] = set()
        # Suspended async generators: each resumes when its future is set.
        self._suspended: dict[Job, asyncio.Future[None]] = {}

    def wake(self) -> None:
        """Make the thread pause. Called from the thread that asks for the pause."""
        self._call(self.pause)

    def _call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function, unless the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError as error:
            if is_interruption(error):
                raise

    def work(self) -> None:
        """Run the loop until :meth:`end`."""
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

    def put(self, job: Job) -> None:
        """Run a job on the loop, or resume an async generator. From any thread."""
        self._waiting.append(job)
        if not self._is_called:
            self._is_called = True
            self._call(self._take_all)

    def _take_all(self) -> None:
        """Start all waiting jobs. On the loop."""
        self._is_called = False
        while self._waiting:
            job = self._waiting.popleft()
            if not self._resume(job) and not self._is_ending and not job.epoch.is_over:
                running = self.loop.create_task(self._work(job))
                self._running.add(running)
                running.add_done_callback(self._running.discard)

    def _resume(self, job: Job) -> bool:
        """Resume the suspended generator of a job. Returns False if there is none."""
        suspended = self._suspended.pop(job, None)
        if suspended is not None and not suspended.done():
            suspended.set_result(None)
        return suspended is not None

    async def _work(self, first: Job) -> None:
        job: Job | None = first
        while job is not None and not job.epoch.is_over:
            job = await self._serve(job)
            if job is not None and self._resume(job):
                return

    async def _serve(self, job: Job) -> Job | None:
        epoch, lifecycle = job.epoch, job.op.lifecycle
        context: tuple[object, ...] = ()
        is_set_up = False
        try:
            if lifecycle is not None:
                context = (await self._context_of(lifecycle),)
            is_set_up = True
            return await self._execute(job, context)
        except BaseException as error:
            if self._is_ending and isinstance(error, asyncio.CancelledError):
                raise
            if not is_set_up:
                return epoch.failed_for_good(job, error, in_setup=True)
            return epoch.failed(job, error)

    async def _context_of(self, lifecycle: Lifecycle) -> Any:
        """Return the stage's context. Raises what ``setup`` raises.

        One asyncio task calls ``setup``, and all coroutines of the stage wait for that task. If one
        of them is cancelled, the task continues.
        """
        setup = self._contexts.get(lifecycle)
        if setup is None:
            setup = self._contexts[lifecycle] = self.loop.create_task(lifecycle.set_up_on_loop())
        return await asyncio.shield(setup)

    async def _execute(self, job: Job, context: tuple[object, ...]) -> Job | None:
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
        return epoch.finished(job, *results_of(result, op.kind))

    async def _suspend(self, job: Job) -> None:
        """Wait until the generator's result was passed on, and its job was put here again."""
        # No step of the loop lies between the result and this line, so the job cannot have come
        # back before.
        suspended = self._suspended[job] = self.loop.create_future()
        try:
            await suspended
        finally:
            self._suspended.pop(job, None)

    def end(self) -> None:
        """Cancel all coroutines and end the loop. From any thread; does not wait."""
        self._is_ending = True
        self._call(self._end_here)

    def _end_here(self) -> None:
        if self._ending is None:  # else `end` was called again
            self._waiting.clear()
            left = asyncio.all_tasks(self.loop)  # including those that ops have begun
            for task in left:
                task.cancel()
            # Kept, since the loop itself holds tasks weakly.
            self._ending = self.loop.create_task(self._stop_when_cancelled(left))

    async def _stop_when_cancelled(self, left: set[asyncio.Task[Any]]) -> None:
        if left:
            await asyncio.wait(left, timeout=_CANCEL_S)
        while self._contexts:
            lifecycle, setup = self._contexts.popitem()
            if setup.done() and not setup.cancelled() and setup.exception() is None:
                await lifecycle.tear_down_on_loop(setup.result())
        self._is_stopped = True
        self.loop.stop()
