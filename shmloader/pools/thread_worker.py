"""One worker thread, and the queue and the answers that it shares with the others."""

import collections
import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.maker import BatchMaker
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.insight.core_time import core_time_here, core_time_of
from shmloader.insight.measurements import Usage
from shmloader.pools.answers import Answer, Failure
from shmloader.pools.status_page import AtWork, Phase
from shmloader.pools.thread_task import ThreadTask, load
from shmloader.threads.background import BackgroundThread
from shmloader.threads.wakeup import Wakeup


class Post:
    """The queues between the worker threads and the engine's thread.

    Attributes:
        tasks: Tasks that no thread has taken yet. A thread that takes None ends.
        answers: Answers to tasks, each with its task and the number of its thread.
        wakeup: Set after each answer.
        is_closed: Whether the threads must not begin any more tasks.
    """

    def __init__(self) -> None:
        # SimpleQueue is reentrant: a finalizer may call put() while this thread is inside put() or
        # get().
        self.tasks: queue.SimpleQueue[ThreadTask | None] = queue.SimpleQueue()
        self.answers: collections.deque[tuple[ThreadTask, int, Answer]] = collections.deque()
        self.wakeup = Wakeup()
        self.is_closed = False


class ThreadWorker(BackgroundThread):
    """One worker thread.

    Args:
        worker_id: Number of the worker, from 0.
        post: The queues of the pool.
        init_fn: Called on the thread with the number, before the first task; None for no call.
    """

    parks_for_forks = False

    def __init__(self, worker_id: int, post: Post, init_fn: Callable[[int], Any] | None) -> None:
        super().__init__(f"shmloader_{worker_id}")
        self._worker_id = worker_id
        self._init_fn = init_fn
        self._where = f"in DataLoader worker thread {worker_id}"
        self._post = post
        self._concurrent_fetcher: ConcurrentFetcher | None = None
        # The answer to every task if worker_init_fn failed.
        self._init_answer: Failure | None = None
        # What the thread is doing, with which task, and since when. Other threads read it.
        self._at_work: tuple[Phase, ThreadTask | None, float] = (
            Phase.STARTING, None, time.monotonic(),
        )  # fmt: skip
        self.has_begun = Wakeup()
        self._is_left = False
        # CPU time, and time stalled, that the thread has used.
        self._cpu_ns = 0
        self._stalled_ns: int | None = None

    def drop(self) -> None:
        """Make the thread drop its batch after the present sample. Called from any thread."""
        task = self._at_work[1]
        if task is not None:
            task.is_dropped = True

    def leave_behind(self, seq: int) -> bool:
        """Leave the thread behind while it loads a ticket. Called from the engine's thread.

        Returns:
            Whether it was left behind. False if it has finished that ticket.
        """
        task = self._at_work[1]
        if task is None or task.seq != seq:
            return False
        self._is_left = True
        task.is_dropped = True
        return True

    def wake(self) -> None:
        """Make the thread stop loading, at the interpreter's exit."""
        self.drop()

    def usage(self) -> Usage:
        """Return the CPU time up to the last batch, and time stalled. Called from any thread."""
        number = self.system_id
        if number is not None:
            spent = core_time_of(number)
            if spent is not None:
                self._stalled_ns = spent.stalled_ns
        return Usage(None, self._cpu_ns, self._stalled_ns)

    def ask(self) -> AtWork:
        """Return what the thread is doing, with its stack. Called from any thread."""
        frame = sys._current_frames().get(self._ident)
        return dataclasses.replace(self.was_at(), stack=_describe_stack(frame))

    def was_at(self) -> AtWork:
        """Return what the thread is doing, without its stack. Called from any thread."""
        phase, task, since = self._at_work
        seq, epoch = (0, 0) if task is None else (task.seq, task.epoch)
        sample, deadline_ns = (NO_SAMPLE, 0) if task is None else task.sample
        return AtWork(
            phase,
            epoch,
            seq,
            time.monotonic() - since,
            sample=sample,
            sample_left_s=(deadline_ns - time.monotonic_ns()) / 1e9,
        )

    # On the thread -----------------------------------------------------------------------

    def begin(self) -> None:
        """Make torch use one thread for computations that this thread starts."""
        try:
            torch.multiprocessing._set_thread_name(threading.current_thread().name[:15])
            # As in torch's workers, since several threads load.
            torch.set_num_threads(1)
            torch.get_num_threads()  # torch applies the number at the first call
        finally:
            self.has_begun.set()

    def work(self) -> None:
        """Serve tasks from the queue until None comes, or the thread is left behind."""
        try:
            self._prepare()
            while self._serve_one():
                pass
        finally:
            spent = core_time_here()
            self._stalled_ns = None if spent is None else spent.stalled_ns

    def depart(self) -> None:
        """End the threads that load samples for this one."""
        if self._concurrent_fetcher is not None:
            self._concurrent_fetcher.close()

    def _note(self, phase: Phase, task: ThreadTask | None = None) -> None:
        self._at_work = (phase, task, time.monotonic())

    def _prepare(self) -> None:
        init_fn, self._init_fn = self._init_fn, None
        if init_fn is None:
            return
        self._note(Phase.GETTING_READY)
        try:
            init_fn(self._worker_id)
        except BaseException:  # noqa: BLE001 - the answer to each task
            self._init_answer = Failure(RemoteError.caught(self._where))

    def _serve_one(self) -> bool:
        """Take a task and answer it. Returns False if the thread is to end."""
        self._note(Phase.IDLE)
        task = self._take()
        if self._is_left:
            self._post.tasks.put(task)  # for the other threads
            return False
        if task is None:
            return False
        self._note(Phase.LOADING, task)
        self.pause()
        # Read after _note: close() sets is_closed, and then drops the task that is noted.
        config, task.config = task.config, None
        if config is not None and not self._post.is_closed and not task.is_dropped:
            if self._concurrent_fetcher is None:
                self._concurrent_fetcher = config.fetch.make_concurrent_fetcher()
            answer = self._init_answer or load(task, config, self._where, self._concurrent_fetcher)
            self._cpu_ns = time.thread_time_ns()
            if answer is not None:
                self._post.answers.append((task, self._worker_id, answer))
                self._post.wakeup.set()
        return not self._is_left

    def _take(self) -> ThreadTask | None:
        try:
            return self._post.tasks.get_nowait()
        except queue.Empty:
            with self.resting():
                return self._post.tasks.get()


def start_workers(workers: list[ThreadWorker]) -> None:
    """Start threads, and wait until they have begun."""
    thread_count = torch.get_num_threads()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.has_begun.wait()
    # Each thread has called set_num_threads(1), which torch applies to all threads that start
    # later, including the user's. This call undoes that.
    torch.set_num_threads(thread_count)


def _describe_stack(frame: FrameType | None) -> str:
    """Return a thread's calls inside the user's code, innermost first, in faulthandler's form."""
    lines = []
    while frame is not None and frame.f_code not in _CALLERS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


# The functions that call the user's code.
_CALLERS = (BatchMaker.make.__code__, load.__code__, ThreadWorker._prepare.__code__)
