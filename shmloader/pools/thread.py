"""The pool whose workers are threads, for datasets that wait or release the interpreter lock.

::

    engine's thread                                a worker thread
    ───────────────                                ───────────────
    task ── the queue, oldest first ─────────────▶ samples = dataset[i] …, collate
    the answers ◀── and the wakeup is set ────────── an answer: the batch, or a failure

Nothing is copied, and the threads share only the queue and the answers. A task carries everything
that is needed to make its batch, so a waiting thread holds neither the dataset nor a batch.

Guarantees:
    * A thread whose batch was dropped finishes it, and begins no other. So ``close`` waits for one
      batch.
    * A thread that is still in the user's code five seconds after ``close`` is left behind. It ends
      when that code returns, and its batch is dropped. It blocks neither the caller nor the
      interpreter's exit.

These threads do not pause while the process forks elsewhere: waiting for a slow sample would delay
each start of a worker by seconds. They hold no lock of ours that a child would use.
"""

import collections
import functools
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shmloader.batch.arrays import Arrays
from shmloader.batch.collator import Timer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import OnError, RemoteError
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.maker import BatchMaker
from shmloader.errors import ClosedLoaderError
from shmloader.insight.measurements import Usage, usage_of
from shmloader.interruptions import Wakeup
from shmloader.pools.answers import Answer, ObjectPool, make_answer
from shmloader.pools.status_page import AtWork, Phase
from shmloader.process_state import PROCESS
from shmloader.threads import BackgroundThread, may_wait

# How long close() waits for threads that may be loading a sample.
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ThreadConfig:
    """How batches are made. A task refers to it until a thread takes the task.

    Attributes:
        fetch: How a batch is fetched and collated.
        dataset: The dataset.
        collate_fn: Makes a batch of samples.
        on_error: How bad samples are handled.
        init_fn: Called in each thread with its number, before its first batch; None for no call.
        arrays: Gathers batches of the dataset while it consists of arrays; None if it does not.
        opened: The readers of a stream of shards that were begun and that no thread uses now.
    """

    fetch: FetchConfig
    dataset: Any
    collate_fn: Callable[[Any], Any]
    on_error: OnError
    init_fn: Callable[[int], Any] | None = None
    arrays: Arrays | None = None
    opened: dict[int, Any] | None = None


@dataclass(eq=False, slots=True)
class _Task:
    """A ticket as it is sent to the threads.

    Attributes:
        config: How the batch is made; None once a thread has taken the task.
        is_dropped: Whether the batch is no longer needed.
    """

    seq: int
    epoch: int
    indices: object
    config: ThreadConfig | None
    is_dropped: bool = False


class _Worker(BackgroundThread):
    """One worker thread. It shares the pool's ``queue``, ``answers`` and ``is_closed``."""

    parks_for_forks = False
    _concurrent_fetcher: ConcurrentFetcher | None = None

    def __init__(
        self, worker_id: int, pool: "ThreadPool", init_fn: Callable[[int], Any] | None
    ) -> None:
        super().__init__(f"shmloader_{worker_id}")
        self._worker_id, self._pool, self._init_fn = worker_id, pool, init_fn
        self._where = f"in DataLoader worker thread {worker_id}"
        self._no_task, self.started = _Task(-1, 0, None, None), Wakeup()
        self._set(Phase.STARTING)

    def usage(self) -> Usage:
        """Return what the thread has used. Called from any thread."""
        task = self.system_id
        return Usage() if task is None else usage_of(task, is_thread=True)

    def was_at(self, *, with_stack: bool) -> AtWork:
        """Return what the thread is doing. Called from any thread."""
        phase, task, since = self._at_work
        frame = sys._current_frames().get(self._thread.ident or 0) if with_stack else None
        stack = "\n".join(  # as faulthandler writes it
            f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}'
            for one, line in (traceback.walk_stack(frame) if frame is not None else ())
        )
        return AtWork(phase, task.epoch, task.seq, time.monotonic() - since, stack)

    # On the thread -----------------------------------------------------------------------

    def begin(self) -> None:
        """Make torch use one thread for computations that this thread starts."""
        try:
            torch.multiprocessing._set_thread_name(threading.current_thread().name[:15])
            # As in torch's workers, since several threads load.
            torch.set_num_threads(1)
            torch.get_num_threads()  # torch applies the number at the first call
        finally:
            self.started.set()

    def work(self) -> None:
        """Serve tasks from the queue until None comes."""
        # What every task is answered if worker_init_fn fails.
        failure, (init_fn, self._init_fn) = None, (self._init_fn, None)
        if init_fn is not None:
            self._set(Phase.GETTING_READY)
            try:
                init_fn(self._worker_id)
            except BaseException:  # noqa: BLE001 - the answer to each task
                failure = Answer(error=RemoteError.caught(self._where))
        del init_fn
        while self._serve_one(failure):
            pass

    def depart(self) -> None:
        """End the threads that load samples for this one."""
        if self._concurrent_fetcher is not None:
            self._concurrent_fetcher.close()

    def _set(self, phase: Phase, task: _Task | None = None) -> None:
        # What the thread is doing, with which task, and since when. Other threads read it.
        self._at_work = phase, task or self._no_task, time.monotonic()

    def _serve_one(self, failure: Answer | None) -> bool:
        """Take a task and answer it. Returns False if the thread is to end."""
        self._set(Phase.IDLE)
        pool = self._pool
        try:
            task = pool.queue.get_nowait()
        except queue.Empty:
            with self.resting():
                task = pool.queue.get()
        if task is None:
            return False
        self._set(Phase.LOADING, task)
        self.pause()
        config, task.config = task.config, None
        if config is not None and not pool.is_closed and not task.is_dropped:
            answer = failure or self._load(task, config)
            if not task.is_dropped:
                pool.answers.append((task, self._worker_id, answer))
                pool.wakeup.set()
        return True

    def _load(self, task: _Task, config: ThreadConfig) -> Answer:
        """Make a task's batch, and return the answer."""
        fetch, timer = config.fetch, Timer()
        timer.begin()
        if self._concurrent_fetcher is None:
            self._concurrent_fetcher = fetch.make_concurrent_fetcher()
        maker = BatchMaker(
            fetch,
            config.dataset,
            config.collate_fn,
            config.on_error,
            where=self._where,
            timer=timer,
            arrays=config.arrays,
            opened=config.opened,
            concurrent_fetcher=self._concurrent_fetcher,
        )
        return make_answer(maker, functools.partial(maker.make, task.indices), self._where)


