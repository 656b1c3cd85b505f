"""Workers that are threads, for datasets that wait or release the interpreter lock.

::

    engine's thread                                a worker thread
    ───────────────                                ───────────────
    ThreadTask ── the queue, oldest first ───────▶ samples = dataset[i] …, collate
    the answers ◀── and the wakeup is set ────────── an answer: the batch, or a failure

Nothing is copied, and the threads share only the queue and the answers. A task carries everything
that is needed to make its batch, so a waiting thread holds neither the dataset nor a batch.

Guarantees:
    * Between two samples a thread checks whether its batch was dropped, and stops if so. So
      ``close`` waits for one sample (or one ``__getitems__``, or one collate).
    * A thread that stays in the user's code for longer is left behind, as is one that takes longer
      than ``sample_timeout`` for a sample: it ends when that code returns, and its batch is
      dropped. It blocks neither the caller nor the interpreter's exit.
    * At the interpreter's exit all threads are asked to pause for good, and awaited for a limited
      time (:mod:`shmloader.threads.fork_safety`).

These threads do not pause while the process forks elsewhere. They run the user's code, which cannot
be interrupted, and waiting for a slow sample would delay each start of a worker by seconds. They
hold no lock of ours that a child would use. But a lock of the user's code, or of a library that it
calls, may stay locked for ever in a child that is forked meanwhile, as with any thread.
"""

import collections
import dataclasses
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import RemoteError
from shmloader.batch.iterable_state import IterableCheckpoint
from shmloader.batch.maker import BatchMaker
from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.errors import ClosedLoaderError
from shmloader.insight.core_time import core_time_here, core_time_of
from shmloader.insight.measurements import Counts, Readings, Usage
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import Answer, Failure
from shmloader.pools.status_page import AtWork, Phase
from shmloader.pools.thread_task import ThreadConfig, ThreadTask, load
from shmloader.threads.background import BackgroundThread
from shmloader.threads.fork_safety import is_exiting, may_wait_here
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import Wakeup

# How long close() waits for threads that may be loading a sample.
_JOIN_S = 5.0


class _Post:
    """The queues between the worker threads and the engine's thread.

    Attributes:
        tasks: Tasks that no thread has taken; None ends the thread that takes it.
        answers: Answers to tasks, each with its task and the number of its thread.
        wakeup: Set after each answer.
        is_closed: Whether threads are to load nothing more.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer may call put() while this thread is inside put() or get().
        self.tasks: queue.SimpleQueue[ThreadTask | None] = queue.SimpleQueue()
        self.answers: collections.deque[tuple[ThreadTask, int, Answer]] = collections.deque()
        self.wakeup = Wakeup()
        self.is_closed = False


class _Worker(BackgroundThread):
    """One worker thread."""

    parks_for_forks = False

    def __init__(self, worker_id: int, post: _Post, init_fn: Callable[[int], Any] | None) -> None:
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
        """Make it stop loading its batch after the present sample. Called from any thread."""
        task = self._at_work[1]
        if task is not None:
            task.is_dropped = True

    def leave_behind(self, seq: int) -> bool:
        """Leave the thread behind while it loads a ticket. Called from the engine's thread.

        Returns:
            False, if it has done with that ticket.
        """
        task = self._at_work[1]
        if task is None or task.seq != seq:
            return False
        self._is_left = True
        task.is_dropped = True
        return True

    def wake(self) -> None:
        """Make it stop loading, at the interpreter's exit."""
        self.drop()

    def usage(self) -> Usage:
        """Return the time used up to its last batch. Called from any thread."""
        number = self.system_id
        if number is not None:
            spent = core_time_of(number)
            if spent is not None:
                self._stalled_ns = spent.stalled_ns
        return Usage(None, self._cpu_ns, self._stalled_ns)

    def ask(self) -> AtWork:
        """Return what it is doing, with its stack. Called from any thread."""
        frame = sys._current_frames().get(self._ident)
        return dataclasses.replace(self.was_at(), stack=_describe_stack(frame))

    def was_at(self) -> AtWork:
        """Return what it is doing, without its stack. Called from any thread."""
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
        """Serve tasks from the queue until None comes."""
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
        """Take a task and answer it; return False when the thread is to end."""
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


