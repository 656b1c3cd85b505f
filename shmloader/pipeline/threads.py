"""An executor of daemon threads.

::

    whoever brings a result                     a thread
    ───────────────────────                     ────────
    task ── the queue, oldest first ──────────▶ op(item)
    epoch.finished(task, result) ◀───────────── and, if there is one, straight on with the next task

Guarantees:
    * A thread that waits holds nothing but the queue, so it keeps no pipeline alive.
    * What a generator function has begun is closed on one of the threads, when it has ended or the
      executor does.
    * ``end`` does not wait for an op. A thread that is in one ends when it comes out; it keeps
      neither the caller nor the interpreter.
    * At the interpreter's exit the threads are asked to stand still, and waited for at most
      ``EXIT_S``: one that is in an op is left there.
"""

import queue
import time
from collections.abc import Callable, Iterator
from typing import cast

from shmloader.pipeline.epoch import Task
from shmloader.pipeline.flow import Job
from shmloader.pipeline.ops import OpKind, refuse_coroutine
from shmloader.threads.background import BackgroundThread

#: How long the interpreter's exit waits for an executor's threads, which may be in an op.
EXIT_S = 0.3


class _Thread(BackgroundThread):
    """One of an executor's."""

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

    def work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Take a task, and go on as long as there is a next; whether there may be a further one."""
        try:
            task = self._tasks.get_nowait()
        except queue.Empty:
            with self.resting():
                task = self._tasks.get()
        if task is None:
            return False
        if isinstance(task, Job):
            task.stream = None  # nobody else holds it: a generator is closed here
            return True
        while task is not None:
            self.pause()
            task = run(task)
        return True


def run(task: Task) -> Task | None:
    """Run a task of a function or a generator function here; returns the next one, if any."""
    job, call = task.job, task.call
    if task.epoch.is_over:
        return None
    try:
        if call.kind is OpKind.GENERATOR:
            return _run_stream(task)
        result = call.op(job.item)
        refuse_coroutine(result, call.name)
    except BaseException as error:  # noqa: BLE001 - the consumer is told
        return task.epoch.failed(task, error)
    return task.epoch.finished(task) if result is None else task.epoch.finished(task, result)


def _run_stream(task: Task) -> Task | None:
    """Take results until there is no room for a further one, or none comes."""
    job, epoch, executor = task.job, task.epoch, task.call.executor
    assert isinstance(executor, ThreadExecutor)
    if job.stream is None:
        results = cast("Callable[[object], Iterator[object]]", task.call.op)(job.item)
        job.stream = iter(results)
        executor.begun.add(job)
    try:
        for result in cast("Iterator[object]", job.stream):
            if not epoch.gave(task, result):
                return None
    except BaseException:
        executor.begun.discard(job)
        raise
    executor.begun.discard(job)
    job.stream = None
    return epoch.finished(task)


class ThreadExecutor:
    """Daemon threads that take tasks off one queue.

    Attributes:
        begun: Jobs of generator functions that may have more results.

    Args:
        name: Of the threads.
        count: How many there are.
        prepare: Called in each before its first task.
    """

    def __init__(self, name: str, count: int, prepare: Callable[[], None] | None = None) -> None:
        self.begun: set[Job] = set()
        self._tasks: queue.SimpleQueue[Task | Job | None] = queue.SimpleQueue()
        self._threads = [
            _Thread(f"{name}_{number}", self._tasks, prepare) for number in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.end()  # no further thread can be started
            raise

    def put(self, task: Task) -> None:
        """Have a task run by the next thread that is free."""
        self._tasks.put(task)

    def end(self) -> None:
        """Tell the threads to end when they have nothing to do. From anywhere; does not wait."""
        begun, self.begun = list(self.begun), set()
        for job in begun:
            self._tasks.put(job)
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline: float) -> bool:
        """After ``end``: wait for the threads; whether all have ended.

        So an op that was about to return does, and its thread is gone.

        Args:
            deadline: Until when, as ``time.monotonic()`` has it.
        """
        left = [thread for thread in self._threads if not thread.join(deadline - time.monotonic())]
        return not left
