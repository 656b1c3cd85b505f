"""Workers that are threads of this process: for datasets that wait, or let go of the interpreter.

::

    engine's thread                                a worker thread
    ───────────────                                ───────────────
    ThreadTask ── the queue, oldest first ───────▶ samples = dataset[i] …, collate
    the answers ◀── and the wakeup is rung ───────── an answer: the batch, or what was raised

Nothing is copied, and nothing but the queue and the answers is shared. A task brings all that it
takes to make its batch, so a thread that waits holds neither the dataset nor a batch.

Guarantees:
    * Between two samples a thread looks at whether anybody still wants its batch, and leaves it if
      not. So ``close`` waits for one sample (or one ``__getitems__``, or one collate).
    * A thread that stays in the user's code for longer is left behind: it ends when it comes out,
      and what it has made is dropped. It keeps neither the caller nor the interpreter.
    * At the interpreter's exit all threads are asked to stand still for good, and waited for
      for a time (:mod:`shmloader.threads.fork_safety`).

These threads do not stand still while the process forks elsewhere. They run the user's code, where
nobody can stop them, and to wait for a slow sample would cost each start of a worker seconds; of
what is ours they hold nothing then that a child would use. So a lock of the user's code, or of a
library that it calls, may be held for ever in a child that is forked meanwhile, as with any other
thread of the user's.
"""

import collections
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
from shmloader.batch.iterable_state import IterableCheckpoint
from shmloader.batch.maker import BatchMaker
from shmloader.batch.remote_error import RemoteError
from shmloader.errors import ClosedLoaderError
from shmloader.insight.readings import Readings, Usage
from shmloader.insight.record import Counts
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import Answer, Failure
from shmloader.pools.status_page import AtWork, Phase, stalled_here, stalled_thread
from shmloader.pools.thread_task import ThreadConfig, ThreadTask, load
from shmloader.threads.background import BackgroundThread
from shmloader.threads.fork_safety import is_exiting, may_wait_here
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import Wakeup

# How long close() waits for the threads: they may be in a sample.
_JOIN_S = 5.0


class _Post:
    """What the threads and the engine's share.

    Attributes:
        tasks: Those to be taken; None for a thread that is to end.
        answers: What came of them, each with the number of the thread that had it.
        wakeup: Set for each answer.
        is_closed: Whether nothing is to be loaded any more.
    """

    def __init__(self) -> None:
        # Written in C: it may be put into by the garbage collector, whatever it interrupts.
        self.tasks: queue.SimpleQueue[ThreadTask | None] = queue.SimpleQueue()
        self.answers: collections.deque[tuple[ThreadTask, int, Answer]] = collections.deque()
        self.wakeup = Wakeup()
        self.is_closed = False


class _Worker(BackgroundThread):
    """One thread."""

    parks_for_forks = False

    def __init__(self, worker_id: int, post: _Post, init_fn: Callable[[int], Any] | None) -> None:
        super().__init__(f"shmloader_{worker_id}")
        self._worker_id = worker_id
        self._init_fn = init_fn
        self._where = f"in DataLoader worker thread {worker_id}"
        self._post = post
        self._concurrent_fetcher: ConcurrentFetcher | None = None
        # Where worker_init_fn failed: the answer to each task.
        self._init_answer: Failure | None = None
        # Read by others: what it is at, and since when.
        self._at_work: tuple[Phase, ThreadTask | None, float] = (
            Phase.STARTING, None, time.monotonic(),
        )  # fmt: skip
        self.has_begun = Wakeup()
        # What it has used.
        self._cpu_ns = 0
        self._stalled_ns: int | None = None

    def drop(self) -> None:
        """Have it leave the batch that it is loading, after the sample. From any thread."""
        task = self._at_work[1]
        if task is not None:
            task.is_dropped = True

    def wake(self) -> None:
        """At the interpreter's exit."""
        self.drop()

    def usage(self) -> Usage:
        """What it has used, until its last batch. From any thread."""
        number = self.system_id
        if number is not None:
            stalled_ns = stalled_thread(number)
            if stalled_ns is not None:
                self._stalled_ns = stalled_ns
        return Usage(None, self._cpu_ns, self._stalled_ns)

    def ask(self) -> AtWork:
        """What it is at, with its stack. From any thread."""
        phase, task, since = self._at_work
        seq, epoch = (0, 0) if task is None else (task.seq, task.epoch)
        frame = sys._current_frames().get(self._ident)
        return AtWork(phase, epoch, seq, time.monotonic() - since, _describe_stack(frame))

    # On the thread -----------------------------------------------------------------------

    def begin(self) -> None:
        """Have torch compute on this thread alone."""
        try:
            torch.multiprocessing._set_thread_name(threading.current_thread().name[:15])
            # As torch's workers do: there are several of us.
            torch.set_num_threads(1)
            torch.get_num_threads()  # at the first look, torch settles it for this thread
        finally:
            self.has_begun.set()

    def work(self) -> None:
        """Load what is put into the queue."""
        try:
            self._prepare()
            while self._serve_one():
                pass
        finally:
            self._stalled_ns = stalled_here()

    def depart(self) -> None:
        """End what loads samples for it."""
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
        except BaseException:  # noqa: BLE001 - handed on, with each task
            self._init_answer = Failure(RemoteError.caught(self._where))

    def _serve_one(self) -> bool:
        """Take a task and answer it; whether there may be a further one."""
        self._note(Phase.IDLE)
        task = self._take()
        if task is None:
            return False
        self._note(Phase.LOADING, task)
        self.pause()
        # After it was noted: whoever closes drops what is noted.
        config, task.config = task.config, None
        if config is not None and not self._post.is_closed and not task.is_dropped:
            if self._concurrent_fetcher is None:
                self._concurrent_fetcher = config.fetch.make_concurrent_fetcher()
            answer = self._init_answer or load(task, config, self._where, self._concurrent_fetcher)
            self._cpu_ns = time.thread_time_ns()
            if answer is not None:
                self._post.answers.append((task, self._worker_id, answer))
                self._post.wakeup.set()
        return True

    def _take(self) -> ThreadTask | None:
        try:
            return self._post.tasks.get_nowait()
        except queue.Empty:
            with self.resting():
                return self._post.tasks.get()


