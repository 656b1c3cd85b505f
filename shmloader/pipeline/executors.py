"""Executors: daemon threads that call functions, and event loops on daemon threads.

::

    any thread that brings a result             a thread, or a loop
    ───────────────────────────────             ───────────────────
    job ── a queue, oldest first ─────────────▶ op(item)
    epoch.finished(job, result) ◀────────────── and, if there is one, the next job at once

Guarantees:
    * ``end`` does not wait for an op. A thread that is in an op ends when the op returns, and keeps
      neither the caller nor the interpreter alive.
    * The end of a loop cancels all coroutines, and the asyncio tasks that ops have begun. A
      coroutine that resists being cancelled is abandoned.
    * An idle thread holds only the queue and its contexts, so it keeps no pipeline alive.
    * Contexts of stages are torn down on their thread when the thread ends, or on the loop when all
      cancelled coroutines have ended, or after ``_CANCEL_S`` seconds.
    * At the interpreter's exit, threads are asked to pause. The exit waits for them at most
      ``_EXIT_S`` seconds.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import itertools
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmloader.pipeline.config import Lifecycle, OpKind, refuse_coroutine
from shmloader.pipeline.stages import Job
from shmloader.pools.executor_kinds import CHECK_S, ExecutorGoneError, open_executor
from shmloader.threads.background import BackgroundThread

_BrokenExecutor = concurrent.futures.BrokenExecutor

# How long the interpreter's exit waits for an executor's threads, in seconds.
_EXIT_S = 0.3

# How long coroutines may take to end after they were cancelled, in seconds.
_CANCEL_S = 0.3


class StageExecutor(Protocol):
    """Runs the jobs of one or more stages."""

    def start(self) -> object:
        """Start the executor's threads. The caller ends the executor if this raises."""

    def put(self, job: Job) -> object:
        """Have a job run, or resume. Called from any thread; does not wait."""

    def end(self) -> object:
        """Tell the executor to end. From any thread, and again; does not wait."""

    def join(self, timeout_s: float) -> object:
        """Wait for the executor's end."""


def call_all(op: Callable[..., Any], item: Any, *context: Any) -> list[Any]:
    """Return all results of a generator function for an item, except None."""
    return [value for value in op(item, *context) if value is not None]


def results_of(result: Any, kind: OpKind) -> Sequence[Any]:
    """Return the results of a call: for a generator function, those of :func:`call_all`."""
    if kind is OpKind.GENERATOR:
        return list(result)
    return () if result is None else (result,)


class _Thread(BackgroundThread):
    """A thread of a :class:`ThreadExecutor`. It takes jobs off a queue until there is a None."""

    parks_for_forks = False
    exit_s = _EXIT_S

    def __init__(
        self,
        name: str,
        jobs: "queue.SimpleQueue[Job | None]",
        prepare: Callable[[], None] | None,
    ) -> None:
        super().__init__(name)
        self._queue = jobs
        self._prepare = prepare
        self._contexts: dict[Lifecycle, Any] = {}

    def work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        try:
            while self._serve_one():
                pass
        finally:
            while self._contexts:
                lifecycle, context = self._contexts.popitem()
                with lifecycle.logged():
                    refuse_coroutine(lifecycle.tear_down(context), "it")

    def _serve_one(self) -> bool:
        """Run one job and those that follow from it. Returns False when the thread is to end."""
        try:
            job = self._queue.get_nowait()
        except queue.Empty:
            with self.resting():
                job = self._queue.get()
        if job is None:
            return False
        while job is not None:
            self.pause()
            job = self._execute(job)
        return True

    def _execute(self, job: Job) -> Any:
        """Run a function or a generator function. Returns the job that follows, if any."""
        stage, epoch = job.stage, job.epoch
        if epoch.is_over:
            return None
        lifecycle, contexts = stage.lifecycle, self._contexts
        if lifecycle is not None and lifecycle not in contexts:
            try:
                contexts[lifecycle] = lifecycle.set_up()
            except BaseException as error:  # noqa: BLE001 - raised to the consumer
                return epoch.failed_for_good(job, error, in_setup=True)
        context = () if lifecycle is None else (contexts[lifecycle],)
        job.began_ns = time.monotonic_ns()
        try:
            if stage.kind is not OpKind.GENERATOR:
                result = stage.op(job.item, *context)
            elif context:  # it may be used only on this thread
                result = call_all(stage.op, job.item, *context)
            else:
                return _run_generator(job)
            refuse_coroutine(result, f"the op of stage '{stage.name}'")
        except BaseException as error:  # noqa: BLE001 - raised to the consumer
            return epoch.failed(job, error)
        return epoch.finished(job, results_of(result, stage.kind))