class ThreadPool:
    """A fixed number of threads that load; see :class:`~shmloader.pools.Pool`.

    Args:
        worker_count: The number of threads.
        config: How batches are made. The iterator owns it: a stage's thread holds the pool, and
            must not keep objects alive that may hold the iterator.
    """

    has_queue = True
    is_inline = False

    def __init__(
        self,
        worker_count: int,
        config: "weakref.ref[ThreadConfig]",
    ) -> None:
        """Start the threads.

        Raises:
            RuntimeError: If no further thread can be started.
        """
        self._config = config
        self._pid = os.getpid()
        self._post = _Post()
        # Tasks that were sent and whose answers were not reported, by seq.
        self._tasks: dict[int, ThreadTask] = {}
        self.is_waiting = False
        self.counts = Counts()
        #: CPU time of the threads.
        self.readings = Readings()
        self._join_s = _JOIN_S
        self._workers = [self._make_worker(worker_id) for worker_id in range(worker_count)]
        try:
            _start(self._workers)
            self.readings.open(functools.partial(_read_usage, self._workers))
        except BaseException:
            self.close()
            raise

    def _make_worker(self, worker_id: int) -> _Worker:
        config = self._config()
        return _Worker(worker_id, self._post, None if config is None else config.init_fn)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, where no thread runs."""
        return os.getpid() != self._pid

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> None:
        """Add a ticket's task to the queue."""
        task = ThreadTask(ticket.seq, epoch, ticket.indices, self._config(), ticket.hung)
        self._tasks[ticket.seq] = task
        self._post.tasks.put(task)

    def start_epoch(self, worker_id: int, epoch: int) -> None:  # noqa: ARG002 - for all at once
        """Drop all tasks in flight without waiting for them.

        A thread that is loading a sample of the previous epoch finishes that sample first.
        """
        self._drop_all()

    def _drop_all(self) -> None:
        for task in self._tasks.copy().values():
            task.is_dropped = True
        self._tasks.clear()
        self._post.answers.clear()

    def resume(self, worker_id: int, checkpoint: IterableCheckpoint) -> None:
        """Do nothing: iterable datasets are not loaded by threads."""

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int | None, events: Events) -> bool:  # noqa: ARG002 - of all threads
        """Report the answers that have come."""
        answers, has_any = self._post.answers, False
        while answers:
            task, taker, answer = answers.popleft()
            if not task.is_dropped:
                has_any = True
                self._tasks.pop(task.seq, None)  # unless another thread closes the pool
                events.answered(task.seq, task.epoch, taker, answer)
        return has_any

    def wait(self, timeout_s: float | None, events: Events) -> bool:
        """Wait until a task is answered or the time is up, and report the answers.

        Raises:
            ClosedLoaderError: If the interpreter is exiting. A daemon thread blocks for ever then.
        """
        if is_exiting():
            if threading.current_thread().daemon:
                threading.Event().wait()
            raise ClosedLoaderError(
                "the interpreter is exiting, and the worker threads have stopped"
            )
        self.is_waiting = True
        # A wait that a signal handler has ended may have cleared the event.
        if not self._post.answers:
            self._post.wakeup.wait(None if timeout_s is None else max(0.0, timeout_s))
        self.is_waiting = False
        return self.poll(None, events)

    def enable_wake(self) -> None:
        """Do nothing: ``wake`` works from the beginning."""

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        self._post.wakeup.set()

    def wake_soon(self) -> None:
        """Do as :meth:`wake`, at once, since that only releases a lock."""
        self._post.wakeup.set()

    def hurry(self) -> None:
        """Do nothing: no wake-up is delayed."""

    # Workers -----------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """An empty list: the workers are threads."""
        return []

    def pid(self, worker_id: int) -> None:
        """Return None: the workers are threads."""

    def was_at(self, worker_id: int) -> AtWork:
        """Return what a thread is doing, without its stack."""
        return self._workers[worker_id].was_at()

    def ask(self, worker_id: int) -> AtWork:
        """Return what a thread is doing, with its Python stack."""
        return self._workers[worker_id].ask()

    def kill(self, worker_id: int, seq: int) -> bool:
        """Leave a thread behind that takes too long for a sample."""
        return self._workers[worker_id].leave_behind(seq)

    def replace(self, worker_id: int) -> None:
        """Start a thread in place of one that was left behind."""
        worker = self._workers[worker_id] = self._make_worker(worker_id)
        _start([worker])
        if self._post.is_closed:  # by another thread, meanwhile
            self._post.tasks.put(None)
            raise ClosedLoaderError("the workers have been ended")

    def end_workers(self) -> None:
        """End the threads. May be called again, and from any thread."""
        if not self.is_inherited:
            uninterruptible(self._end)

    def close(self) -> None:
        """End the threads and drop all batches. May be called again, and from any thread."""
        try:
            self.end_workers()
        finally:
            self._drop_all()

    def _end(self) -> None:
        self._post.is_closed = True
        for worker in self._workers:
            worker.drop()
            self._post.tasks.put(None)  # those of a second call stay in the queue
        self.wake()
        if not may_wait_here():
            return
        # If Ctrl-C interrupts the wait, a second call does not wait for busy threads.
        join_s, self._join_s = self._join_s, 0.0
        deadline = time.monotonic() + join_s
        for worker in self._workers:
            worker.join(deadline - time.monotonic())
        self.readings.close()


def _start(workers: list[_Worker]) -> None:
    """Start threads, and wait until they have begun."""
    thread_count = torch.get_num_threads()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.has_begun.wait()
    # Each thread called set_num_threads(1), which torch applies to all threads that start later,
    # including the user's.
    torch.set_num_threads(thread_count)


def _read_usage(workers: list[_Worker], _: bool) -> list[Usage]:
    return [worker.usage() for worker in workers]


# The functions that call the user's code.
_CALLERS = (BatchMaker.make.__code__, load.__code__, _Worker._prepare.__code__)


def _describe_stack(frame: FrameType | None) -> str:
    """Return a thread's calls inside the user's code, innermost first, in faulthandler's form."""
    lines = []
    while frame is not None and frame.f_code not in _CALLERS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