class ThreadPool:
    """A fixed number of threads that load; see :class:`~shmloader.pools.Pool`.

    Args:
        worker_count: How many.
        init_fn: Called in each with its number, before its first batch.
        config: How batches are made. Somebody else owns it: a stage's thread holds the pool, and
            must not hold what may hold the iterator.
    """

    has_queue = True
    is_inline = False

    def __init__(
        self,
        worker_count: int,
        init_fn: Callable[[int], Any] | None,
        config: "weakref.ref[ThreadConfig]",
    ) -> None:
        """Start the threads.

        Raises:
            RuntimeError: If no further thread can be started.
        """
        self._config = config
        self._pid = os.getpid()
        self._post = _Post()
        # Those that were sent and have not been told of.
        self._tasks: dict[int, ThreadTask] = {}
        self.is_waiting = False
        self.counts = Counts()
        #: What the threads use.
        self.readings = Readings()
        self._join_s = _JOIN_S
        self._workers = [
            _Worker(worker_id, self._post, init_fn) for worker_id in range(worker_count)
        ]
        thread_count = torch.get_num_threads()
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.has_begun.wait()
            # Each has told torch to compute on one thread, which takes it for the wish of all
            # threads that begin later, the user's as well.
            torch.set_num_threads(thread_count)
            self.readings.open(functools.partial(_read_usage, self._workers))
        except BaseException:
            self.close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, where no thread runs."""
        return os.getpid() != self._pid

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> None:
        """Have a task done, after those before it."""
        task = ThreadTask(ticket.seq, epoch, ticket.indices, self._config())
        self._tasks[ticket.seq] = task
        self._post.tasks.put(task)

    def start_epoch(self, worker_id: int, epoch: int) -> None:  # noqa: ARG002 - for all at once
        """Drop what is in flight, and do not wait for it.

        A thread that is in a sample of the epoch before comes when it is done with that.
        """
        self._drop_all()

    def _drop_all(self) -> None:
        for task in self._tasks.copy().values():
            task.is_dropped = True
        self._tasks.clear()
        self._post.answers.clear()

    def resume(self, worker_id: int, checkpoint: IterableCheckpoint) -> None:
        """Nothing to do: an iterable dataset has no threads."""

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int | None, events: Events) -> bool:  # noqa: ARG002 - of all threads
        """Tell the answers that are here."""
        answers, has_told = self._post.answers, False
        while answers:
            task, taker, answer = answers.popleft()
            if not task.is_dropped:
                has_told = True
                self._tasks.pop(task.seq, None)  # unless another thread closes us
                events.answered(task.seq, task.epoch, taker, answer)
        return has_told

    def wait(self, timeout_s: float | None, events: Events) -> bool:
        """Wait until a task has been answered since the last time, or for a time.

        Raises:
            ClosedLoaderError: If the interpreter ends. A daemon thread waits for ever then.
        """
        if is_exiting():
            if threading.current_thread().daemon:
                threading.Event().wait()
            raise ClosedLoaderError(
                "the interpreter is exiting, and the worker threads have stopped"
            )
        self.is_waiting = True
        self._post.wakeup.wait(None if timeout_s is None else max(0.0, timeout_s))
        self.is_waiting = False
        return self.poll(None, events)

    def enable_wake(self) -> None:
        """Nothing to do: ``wake`` works."""

    def wake(self) -> None:
        """Let ``wait`` return, now or the next time; from any thread."""
        self._post.wakeup.set()

    def wake_soon(self) -> None:
        """At once: a lock is all that is let go of."""
        self._post.wakeup.set()

    def hurry(self) -> None:
        """Nothing to do."""

    # Workers -----------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """None."""
        return []

    def pid(self, worker_id: int) -> None:
        """No process number."""

    def was_at(self, worker_id: int) -> AtWork:
        """What a thread is at."""
        return self._workers[worker_id].ask()

    def ask(self, worker_id: int) -> AtWork:
        """What a thread is at, with its Python stack."""
        return self._workers[worker_id].ask()

    def end_workers(self) -> None:
        """End the threads. May be called again, and from any thread."""
        if not self.is_inherited:
            uninterruptible(self._end)

    def close(self) -> None:
        """End the threads, and let go of all batches. May be called again, and from any thread."""
        try:
            self.end_workers()
        finally:
            self._drop_all()

    def _end(self) -> None:
        self._post.is_closed = True
        for worker in self._workers:
            worker.drop()
            self._post.tasks.put(None)  # superfluous ones, of a second call, stay there
        self.wake()
        if not may_wait_here():
            return
        # Who presses Ctrl-C meanwhile does not want to wait for threads that are busy.
        join_s, self._join_s = self._join_s, 0.0
        deadline = time.monotonic() + join_s
        for worker in self._workers:
            worker.join(deadline - time.monotonic())
        self.readings.close()


def _read_usage(workers: list[_Worker], _: bool) -> list[Usage]:
    return [worker.usage() for worker in workers]


# What calls the user's code.
_CALLERS = (BatchMaker.make.__code__, load.__code__, _Worker._prepare.__code__)


def _describe_stack(frame: FrameType | None) -> str:
    """A thread's calls inside the user's code, as faulthandler writes them: the innermost first."""
    lines = []
    while frame is not None and frame.f_code not in _CALLERS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