def _run_generator(job: Job) -> Any:
    """Pass on a generator's results until the epoch has no space for more, or there are no more."""
    epoch = job.epoch
    if job.results is None:
        job.results = iter(job.stage.op(job.item))
    for result in job.results:
        if not epoch.yielded(job, result):
            return None
        job.began_ns = time.monotonic_ns()
    job.results = None
    return epoch.finished(job)


class ThreadExecutor:
    """Daemon threads that take jobs off one queue.

    Args:
        name: The threads' name; a number is appended.
        count: Number of threads.
        prepare: Called on each thread before its first job.
    """

    def __init__(self, name: str, count: int, prepare: Callable[[], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            _Thread(f"{name}_{number}", self._queue, prepare) for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads. The caller ends the executor if this raises."""
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Have a job run by the next free thread."""
        self._queue.put(job)

    def end(self) -> None:
        """Tell the threads to end after their present jobs. From any thread; does not wait."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after ``end``, so that an op that is about to return can finish.

        Returns:
            Whether all threads have ended.
        """
        deadline = time.monotonic() + timeout_s
        return all(thread.join(deadline - time.monotonic()) for thread in self._threads)


class LoopExecutor(BackgroundThread):
    """Runs coroutines and async generators on an event loop with a thread of its own.

    One asyncio task runs a job and those that follow from it. It runs an async generator to the
    generator's end, and sleeps while the epoch has no space for results. The generator cannot move
    to another asyncio task, since its timeouts and task groups belong to the task that runs it.

    Args:
        name: The thread's name.
    """

    parks_for_forks = False
    exit_s = _EXIT_S

    def __init__(self, name: str) -> None:
        super().__init__(name)
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
        except RuntimeError as error:  # a signal handler may raise one, too
            if str(error) != "Event loop is closed":
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
        epoch, lifecycle = job.epoch, job.stage.lifecycle
        context: tuple[object, ...] | None = None
        try:
            context = () if lifecycle is None else (await self._context_of(lifecycle),)
            return await self._execute(job, context)
        except BaseException as error:
            if self._is_ending and isinstance(error, asyncio.CancelledError):
                raise
            if context is None:
                return epoch.failed_for_good(job, error, in_setup=True)
            if isinstance(error, _RefusedError | ExecutorGoneError | _BrokenExecutor):
                cause = error.__cause__ if isinstance(error, _RefusedError) else None
                return epoch.failed_for_good(job, cause or error)
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
        stage, epoch = job.stage, job.epoch
        job.began_ns = time.monotonic_ns()
        if stage.kind is OpKind.ASYNC_GENERATOR:
            async with contextlib.aclosing(stage.op(job.item, *context)) as results:
                async for result in results:
                    if not epoch.yielded(job, result):
                        await self._suspend(job)
                    job.began_ns = time.monotonic_ns()
            return epoch.finished(job)
        result = await stage.op(job.item, *context)
        refuse_coroutine(result, f"the op of stage '{stage.name}'")
        return epoch.finished(job, results_of(result, stage.kind))

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


class _RefusedError(Exception):
    """The user's executor takes no call, because of the exception that is the cause."""


class ExecutorOp:
    """Calls an op on a user's executor. Awaited on a loop of its own, since ``submit`` may block.

    Args:
        executor: The user's ``concurrent.futures.Executor``, which the user shuts down.
        op: A function or a generator function. All results for an item come together.
        kind: The op's kind.
    """

    def __init__(
        self, executor: concurrent.futures.Executor, op: Callable[..., Any], kind: OpKind
    ) -> None:
        self._executor = open_executor(executor)
        self._call = (call_all, op) if kind is OpKind.GENERATOR else (op,)
        # Dask runs calls with equal names only once. Without a name, a call is named by its
        # arguments. So each call gets a name of its own.
        self._prefix = f"shmloader-{secrets.token_hex(8)}-"
        self._numbers = itertools.count()

    async def __call__(self, item: Any) -> Any:
        """Return the op's result, or raise what it raises."""
        name, check = f"{self._prefix}{next(self._numbers)}", self._executor.check
        try:
            future = asyncio.wrap_future(self._executor.submit(name, *self._call, item))
        except Exception as error:
            raise _RefusedError from error
        while check is not None and not (await asyncio.wait([future], timeout=CHECK_S))[0]:
            check()  # fails the futures of an executor that is gone
        return await future
