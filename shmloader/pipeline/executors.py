"""Executors of functions and generator functions: daemon threads, and a user's own executor.

::

    any thread that brings a result             a thread
    ───────────────────────────────             ────────
    job ── a queue, oldest first ─────────────▶ op(item)
    epoch.finished(job, result) ◀────────────── and, if there is one, the next job at once

Guarantees:
    * ``end`` does not wait for an op. A thread that is in an op ends when the op returns, and keeps
      neither the caller nor the interpreter alive.
    * An idle thread holds only the queue and its contexts, so it keeps no pipeline alive.
    * Contexts of stages are torn down on their thread when the thread ends.
    * At the interpreter's exit, threads are asked to pause. The exit waits for them at most
      ``EXIT_S`` seconds.
"""

import concurrent.futures
import functools
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

#: How long the interpreter's exit waits for an executor's threads, in seconds.
EXIT_S = 0.3


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
    exit_s = EXIT_S

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
        op, epoch = job.op, job.epoch
        if epoch.is_over:
            return None
        lifecycle, contexts = op.lifecycle, self._contexts
        if lifecycle is not None and lifecycle not in contexts:
            try:
                contexts[lifecycle] = lifecycle.set_up()
            except BaseException as error:  # noqa: BLE001 - raised to the consumer
                return epoch.failed_for_good(job, error, in_setup=True)
        context = () if lifecycle is None else (contexts[lifecycle],)
        job.began_ns = time.monotonic_ns()
        try:
            if op.kind is OpKind.GENERATOR and not context:
                return _run_generator(job)
            # A generator may use its context only on this thread.
            call = functools.partial(call_all, op.op) if op.kind is OpKind.GENERATOR else op.op
            result = call(job.item, *context)
            refuse_coroutine(result, f"the op of stage '{op.name}'")
        except BaseException as error:  # noqa: BLE001 - raised to the consumer
            return epoch.failed(job, error)
        return epoch.finished(job, results_of(result, op.kind))


def _run_generator(job: Job) -> Any:
    """Pass on a generator's results until the epoch has no space for more, or there are no more."""
    epoch = job.epoch
    if job.results is None:
        job.results = iter(job.op.op(job.item))
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


class FuturesExecutor(BackgroundThread):
    """Submits jobs to a ``concurrent.futures.Executor``, which the user shuts down.

    All results of a generator function for an item come together. Only the thread of this object
    calls the executor, and brings results to the epoch: an executor may call a future's callbacks
    while it holds the lock that ``submit`` takes.

    Args:
        executor: The user's executor.
    """

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        super().__init__("shmloader_submit")
        self._executor = open_executor(executor)
        # Dask runs calls with equal names only once. Without a name, a call is named by its
        # arguments. So each call gets a name of its own.
        self._prefix = f"shmloader-{secrets.token_hex(8)}-"
        self._numbers = itertools.count()
        # Jobs to submit, futures that are done, and at the end None.
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs: dict[concurrent.futures.Future[Any], Job] = {}

    def put(self, job: Job) -> None:
        """Have a job submitted. From any thread."""
        self._queue.put(job)

    def work(self) -> None:
        """Submit jobs and bring results to the epoch until the end."""
        try:
            while (entry := self._next()) is not None:
                job = entry if isinstance(entry, Job) else self._finish(entry)
                while job is not None and not job.epoch.is_over:
                    job = self._submit(job)
        finally:
            for future in list(self._jobs):
                future.cancel()

    def _next(self) -> Any:
        """Return the next entry of the queue."""
        check = self._executor.check
        while True:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                pass
            try:
                with self.resting():
                    return self._queue.get(timeout=None if check is None else CHECK_S)
            except queue.Empty:
                if check is not None and self._jobs:
                    check()  # fails the futures of an executor that is gone

    def _submit(self, job: Job) -> Any:
        """Submit a job. Returns the job that follows if that fails, if any."""
        op = job.op
        call = (call_all, op.op) if op.kind is OpKind.GENERATOR else (op.op,)
        job.began_ns = time.monotonic_ns()
        try:
            name = f"{self._prefix}{next(self._numbers)}"
            future = self._executor.submit(name, *call, job.item)
        except BaseException as error:  # noqa: BLE001 - it is shut down, or broken
            return job.epoch.failed_for_good(job, error)
        self._jobs[future] = job
        future.add_done_callback(self._queue.put)
        return None

    def _finish(self, future: concurrent.futures.Future[Any]) -> Any:
        """Bring a future's result or failure to the epoch. Returns the job that follows, if any."""
        job = self._jobs.pop(future)
        op, epoch = job.op, job.epoch
        try:
            result = future.result()
            refuse_coroutine(result, f"the op of stage '{op.name}'")
        except concurrent.futures.CancelledError:
            error = RuntimeError("the item's future was cancelled")
            return epoch.failed_for_good(job, error)
        except (ExecutorGoneError, concurrent.futures.BrokenExecutor) as error:
            return epoch.failed_for_good(job, error)
        except BaseException as error:  # noqa: BLE001 - raised to the consumer
            return epoch.failed(job, error)
        return epoch.finished(job, results_of(result, op.kind))

    def end(self) -> None:
        """End the thread, which cancels all calls that have not begun. From any thread."""
        self._queue.put(None)
