"""The engine over worker threads: tickets out, batches in, in order. No slots.

A ticket in flight is a :class:`ThreadTask`, and this alone puts it into the window and takes it
out again; its answer is set by the thread that has it.
"""

import collections
import time
import weakref
from collections.abc import Iterator

from shmloader.engine.base import EngineBase
from shmloader.engine.failures import FailureWatch
from shmloader.engine.lateness import late_in_threads
from shmloader.engine.wording import describe_loading, describe_ticket
from shmloader.errors import LoaderTimeoutError
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption
from shmloader.stats.times import BatchTimes
from shmloader.workers.thread_task import Recipe, ThreadAnswer, ThreadTask
from shmloader.workers.threads import ThreadPool


class ThreadedEngine(EngineBase):
    """Batches out of worker threads.

    Args:
        pool: The threads; the engine owns them from now on.
        recipe: How batches are made; the iterator owns it, since a stage's thread holds the engine,
            and must not hold what may hold the iterator.
        window: Most tickets in flight.
        in_order: Whether batches come in the sampler's order, or the oldest that is ready.
        timeout_s: Longest wait for a batch; 0 for ever.
        watch: Notes bad samples; None if they are raised.
    """

    def __init__(
        self,
        pool: ThreadPool,
        recipe: weakref.ref[Recipe],
        *,
        window: int,
        in_order: bool,
        timeout_s: float,
        watch: FailureWatch | None = None,
    ) -> None:
        super().__init__(window=window, timeout_s=timeout_s, watch=watch)
        self._pool = pool
        self._recipe = recipe
        self._in_order = in_order
        self._epoch = 0
        self._next_seq = 0
        self._in_flight: collections.deque[ThreadTask] = collections.deque()

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same threads.

        What is in flight is dropped, and not waited for: a thread that is in a sample of the epoch
        before comes when it is done with that.
        """
        self.check_open()
        try:
            self._drop_all()
            self._epoch += 1
            self._next_seq = 0
            self._left_out.clear()
            if self._watch is not None:
                self._watch.start_epoch()
            self.start(tickets)
        except BaseException as error:
            if is_interruption(error):  # and not of the user's sampler, which may go on
                self.give_up(error)
            raise

    def _drop_all(self) -> None:
        for task in self._in_flight.copy():
            task.is_dropped = True
        self._in_flight.clear()

    def wake(self) -> None:
        """Get the engine's thread out of its wait; from any thread."""
        self._pool.wake()

    def wake_soon(self) -> None:
        """At once: a lock is all that is let go of."""
        self._pool.wake()

    def hurry(self) -> None:
        """Nothing to do."""

    # One batch ---------------------------------------------------------------------------

    def _next_batch(self) -> object:
        deadline: float | None = None
        while True:
            if self._inbox:
                self.take_tickets()
            self.in_transit = True
            task = self._take_next()
            if task is not None:
                assert task.answer is not None
                if self._watch is not None and self._note_samples(self._watch, task, task.answer):
                    deadline = None
                    continue
                return self._hand_over(task, task.answer)
            self.in_transit = False
            if not self._in_flight and not self._awaits_tickets():
                if self._inbox:
                    continue
                self._raise_end()
            if self._inbox is None:  # else the user's thread looks at its clock
                deadline = deadline or self._deadline()
            if FAULTS is not None:
                FAULTS.reach("main.next")
            self._wait(deadline)
            self._pause()
            self.check_open()

    def _take_next(self) -> ThreadTask | None:
        """The task whose batch comes next, out of the window, if it is answered."""
        for task in self._in_flight:
            if task.answer is not None:
                self._in_flight.remove(task)
                return task
            if self._in_order:
                break
        return None

    def _wait(self, deadline: float | None) -> None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise self.late()
        self._pool.wait(left_s)

    def late(self) -> LoaderTimeoutError:
        """What is to be raised when a batch has not come in time. From any thread."""
        tasks = list(self._in_flight.copy())
        return late_in_threads(
            self._timeout_s, self._pool, tasks, self._epoch, in_order=self._in_order
        )

    def _note_samples(self, watch: FailureWatch, task: ThreadTask, answer: ThreadAnswer) -> bool:
        """Count the samples of a task that is next; whether nothing is left of its batch."""
        error = None
        if answer.report is not None:
            error = watch.note(answer.report, f"batch {task.seq}", task.worker_id, None)
        if error is None and answer.is_empty:
            error = watch.left_out(describe_ticket(task))
        if error is not None:
            self._fail(error)
        if answer.is_empty:
            self._left_out.append(task.seq)
            self._replace_ticket()
        return answer.is_empty

    def _hand_over(self, task: ThreadTask, answer: ThreadAnswer) -> object:
        """Give a task's batch, or raise what came instead; and offer one more ticket."""
        if FAULTS is not None:
            FAULTS.reach("main.deliver")
        self._give_receipt(task.seq, times=self._times(task))
        self._offer()
        if answer.error is not None:
            self._raise_told(answer.error.rebuilt(describe_loading(task, None)))
        return answer.batch

    def _times(self, task: ThreadTask) -> BatchTimes | None:
        work = task.times
        if work is None or task.worker_id is None:
            return None
        # The answer is here as soon as it is set.
        ended_ns = work.began_ns + work.fetch_ns + work.collate_ns + work.encode_ns
        now_ns = time.monotonic_ns()
        offered_ns = task.offered_ns
        return BatchTimes(
            task.worker_id, offered_ns, offered_ns, work, 0, ended_ns, now_ns, task.nbytes
        )

    def _offer_indices(self, indices: object) -> None:
        task = ThreadTask(self._next_seq, self._epoch, indices, self._recipe())
        task.offered_ns = time.monotonic_ns()
        self._next_seq += 1
        self._in_flight.append(task)
        self._pool.put(task)

    # Ends --------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads and let go of all batches. May be called again, and from any thread."""
        self._is_closed = True
        try:
            self._pool.close()
        finally:
            self._draw = iter(()).__next__
            self._drop_all()

    def end_workers(self) -> None:
        """End the threads alone; from any thread."""
        self._is_closed = True
        self._pool.close()

    def check_open(self) -> None:
        """Raise ClosedLoaderError if it is closed, or in a forked child."""
        super().check_open()
        self._pool.check_process()
