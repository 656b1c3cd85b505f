"""Executors of functions and generator functions: daemon threads, and a user's own executor.

::

    any thread that brings a result             a thread
    ───────────────────────────────             ────────
    task ── a queue, oldest first ────────────▶ op(item)
    epoch.finished(task, result) ◀───────────── and, if there is one, the next task at once

Guarantees:
    * ``end`` does not wait for an op. A thread that is in an op ends when the op returns, and keeps
      neither the caller nor the interpreter alive.
    * An idle thread holds only the queue and its contexts, so it keeps no pipeline alive.
    * An unfinished generator is closed on one of the threads when the executor ends.
    * Contexts of stages are torn down on their thread when the thread ends.
    * At the interpreter's exit, threads are asked to pause. The exit waits for them at most
      ``EXIT_S`` seconds.
"""

import collections
import concurrent.futures
import itertools
import queue
import secrets
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

from shmloader.interruptions import is_interruption
from shmloader.pipeline.config import OpKind
from shmloader.pipeline.epoch import Task
from shmloader.pipeline.lifecycle import ThreadContexts
from shmloader.pipeline.stages import Job
from shmloader.pools.executor_kinds import ExecutorGoneError, open_executor
from shmloader.threads.background import BackgroundThread

#: How long the interpreter's exit waits for an executor's threads, in seconds.
EXIT_S = 0.3


def refuse_coroutine(result: object, name: str) -> None:
    """Check that the result of an op is not a coroutine.

    Args:
        result: What the op, or for a coroutine function its coroutine, has returned.
        name: The stage's name.

    Raises:
        TypeError: If the result is a coroutine.
    """
    if type(result) is types.CoroutineType:
        result.close()
        raise TypeError(
            f"the op of stage '{name}' returned a coroutine, which nothing would await: use an "
            "async def, and await there"
        )


def call_all(op: Callable[..., Any], item: Any, *context: Any) -> list[Any]:
    """Return all results of a generator function for an item, except None."""
    return [value for value in op(item, *context) if value is not None]


class _Thread(BackgroundThread):
    """A thread of a :class:`ThreadExecutor`."""

    parks_for_forks = False
    exit_s = EXIT_S

    def __init__(
        self,
        name: str,
        tasks: "queue.SimpleQueue[Task | Job | None]",
        prepare: Callable[[], None] | None,
    ) -> None:
        super().__init__(name)
        self._tasks = tasks
        self._prepare = prepare
        self._contexts = ThreadContexts()

    def work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        try:
            while self._serve_one():
                pass
        finally:
            self._contexts.close()

    def _serve_one(self) -> bool:
        """Run one task and those that follow from it. Returns False when the thread is to end."""
        try:
            task = self._tasks.get_nowait()
        except queue.Empty:
            with self.resting():
                task = self._tasks.get()
        if task is None:
            return False
        if isinstance(task, Job):
            task.results = None  # the last reference: this closes the generator
            return True
        while task is not None:
            self.pause()
            task = _run(task, self._contexts)
        return True


def _run(task: Task, contexts: ThreadContexts) -> Task | None:
    """Run a task of a function or a generator function. Returns the task that follows, if any."""
    job, stage, epoch = task.job, task.stage, task.epoch
    if epoch.is_over:
        return None
    context: tuple[object, ...] = ()
    if stage.lifecycle is not None:
        try:
            context = (contexts.context_of(stage.lifecycle),)
        except BaseException as error:  # noqa: BLE001 - raised to the consumer
            return epoch.failed_to_set_up(task, error)
    job.began_ns = time.monotonic_ns()
    try:
        if stage.kind is OpKind.GENERATOR:
            if context:
                # The generator may use its context only on this thread.
                return epoch.finished(task, *call_all(stage.op, job.item, *context))
            return _run_generator(task)
        result = stage.op(job.item, *context)
        refuse_coroutine(result, stage.name)
    except BaseException as error:  # noqa: BLE001 - raised to the consumer
        return epoch.failed(task, error)
    return epoch.finished(task) if result is None else epoch.finished(task, result)


def _run_generator(task: Task) -> Task | None:
    """Pass on a generator's results until the epoch has no space for more, or there are no more."""
    job, epoch, executor = task.job, task.epoch, task.stage.executor
    assert isinstance(executor, ThreadExecutor)
    if job.results is None:
        results = cast("Callable[[object], Iterator[object]]", task.stage.op)(job.item)
        job.results = iter(results)
        executor.begun.add(job)
    try:
        for result in cast("Iterator[object]", job.results):
            if not epoch.yielded(task, result):
                return None
            job.began_ns = time.monotonic_ns()
    except BaseException:
        executor.begun.discard(job)
        raise
    executor.begun.discard(job)
    job.results = None
    return epoch.finished(task)


