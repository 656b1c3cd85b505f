"""The pool whose workers are threads, for datasets that wait or release the interpreter lock.

Each thread is a :class:`~shmloader.pools.thread_worker.ThreadWorker`.

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
    * ``close`` leaves a thread behind that is still in the user's code after five seconds. A thread
      that takes longer than ``sample_timeout`` for a sample is left behind, too. Such a thread ends
      when that code returns, and its batch is dropped. It blocks neither the caller nor the
      interpreter's exit.
    * At the interpreter's exit all threads are asked to pause for good, and the interpreter waits
      for them for a limited time (:mod:`shmloader.threads.fork_safety`).

These threads do not pause while the process forks elsewhere. They run the user's code, which cannot
be interrupted, and waiting for a slow sample would delay each start of a worker by seconds. They
hold no lock of ours that a child would use. But a lock of the user's code, or of a library that it
calls, may stay locked for ever in a child that is forked meanwhile, as with any thread.
"""

import functools
import os
import threading
import time
import weakref
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.errors import ClosedLoaderError
from shmloader.insight.measurements import Counts, Readings, Usage
from shmloader.pools import Events, SentTicket
from shmloader.pools.status_page import AtWork
from shmloader.pools.thread_task import ThreadConfig, ThreadTask
from shmloader.pools.thread_worker import Post, ThreadWorker, start_workers
from shmloader.threads.fork_safety import is_exiting, may_wait_here
from shmloader.threads.uninterruptible import uninterruptible

# How long close() waits for threads that may be loading a sample.
_JOIN_S = 5.0


class ThreadPool:
    """A fixed number of threads that load; see :class:`~shmloader.pools.Pool`.

    Args:
        worker_count: The number of threads.
        config: How batches are made, as a weak reference. The iterator owns the object: a stage's
            thread refers to the pool, and must not keep objects alive that may refer to the
            iterator.
    """

    has_queue = True
    memory = None

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
        self._post = Post()
        # Tasks that were sent and whose answers were not reported, by seq.
        self._tasks: dict[int, ThreadTask] = {}
        self.is_waiting = False
        self.counts = Counts()
        #: CPU time of the threads.
        self.readings = Readings()
        self._join_s = _JOIN_S
        self._workers = [self._make_worker(worker_id) for worker_id in range(worker_count)]
        try:
            start_workers(self._workers)
            self.readings.open(functools.partial(_read_usage, self._workers))
        except BaseException:
            self.close()
            raise

    def _make_worker(self, worker_id: int) -> ThreadWorker:
        config = self._config()
        return ThreadWorker(worker_id, self._post, None if config is None else config.init_fn)

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

    def resume(self, worker_id: int, checkpoint: DatasetCheckpoint) -> None:
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
        """Leave a thread behind that takes too long for a sample. Returns whether that was done."""
        return self._workers[worker_id].leave_behind(seq)

    def replace(self, worker_id: int) -> None:
        """Start a thread in place of one that was left behind."""
        worker = self._workers[worker_id] = self._make_worker(worker_id)
        start_workers([worker])
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
            self._post.tasks.put(None)  # the Nones of a second call stay in the queue
        self.wake()
        if not may_wait_here():
            return
        # If Ctrl-C interrupts the wait, a second call does not wait for busy threads.
        join_s, self._join_s = self._join_s, 0.0
        deadline = time.monotonic() + join_s
        for worker in self._workers:
            worker.join(deadline - time.monotonic())
        self.readings.close()


def _read_usage(workers: list[ThreadWorker], _: bool) -> list[Usage]:
    return [worker.usage() for worker in workers]