class ThreadPool(ObjectPool):
    """A fixed number of threads that load; see :class:`~shmloader.pools.Pool`.

    ``config`` is a weak reference. The iterator owns the object: threads refer to the pool, and
    must not keep objects alive that may refer to the iterator.

    Attributes:
        queue: Tasks that no thread has taken yet. A thread that takes None ends.
        answers: Answers to tasks, each with its task and the number of its thread.
        is_closed: Whether the threads must not begin any more tasks.
    """

    has_queue = True
    is_closed = False

    def __init__(self, worker_count: int, config: "weakref.ref[ThreadConfig]") -> None:
        """Start the threads."""
        super().__init__()
        self._config, self._join_s = config, _JOIN_S
        # SimpleQueue is reentrant: a finalizer may call put() while this thread is inside put() or
        # get().
        self.queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.answers: collections.deque[tuple[_Task, int, Answer]] = collections.deque()
        fixed = config()
        init_fn = None if fixed is None else fixed.init_fn
        self._workers = workers = [_Worker(n, self, init_fn) for n in range(worker_count)]
        thread_count = torch.get_num_threads()
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.started.wait()
            # Each thread has called set_num_threads(1), which torch applies to all threads that
            # start later, including the user's. This call undoes that.
            torch.set_num_threads(thread_count)
            self.readings.open(lambda _: [worker.usage() for worker in workers])
        except BaseException:
            self.close()
            raise

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: Any, epoch: int) -> None:
        """Add a ticket's task to the queue."""
        task = _Task(ticket.seq, epoch, ticket.indices, self._config())
        self._tasks[ticket.seq] = task
        self.queue.put(task)

    def recall(self) -> list[int]:
        """Drop all tasks in flight without waiting for them, and return their tickets' numbers."""
        dropped = self._tasks.copy()
        for task in dropped.values():
            task.is_dropped = True
        self._tasks.clear()
        self.answers.clear()
        return [*dropped]

    # Events ------------------------------------------------------------------------------

    def poll(self, events: Any, worker_id: int = -1) -> bool:  # noqa: ARG002
        """Report the answers that have come."""
        answers, has_any = self.answers, False
        while answers:
            task, taker, answer = answers.popleft()
            if not task.is_dropped:
                has_any = True
                self._tasks.pop(task.seq, None)  # unless another thread closes the pool
                events.answered(task.seq, task.epoch, taker, answer)
        return has_any

    def wait(self, timeout_s: float | None, events: Any) -> bool:
        """Wait until a task is answered or the time is up, and report the answers.

        Raises:
            ClosedLoaderError: If the interpreter is exiting. A daemon thread blocks for ever then.
        """
        if PROCESS.threads.is_exiting:
            if threading.current_thread().daemon:
                threading.Event().wait()
            raise ClosedLoaderError(
                "the interpreter is exiting, and the worker threads have stopped"
            )
        self.is_waiting = True
        # A wait that a signal handler has ended may have cleared the event.
        if not self.answers:
            self.wakeup.wait(None if timeout_s is None else max(0.0, timeout_s))
        self.is_waiting = False
        return self.poll(events)

    # Workers -----------------------------------------------------------------------------

    def pid(self, worker_id: int) -> None:
        """Return None: the workers are threads."""

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:
        """Return what a thread is doing."""
        return self._workers[worker_id].was_at(with_stack=with_stack)

    def close(self) -> None:
        """End the threads and drop all batches. May be called again, and from any thread."""
        try:
            self.end_workers()
        finally:
            self.recall()

    def _end(self) -> None:
        self.is_closed = True
        self.readings.close()
        for _ in self._workers:
            self.queue.put(None)  # the Nones of a second call stay in the queue
        self.wake()
        if not may_wait():
            return
        # If Ctrl-C interrupts the wait, a second call does not wait for busy threads.
        join_s, self._join_s = self._join_s, 0.0
        deadline = time.monotonic() + join_s
        for worker in self._workers:
            worker.join(deadline - time.monotonic())
