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
    * An unfinished generator is closed on one of the threads when the executor ends.
    * Contexts of stages are torn down on their thread when the thread ends.
    * At the interpreter's exit, threads are asked to pause. The exit waits for them at most
      ``EXIT_S`` seconds.
"""

import concurrent.futures
import functools
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from shmloader.pipeline.config import Lifecycle, OpKind, refuse_coroutine
from shmloader.pipeline.stages import Job
from shmloader.pools.executor_kinds import CHECK_S, ExecutorGoneError, open_executor
from shmloader.threads.background import BackgroundThread

_Future = concurrent.futures.Future[Any]

#: How long the interpreter's exit waits for an executor's threads, in seconds.
EXIT_S = 0.3


def call_all(op: Callable[..., Any], item: Any, *context: Any) -> list[Any]:
    """Return all results of a generator function for an item, except None."""
    return [value for value in op(item, *context) if value is not None]


def results_of(result: Any, kind: OpKind) -> list[Any]:
    """Return the results of a call: for a generator function, those of :func:`call_all`."""
    if kind is OpKind.GENERATOR:
        return list(result)
    return [] if result is None else [result]


class _Thread(BackgroundThread):
    """A thread of a :class:`ThreadExecutor`."""

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(
        self,
        name: str,
        entries: "queue.SimpleQueue[tuple[Job | None, bool]]",
        prepare: Callable[[], None] | None,
    ) -> None:
        super().__init__(name)
        self._queue = entries
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
                lifecycle.tear_down(context)

    def _serve_one(self) -> bool:
        """Run one job and those that follow from it. Returns False when the thread is to end."""
        try:
            job, is_closed = self._queue.get_nowait()
        except queue.Empty:
            with self.resting():
                job, is_closed = self._queue.get()
        if job is None:
            return False
        if is_closed:
            job.results = None  # the last reference: this closes the generator
            return True
        following: Job | None = job
        del job
        while following is not None:
            self.pause()
            following = self._execute(following)
        return True

    def _execute(self, job: Job) -> Job | None:
        """Run a function or a generator function. Returns the job that follows, if any."""
        op, epoch = job.op, job.epoch
        if epoch.is_over:
            return None
        context: tuple[object, ...] = ()
        if op.lifecycle is not None:
            try:
                if op.lifecycle not in self._contexts:
                    self._contexts[op.lifecycle] = op.lifecycle.set_up()
            except BaseException as error:  # noqa: BLE001 - raised to the consumer
                return epoch.failed_for_good(job, error, in_setup=True)
            context = (self._contexts[op.lifecycle],)
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
        return epoch.finished(job, *results_of(result, op.kind))


def _run_generator(job: Job) -> Job | None:
    """Pass on a generator's results until the epoch has no space for more, or there are no more."""
    epoch, executor = job.epoch, job.op.executor
    if job.results is None:
        job.results = iter(job.op.op(job.item))
        executor.begun.add(job)
    try:
        for result in cast("Iterator[object]", job.results):
            if not epoch.yielded(job, result):
                return None
            job.began_ns = time.monotonic_ns()
    except BaseException:
        executor.begun.discard(job)
        raise
    executor.begun.discard(job)
    job.results = None
    return epoch.finished(job)


