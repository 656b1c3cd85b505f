"""A built pipeline, and its iterator. Used from one thread at a time."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, Self

from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.interruptions import is_interruption
from shmloader.pipeline.epoch import Epoch
from shmloader.pipeline.failures import FailedItem
from shmloader.pipeline.flow import END
from shmloader.pipeline.plan import Plan, check_timeout
from shmloader.pipeline.running import Running
from shmloader.threads.fork_safety import is_exiting
from shmloader.threads.uninterruptible import uninterruptible


class Pipeline:
    """What :meth:`PipelineBuilder.build` gives: iterate it, or ask for one item after the other.

    One thread at a time uses it. It gives one stream of items at a time: one run through its
    source, an *epoch*.

    Iteration starts what was not started, and stops it again at the end, at an error, at a
    ``break`` and when its iterator is garbage. Between :meth:`start` and :meth:`stop` (or inside
    :meth:`auto_stop`) threads and worker processes are kept from one epoch to the next.

    Memory in flight is bounded, whatever the consumer does. In items: 1 that the source has given
    and that waits for room; 8 before the first stage and 2 before each further one; in each stage
    ``concurrency`` (twice that with ``executor="process"``), in an aggregate one list; the
    ``buffer_size`` of the sink; and what the consumer holds. A call that runs has its item and, at
    its end, its result. What one
    item becomes, a list of n, counts as what it is; of the many results of a generator one waits at
    a time, unless it runs in a process or an executor of the user's, whence they come together.
    Results of a stage on processes lie in slots: as many as may be in flight after it, at most 64,
    and beyond that in memory of their own.

    Attributes:
        failures: The newest 100 items that were left out (``max_failures``), over all epochs,
            oldest first: records with ``stage``, ``item`` (a few characters of its text, unless it
            is a number, a path or a str of at most 2,000) and ``error``. ``failures.total`` counts
            them all.
    """

    def __init__(self, plan: Plan) -> None:
        self.failures: FailureList[FailedItem] = FailureList()
        self._plan = plan
        self._running = Running(plan, self.failures)
        self._is_started = False
        # Whether `start` was called: what an iterator starts, it stops.
        self._is_kept = False
        # Who reads the present epoch, if that is an iterator.
        self._reader: weakref.ref[PipelineIterator] | None = None

    def __del__(self) -> None:
        # Not weakref.finalize: what runs holds the ops, and these may well hold this object.
        if not is_exiting():
            self._running.end()

    # Starting and stopping ---------------------------------------------------------------

    def start(self) -> None:
        """Start threads and worker processes, and an epoch, unless one is under way.

        Raises:
            RuntimeError: If the source is an iterator, and an epoch before has used it.
            ClosedLoaderError: If another thread calls :meth:`stop` meanwhile.
            OSError: If no process could be started.
            TypeError, AttributeError, pickle.PicklingError: If the op of a stage on processes
                cannot be pickled for a start method that needs it.
        """
        self._running.check_process()
        self._is_kept = True
        if not (self._is_started and self._running.is_under_way):
            self._begin()

    def _begin(self) -> Epoch:
        self._is_started = True
        self._reader = None
        try:
            return self._running.begin_epoch()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End threads, worker processes and the epoch. May be called again, and from any thread.

        Takes at most a second. What is in flight is lost. Coroutines are cancelled, workers ended.
        A thread that is in an op is not waited for, but for a moment: it ends when the op returns,
        and keeps neither this process nor its memory.
        """
        self._is_started = self._is_kept = False
        self._running.end()

    @contextlib.contextmanager
    def auto_stop(self) -> Iterator[Self]:
        """Start, and stop at the end of the block; gives the pipeline."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    # Items -------------------------------------------------------------------------------

    def get_item(self, timeout: float | None = None) -> Any:
        """The next item. The pipeline must have been started.

        Args:
            timeout: Seconds to wait; None: as ``build`` was told.

        Raises:
            TypeError, ValueError: If ``timeout`` is no number of seconds.
            TimeoutError: If there was none in time. Nothing is lost.
            EOFError: At the end of the epoch; :meth:`start` begins the next one.
            ClosedLoaderError: If it is not started, or the epoch was left or has failed before.
            WorkerDiedError: If a worker process is dead.
            TooManyFailures: If more failed than ``max_failures`` allows.
            Exception: An op's own, with a note that names stage and item. The epoch is over then.
        """
        if timeout is not None:
            check_timeout(timeout)
        self._running.check_process()
        epoch = self._running.epoch
        if epoch is None or not self._is_started:
            raise ClosedLoaderError("the pipeline is not started: call start(), or iterate it")
        try:
            item = self._take(epoch, timeout)
            if item is not END:
                return item
        except EOFError as error:
            if is_interruption(error):
                raise
            raise RuntimeError(
                f"an op raised EOFError, which from here would say that the epoch is over: {error}"
            ) from error
        except BaseException as error:
            self._give_up_if_lost(epoch, error)
            raise
        raise EOFError("the pipeline's epoch is over")

    def _take(self, epoch: Epoch, timeout: float | None) -> Any:
        """The epoch's next item, or END; at the end and at an error what runs is settled."""
        was_over = epoch.is_over
        try:
            return epoch.take(self._plan.timeout_s if timeout is None else timeout)
        except BaseException as error:
            self._give_up_if_lost(epoch, error)
            raise
        finally:
            if epoch.is_over and not was_over and self._running.epoch is epoch:
                if epoch.over_because:
                    self._running.leave_epoch(epoch.over_because)
                else:
                    self._running.settle()

    def _give_up_if_lost(self, epoch: Epoch, error: BaseException) -> None:
        """Leave the epoch if an exception came while an item was on its way."""
        if epoch.loses(error):
            epoch.let_go()
            why = f"it was interrupted by {type(error).__name__} while an item was on its way"
            uninterruptible(functools.partial(self._leave_epoch, epoch, why))

    def _leave_epoch(self, epoch: Epoch, why: str) -> None:
        epoch.leave(why)
        if self._running.epoch is epoch:
            self._running.leave_epoch(why)

    def __iter__(self) -> "PipelineIterator":
        """As :meth:`get_iterator`, with the timeout that ``build`` was told."""
        return self.get_iterator()

    def get_iterator(self, timeout: float | None = None) -> "PipelineIterator":
        """An iterator over the epoch that was started and that nobody iterates, or over a new one.

        An older iterator's epoch is left.

        Args:
            timeout: Seconds to wait for each item; None: as ``build`` was told.

        Raises:
            TypeError, ValueError: If ``timeout`` is no number of seconds.
            RuntimeError, OSError: As :meth:`start`.
        """
        if timeout is not None:
            check_timeout(timeout)
        self._running.check_process()
        epoch = self._running.epoch
        if epoch is None or epoch.is_over or not self._is_started:
            epoch = self._begin()
        elif self._reader is not None:
            self._running.leave_epoch("another iterator has begun")
            epoch = self._begin()
        iterator = PipelineIterator(self, epoch, timeout)
        self._reader = weakref.ref(iterator)
        return iterator

    def _left(self, epoch: Epoch) -> None:
        """An iterator reads no further."""
        if self._running.epoch is not epoch:
            return
        if not self._is_kept:
            self.stop()
        elif not epoch.is_over:
            self._running.leave_epoch("its iterator was left")


class PipelineIterator:
    """Items of one epoch. Made by :meth:`Pipeline.get_iterator`.

    ``next()`` raises what :meth:`Pipeline.get_item` does, but StopIteration at the end. A
    TimeoutError loses nothing: call ``next()`` again.
    """

    def __init__(self, pipeline: Pipeline, epoch: Epoch, timeout: float | None) -> None:
        self._pipeline = pipeline
        self._epoch = epoch
        self._timeout = timeout
        self._is_ended = False
        self._has_left = False

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next item."""
        if self._is_ended:
            raise StopIteration
        self._pipeline._running.check_process()
        try:
            item = self._pipeline._take(self._epoch, self._timeout)
            if item is not END:
                return item
        except BaseException as error:
            self._pipeline._give_up_if_lost(self._epoch, error)
            if self._epoch.is_over:
                self._leave()
            raise
        self._is_ended = True
        self._leave()
        raise StopIteration

    def _leave(self) -> None:
        """Read no further. May be called again."""
        if not self._has_left:
            uninterruptible(self._leave_now)

    def _leave_now(self) -> None:
        self._pipeline._left(self._epoch)
        self._has_left = True

    def __del__(self) -> None:
        if not is_exiting():
            self._leave()