class ThreadExecutor:
    """Daemon threads that take tasks off one queue.

    Attributes:
        begun: Jobs of generator functions that may have more results.

    Args:
        name: The threads' name; a number is appended.
        count: Number of threads.
        prepare: Called on each thread before its first task.
    """

    def __init__(self, name: str, count: int, prepare: Callable[[], None] | None = None) -> None:
        self.begun: set[Job] = set()
        self._tasks: queue.SimpleQueue[Task | Job | None] = queue.SimpleQueue()
        self._threads = [
            _Thread(f"{name}_{number}", self._tasks, prepare) for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads. The caller ends the executor if this raises."""
        for thread in self._threads:
            thread.start()

    def put(self, task: Task) -> None:
        """Have a task run by the next free thread."""
        self._tasks.put(task)

    def end(self) -> None:
        """Tell the threads to end after their present tasks. From any thread; does not wait."""
        begun, self.begun = list(self.begun), set()
        for job in begun:
            self._tasks.put(job)
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline: float) -> bool:
        """Wait for the threads after ``end``, so that an op that is about to return can finish.

        Args:
            deadline: End of the wait, on the clock of ``time.monotonic()``.

        Returns:
            Whether all threads have ended.
        """
        left = [thread for thread in self._threads if not thread.join(deadline - time.monotonic())]
        return not left


class FuturesExecutor:
    """Submits tasks to a ``concurrent.futures.Executor``, which the user shuts down.

    All results of a generator function for an item come together.

    An executor that breaks or cancels its tasks may call the callbacks of their futures while it
    holds the lock that ``submit`` takes. ``ThreadPoolExecutor`` does so when an ``initializer``
    raises, and from Python 3.12 on ``ProcessPoolExecutor`` when a process dies. Such callbacks
    continue on a new thread.

    Args:
        executor: The user's executor.
    """

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self._executor = open_executor(executor)
        # The consumer calls this now and then while it waits; None if there is nothing to check.
        self.check: Callable[[], None] | None = self._check if self._executor.check else None
        # Dask runs calls with equal names only once. Without a name, a call is named by its
        # arguments. So each call gets a name of its own.
        self._prefix = f"shmloader-{secrets.token_hex(8)}-"
        self._numbers = itertools.count()
        self._waiting: collections.deque[Task] = collections.deque()
        self._submitting = threading.Lock()
        # The thread that takes a task out of here handles its future's result.
        self._tasks: dict[concurrent.futures.Future[object], Task] = {}
        self._checking: threading.Thread | None = None

    def put(self, task: Task) -> None:
        """Submit a task. From any thread.

        Tasks are submitted one after the other. An executor may run a task inside ``submit``, and
        the task's result leads to the next ``put``: these calls must not pile up on the stack.
        """
        self._waiting.append(task)
        while self._waiting and self._submitting.acquire(blocking=False):
            try:
                while self._waiting:
                    self._submit(self._waiting.popleft())
            finally:
                self._submitting.release()

    def _submit(self, task: Task) -> None:
        stage, item = task.stage, task.job.item
        if task.epoch.is_over:
            return
        task.job.began_ns = time.monotonic_ns()
        try:
            name = f"{self._prefix}{next(self._numbers)}"
            call = (call_all, stage.op) if stage.kind is OpKind.GENERATOR else (stage.op,)
            future: concurrent.futures.Future[object] = self._executor.submit(name, *call, item)
        except BaseException as error:
            if task.epoch.is_taken_here and is_interruption(error):
                raise
            # The executor is shut down, or broken.
            self._continue_with(task.epoch.failed_for_good(task, error))
            return
        self._tasks[future] = task
        # concurrent.futures swallows what a callback raises, including what a signal handler raises
        # in it. So a callback that runs on this thread, inside `add_done_callback`, does nothing,
        # and this method checks the future itself.
        adding_on: int | None = threading.get_ident()

        def done(future: "concurrent.futures.Future[object]") -> None:
            if adding_on == threading.get_ident():
                return
            if _may_hold_locks(future):
                threading.Thread(
                    target=self._finish, args=(future,), name="shmloader_broken_executor",
                    daemon=True,
                ).start()  # fmt: skip
            else:
                self._finish(future)

        if not future.done():
            future.add_done_callback(done)
            adding_on = None
        if future.done():
            self._finish(future)

    def _check(self) -> None:
        """Fail the tasks of an executor that is gone and leaves them pending.

        The check calls the callbacks of their futures, so it runs on a thread of its own.
        """
        check, before = self._executor.check, self._checking
        if not self._tasks or check is None or (before is not None and before.is_alive()):
            return
        thread = threading.Thread(target=check, name="shmloader_executor_check", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if is_interruption(error):
                raise
            return  # the system can start no thread now
        self._checking = thread

    def _finish(self, future: "concurrent.futures.Future[object]") -> None:
        """Handle a future's result, unless another thread handles it. On any thread."""
        task = self._tasks.pop(future, None)
        if task is None:
            return
        epoch = task.epoch
        if future.cancelled():
            if not epoch.is_over:
                epoch.failed_for_good(task, RuntimeError("the item's future was cancelled"))
            return
        error = future.exception()
        if isinstance(error, ExecutorGoneError | concurrent.futures.BrokenExecutor):
            self._continue_with(epoch.failed_for_good(task, error))
            return
        if error is not None:
            self._continue_with(epoch.failed(task, error))
            return
        result: Any = future.result()
        try:
            refuse_coroutine(result, task.stage.name)
        except TypeError as refused:
            if is_interruption(refused):
                raise
            self._continue_with(epoch.failed(task, refused))
            return
        if task.stage.kind is OpKind.GENERATOR:  # a list, from call_all
            self._continue_with(epoch.finished(task, *result))
        else:
            self._continue_with(epoch.finished(task, *(() if result is None else (result,))))

    def _continue_with(self, task: Task | None) -> None:
        if task is not None:
            self.put(task)

    def end(self) -> None:
        """Cancel all tasks that have not begun. From any thread."""
        self._waiting.clear()
        for future in list(self._tasks):
            future.cancel()

    def join(self, deadline: float) -> None:
        """Do nothing: the user's threads or processes are not waited for."""


def _may_hold_locks(done: "concurrent.futures.Future[object]") -> bool:
    """Whether the executor may hold its own lock while it calls this future's callbacks."""
    return done.cancelled() or isinstance(done.exception(), concurrent.futures.BrokenExecutor)