class ThreadExecutor:
    """Daemon threads that take jobs off one queue.

    Attributes:
        begun: Jobs of generator functions that may have more results.

    Args:
        name: The threads' name; a number is appended.
        count: Number of threads.
        prepare: Called on each thread before its first job.
    """

    def __init__(self, name: str, count: int, prepare: Callable[[], None] | None = None) -> None:
        self.begun: set[Job] = set()
        # Jobs to run, jobs whose generator is to be closed (True), and None for a thread to end.
        self._queue: queue.SimpleQueue[tuple[Job | None, bool]] = queue.SimpleQueue()
        self._threads = [
            _Thread(f"{name}_{number}", self._queue, prepare) for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads. The caller ends the executor if this raises."""
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Have a job run by the next free thread."""
        self._queue.put((job, False))

    def end(self) -> None:
        """Tell the threads to end after their present jobs. From any thread; does not wait."""
        begun, self.begun = list(self.begun), set()
        for job in begun:
            self._queue.put((job, True))
        for _ in self._threads:
            self._queue.put((None, False))

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after ``end``, so that an op that is about to return can finish.

        Returns:
            Whether all threads have ended.
        """
        deadline = time.monotonic() + timeout_s
        return all(thread.join(deadline - time.monotonic()) for thread in self._threads)


class FuturesExecutor(BackgroundThread):
    """Submits jobs to a ``concurrent.futures.Executor``, which the user shuts down.

    All results of a generator function for an item come together.

    The thread that brings a result submits the jobs that may start then. A thread of this object
    stands in for the consumer's and the main thread, where a signal handler might interrupt
    ``submit``, and for threads that bring failures: an executor that breaks or cancels its futures
    may call their callbacks while it holds the lock that ``submit`` takes.

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
        self._queue: queue.SimpleQueue[Job | _Future | None] = queue.SimpleQueue()
        self._jobs: dict[_Future, Job] = {}

    def put(self, job: Job) -> None:
        """Submit a job, or have it submitted. From any thread."""
        if _may_be_interrupted(job):
            self._queue.put(job)
        else:
            self._submit(job)

    def work(self) -> None:
        """Submit jobs and handle results until the end."""
        try:
            while self._serve_one():
                pass
        finally:
            self._cancel_all()

    def _serve_one(self) -> bool:
        """Submit a job, or handle a result. Returns False when the thread is to end."""
        entry = self._next()
        if entry is None:
            return False
        if isinstance(entry, Job):
            self._submit(entry)
        else:
            self._finish(entry)
        return True

    def _next(self) -> "Job | _Future | None":
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

    def _submit(self, job: Job | None) -> None:
        """Submit a job. If that fails, submits the job that may follow."""
        while job is not None and not job.epoch.is_over:
            job = self._try_submit(job)

    def _try_submit(self, job: Job) -> Job | None:
        job.began_ns = time.monotonic_ns()
        try:
            name = f"{self._prefix}{next(self._numbers)}"
            is_generator = job.op.kind is OpKind.GENERATOR
            call = (call_all, job.op.op) if is_generator else (job.op.op,)
            future: _Future = self._executor.submit(name, *call, job.item)
        except BaseException as error:  # noqa: BLE001 - it is shut down, or broken
            return job.epoch.failed_for_good(job, error)
        self._jobs[future] = job
        if future.done():  # `submit` may have run the call: these calls must not pile up
            self._queue.put(future)
        else:
            future.add_done_callback(self._done)
        return None

    def _done(self, future: _Future) -> None:
        """Bring a future's result to the epoch. Called on any thread."""
        job = self._jobs[future]
        if _may_be_interrupted(job):
            self._queue.put(future)
            return
        try:
            result = future.result()
        except BaseException:  # noqa: BLE001 - handled on the thread of this object
            self._queue.put(future)
            return
        del self._jobs[future]
        op, epoch = job.op, job.epoch
        try:
            refuse_coroutine(result, f"the op of stage '{op.name}'")
        except TypeError as refused:
            self._submit(epoch.failed(job, refused))
        else:
            self._submit(epoch.finished(job, *results_of(result, op.kind)))

    def _finish(self, future: _Future) -> None:
        """Bring a future's result or failure to the epoch. Called on the thread of this object."""
        error = None if future.cancelled() else future.exception()
        if error is None and not future.cancelled():
            self._done(future)
            return
        job = self._jobs.pop(future)
        is_gone = isinstance(error, ExecutorGoneError | concurrent.futures.BrokenExecutor)
        if error is not None and not is_gone:
            self._submit(job.epoch.failed(job, error))
            return
        error = error or RuntimeError("the item's future was cancelled")
        self._submit(job.epoch.failed_for_good(job, error))

    def end(self) -> None:
        """Cancel all jobs that have not begun, and end the thread. From any thread."""
        self._queue.put(None)
        self._cancel_all()

    def _cancel_all(self) -> None:
        for future in list(self._jobs):
            future.cancel()


def _may_be_interrupted(job: Job) -> bool:
    """Whether a signal handler may raise on the calling thread, or an exception ends its call."""
    return threading.get_ident() in (job.epoch.taker, threading.main_thread().ident)
