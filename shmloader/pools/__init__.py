"""Pools make the batches. This docstring states everything that the engine asks of one.

The scheduler decides, the engine has its pool act, and the pool reports what happened. A pool knows
nothing of the order of batches, of later epochs, of restarts or of users.

==================  ==========================================  ===================================
pool                workers                                     batches arrive
==================  ==========================================  ===================================
``ProcessPool``     processes that this process started, or     in slots of shared memory
                    that all ranks of a host share
``ThreadPool``      threads of this process                     as ordinary objects
``ExecutorPool``    numbers that stand for an executor's tasks  as ordinary objects
==================  ==========================================  ===================================

Every pool keeps these rules:

* A task that was sent is answered exactly once, by what :meth:`Pool.send` returns, by ``answered``
  or by ``stream_ended``. If the worker is lost, that is reported once, after everything that it had
  answered; a pool with a queue then takes back its queued tasks as well, to be sent again. Tasks
  that :meth:`Pool.recall` returns are not answered.
* Events are reported inside a call of :meth:`Pool.wait` or :meth:`Pool.poll`, on the calling
  thread, by methods of :class:`~shmloader.engine.engine.Engine`: ``answered``, ``stream_ended``,
  ``epoch_entered`` and ``lost``. What happens between two calls waits in the pool.
* An exception of the dataset, of ``collate_fn`` or of ``worker_init_fn`` is an answer. An
  exception of a signal handler is not an answer: it propagates from the call. A
  KeyboardInterrupt that arrives while the pool only waits (``is_waiting``) loses nothing.
* Only :meth:`Pool.wait` blocks. Closing, ending and :meth:`Pool.ask` take a bounded time.
  No other call waits for a worker.
* To begin a further epoch, the engine recalls what is queued and calls :meth:`Pool.start_epoch` for
  each worker. A pool of processes first answers all tasks of the previous epoch that workers have,
  and then reports ``epoch_entered``. The other pools recall all tasks, also those that
  are being made.
* After :meth:`Pool.close` no process, thread, mapping or descriptor of the pool remains, except
  mappings under tensors that the user holds. A worker process that stays inside the user's code for
  long is killed. A thread cannot be killed: it is left behind, and ends once that code returns.

One thread at a time uses a pool. ``wake``, ``pid``, ``was_at``, ``end_workers`` and
``close`` may be called from any thread. ``tests/pools`` holds the suite that each pool must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the interface needs no implementation
    from shmloader.batch.checkpoint import Checkpoint
    from shmloader.insight.measurements import Counts, Readings
    from shmloader.pools.answers import Answer
    from shmloader.pools.slot_memory import SlotMemory
    from shmloader.pools.status_page import AtWork


class Pool(Protocol):
    """Workers, numbered from 0. Only some pools have slots, or workers that can be ended.

    Attributes:
        counts: Counters of slots and workers. Any thread may read them.
        readings: Memory and CPU time of the workers. Any thread may read them.
        has_queue: Whether the pool has one queue, from which an idle worker receives the oldest
            task. Otherwise the scheduler assigns each task to a worker.
        is_waiting: Whether :meth:`wait` waits, or was left by an exception while it waited. In that
            state everything that was taken from a worker has been reported. The engine resets it
            at the beginning of a call.
    """

    counts: Counts
    readings: Readings
    has_queue: bool
    is_waiting: bool

    @property
    def memory(self) -> SlotMemory | None:
        """The slots' memory, if batches come in slots. An answer's content is read from there."""

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that has the workers."""

    def send(self, ticket: Any, epoch: int) -> Answer | None:
        """Send a ticket's task to a worker. Returns the answer if it cannot be pickled.

        Args:
            ticket: The scheduler's :class:`~shmloader.engine.scheduler.Ticket`. Its ``seq`` and
                ``indices`` are read, without a queue its ``worker_id``, with slots its ``slot_id``,
                and if workers can be ended ``hung``, by which samples are to raise an error.
            epoch: Number of the epoch.

        Raises:
            OSError: If no descriptor or address space is left for the slot.
            SharedMemoryError: If there is no memory for its slot.
        """

    def recall(self) -> list[int]:
        """Take back the tasks of the queue, and return their tickets' numbers. Ends an epoch."""

    def start_epoch(self, worker_id: int, epoch: int) -> bool:
        """Tell a worker to begin a further epoch. Returns whether it has begun it already."""

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        """Tell a worker where its dataset resumes, before its first task. Raises as ``send``."""

    def poll(self, events: Any, worker_id: int = -1) -> bool:
        """Report what workers have answered, or are about to. Never sleeps.

        A pool may look only for ``worker_id``, whose answer is awaited, unless that is negative.
        Returns whether there was a message.
        """

    def wait(self, timeout_s: float | None, events: Any) -> bool:
        """Wait until something happens, and report it. A timeout of None is no limit.

        Returns:
            Whether anything was reported. False after the timeout, after :meth:`wake`, and
            sometimes earlier, so that signal handlers can run.
        """

    def enable_wake(self) -> None:
        """Enable :meth:`wake`. Called before a second thread uses the pool."""

    def wake(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""

    def pid(self, worker_id: int) -> int | None:
        """Return the process id of a worker; None if it is not a process.

        ``UNKNOWN_PID`` stands for a worker of the user's executor.
        """

    def was_at(self, worker_id: int, *, with_stack: bool = False) -> AtWork:
        """Return what a worker is doing, or was doing when it died.

        With its Python stack if it lives and the pool can see that, which may take a third of a
        second.
        """

    def end_workers(self) -> None:
        """End all workers but keep the memory. May be called again."""

    def close(self) -> None:
        """End all workers and free all memory. May be called again."""

    # Only of a pool whose workers may die --------------------------------------------------------

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, or in place of a lost one.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If torch's random generator is locked in each worker that is forked, or if
                the process that owns shared workers has ended.
            ClosedLoaderError: If another thread closes the pool meanwhile.
        """

    # Only of a pool of processes --------------------------------------------------------------

    def kill(self, worker_id: int) -> None:
        """Kill a worker that takes too long for a sample. Its loss is reported like any other."""
