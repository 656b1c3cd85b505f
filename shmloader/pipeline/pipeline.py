"""A built pipeline, and its iterator.

Used from one thread at a time, but any thread may call ``stop`` and ``stats``.

The module is long because nearly half of it documents the methods.
"""

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any, Self

from shmloader.device.device import OnDevice
from shmloader.engine.failures import FailureList
from shmloader.errors import ClosedLoaderError
from shmloader.grammar import described_type
from shmloader.pipeline.config import PipelineConfig
from shmloader.pipeline.flow import Flow
from shmloader.pipeline.processes import Executors
from shmloader.pipeline.source import (
    SourceReader,
    checked_state,
    fresh,
    save_state,
    why_not_resumable,
)
from shmloader.pipeline.stages import END, Checkpoint, FailedItem, Raised
from shmloader.pipeline.stats import PipelineStats, snapshot
from shmloader.process_state import PROCESS, Threads
from shmloader.sampling.hooks import has_own_state


class Pipeline:
    """A source and a chain of stages that process its items. Made by :meth:`PipelineBuilder.build`.

    Iterate it. Only one thread at a time may use it, except that any thread may call :meth:`stop`
    and :meth:`stats`. Only one *epoch* (a run through the source) is under way at a time.

    Iteration starts the pipeline, and stops it: at the end, at an error, at a ``break``, and when
    the iterator is garbage-collected. Inside ``with pipeline.auto_stop():`` threads and worker
    processes persist from one epoch to the next.

    The number of items in flight is bounded, whatever the consumer does:

    * 1 that the source has yielded and that waits to be passed on;
    * 8 before the first stage, and 2 before each further one;
    * ``concurrency`` in each stage, or twice that with ``executor="process"``;
    * one list in each aggregate;
    * ``buffer_size`` in the sink, and what the consumer holds.

    A running call holds its item and, at its end, its result. A list counts as the items that it
    was made of. A generator has one result waiting at a time. In a process, all its
    results for an item come together.

    Up to 64 results of each stage on processes lie in shared-memory slots. Further ones are copied
    to ordinary memory.

    Attributes:
        failures: The newest 100 items that were left out (``max_failures``), over all epochs,
            oldest first. Each has ``stage``, ``item``, ``error`` (the exception, whose ``str`` is
            one line) and ``traceback`` (its traceback, as text). ``item`` is the beginning of the
            item's ``repr``. A number, a path, or a str of at most 2,000 characters is kept itself.
            ``failures.total`` counts all of them.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self, config: PipelineConfig) -> None:
        self.failures: FailureList[FailedItem] = FailureList()
        self._config = config
        self._executors = Executors(config)
        # The process that began the first epoch; None before that.
        self._pid: int | None = None
        # The present epoch, over or not; None before the first.
        self._flow: Flow | None = None
        # Where the next epoch begins; None for the beginning.
        self._resume_at: Checkpoint | None = None
        # Whether threads and processes persist after an epoch.
        self._is_kept = False

    # The default value, since at the interpreter's end modules are gone before their objects.
    def __del__(self, threads: Threads = PROCESS.threads) -> None:
        # Not weakref.finalize, which would hold the ops, and these may hold this object.
        # A copy whose making failed has no attributes.
        if vars(self).get("_pid") is not None and not threads.is_exiting:
            self.stop()

    # Starting and stopping ---------------------------------------------------------------

    def _begin(self) -> Flow:
        config, source, is_new = self._config, self._config.source, self._resume_at is None
        if self._flow and is_new and isinstance(source, Iterator):
            raise RuntimeError(
                f"the pipeline's source, {described_type(source)}, is an iterator, and an earlier "
                "epoch has taken items from it. Give add_source an object whose __iter__ begins "
                "again, or build a pipeline for each epoch."
            )
        self._pid = os.getpid()
        try:
            runners = self._executors.make()
            start = None if why_not_resumable(config) else self._next_start()
            reader = SourceReader(config, start)
            flow = self._flow = Flow(config, runners, self.failures, reader)
            self._resume_at = None
            flow.begin()
        except BaseException:
            self.stop()
            raise
        return flow

    def _next_start(self) -> Checkpoint | None:
        return fresh(self._config.source) if self._resume_at is None else self._resume_at

    def stop(self) -> None:
        """End threads, worker processes and the epoch. May be called again, and from any thread.

        Takes at most a second. Items in flight are lost, coroutines are cancelled, and workers are
        ended. A thread that is in an op is waited for only a moment. It ends when the op returns,
        and keeps neither this process nor its memory alive.
        """
        self._is_kept = False
        self._leave("it was stopped", with_processes=True)

    def _leave(self, why: str, *, with_processes: bool) -> None:
        """Leave the present epoch, and end its executors. From anywhere, and again."""
        if self._flow is not None:
            self._flow.leave(why)
        if self._pid == os.getpid():  # in a forked child, none of the threads runs
            self._executors.end(with_processes=with_processes)

    def _check_process(self) -> None:
        if self._pid not in (None, os.getpid()):
            raise ClosedLoaderError("the pipeline belongs to the process that started it")

    @property
    def _is_under_way(self) -> bool:
        return self._flow is not None and not self._flow.is_over

    @contextlib.contextmanager
    def auto_stop(self) -> Iterator[Self]:
        """Keep threads and worker processes from epoch to epoch until the end of the block."""
        self._is_kept = True
        try:
            yield self
        finally:
            self.stop()

    # Items -------------------------------------------------------------------------------

    def __iter__(self) -> "PipelineIterator":
        """Return an iterator over a new epoch.

        An epoch that is under way is left: ``next()`` of its iterator raises ``ClosedLoaderError``.

        Raises:
            RuntimeError: If the source is an iterator, and an earlier epoch has used it.
            ClosedLoaderError: If another process, or another thread's :meth:`stop`, is in the way.
            OSError: If no process could be started.
            TypeError, AttributeError, pickle.PicklingError: If the op of a stage on processes
                cannot be pickled for a start method that needs it.
        """
        self._check_process()
        if self._is_under_way:
            self._leave("another iterator has begun", with_processes=False)
        return PipelineIterator(self, self._begin())

    def _next(self, flow: Flow) -> Any:
        """Return the next item, or raise what is to be raised, or StopIteration at the end.

        What else leaves this method is an exception from outside, such as a Ctrl-C. It ends the
        epoch, and the pipeline's state is that after the item that was returned before.
        """
        self._check_process()
        delivered = flow.delivered
        try:
            item = flow.take(self._config.timeout_s)
            if type(item) is OnDevice:
                item = self._executors.transfer.deliver(item)
            if flow.is_over:
                self._end_epoch(flow, flow.over_because)
            if item is END:
                item = Raised(StopIteration())
            if type(item) is not Raised:
                return item
        except BaseException as interruption:
            flow.delivered = delivered
            why = f"it was interrupted by {type(interruption).__name__}"
            flow.leave(why)
            self._end_epoch(flow, why)
            raise
        try:
            raise item.error
        finally:
            del item  # the traceback pins this frame

    def _end_epoch(self, flow: Flow, why: str) -> None:
        """Leave an epoch and end what it has used. May be called again.

        Args:
            flow: The epoch.
            why: Why it is left; "" at its regular end.
        """
        if self._flow is not flow:
            return
        if not self._is_kept:
            self.stop()
        elif why:
            self._leave(why, with_processes=False)
        elif self._executors.transfer is not None:
            self._executors.transfer.close()

    # Statistics and states ---------------------------------------------------------------

    def stats(self) -> PipelineStats:
        """Return where the time of the newest epoch went, stage by stage, and what limits it.

        ``print`` shows a table. May be called at any time, from any thread, also after
        :meth:`stop`. Earlier epochs are not included.
        """
        return PipelineStats() if self._flow is None else snapshot(self._flow, self._state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered item, for :meth:`load_state_dict`.

        Items that were read ahead, or are in work, are not lost: a resumed pipeline reads them
        again. After the end of an epoch, the position is the beginning of the next epoch. After
        ``break``, :meth:`stop` or an error, it is the position that was reached.

        The source is resumed by its own state if it has both ``state_dict()`` and
        ``load_state_dict()``. That state is taken and copied after each item (see
        ``snapshot_every_n_steps`` of :meth:`PipelineBuilder.add_source`), on the thread
        that iterates the source. A ``collections.abc.Sequence`` is resumed by index.

        Stages with more than one item at once need ``output_order="input"``. A generator function
        or ``disaggregate`` makes several results of an item. If only some of them were delivered,
        the op is called with the item again, and the results that were delivered before are
        dropped. So the op should make the same results again.

        Failures are counted from 0 again for ``max_failures``.

        Returns:
            A dict of numbers, strings and lists, and the source's own state.

        Raises:
            RuntimeError: If the source cannot be resumed, or a stage does not keep the order.
            Exception: An exception of the source's ``state_dict()``, or of copying its state.
        """
        self._check_resumable()
        flow = None if self._resume_at is not None else self._flow
        found = self._next_start() if flow is None else flow.delivered
        assert found is not None  # the pipeline can be resumed
        return save_state(self._config, found)

    def _check_resumable(self) -> None:
        why_not = why_not_resumable(self._config)
        if why_not:
            raise RuntimeError(why_not)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch continue where ``state`` was taken.

        Calls the source's ``load_state_dict()`` at once, on the calling thread. ``concurrency``,
        ``executor`` and ``buffer_size`` may differ from those with which the state was taken.

        Args:
            state: What :meth:`state_dict` returned, of this pipeline or of one with the same source
                and the same ops.

        Raises:
            ValueError: If the state was not saved by a pipeline, or does not fit this pipeline.
            RuntimeError: If an epoch is under way (end its iterator, or call :meth:`stop`), or if
                the pipeline cannot be resumed; see :meth:`state_dict`.
            Exception: An exception of the source's ``load_state_dict()``.
        """
        self._check_resumable()
        start = checked_state(self._config, state)
        if self._is_under_way:
            raise RuntimeError(
                "an epoch of the pipeline is under way. Call load_state_dict() before iteration, "
                "or after stop()."
            )
        source: Any = self._config.source
        if has_own_state(source):
            source.load_state_dict(copy.deepcopy(start.saved))
        self._resume_at = start

    @property
    def _state(self) -> str:
        """Whether an epoch is under way, and how the last one ended, in words."""
        if self._flow is None:
            return "not started"
        if not self._flow.is_over:
            return "running"
        return f"ended: {self._flow.over_because}" if self._flow.over_because else "ended"

    def __repr__(self) -> str:
        """Return the source, the stages and the sink, and whether an epoch is under way."""
        return f"<{type(self).__name__}: {self._config}, {self._state}>"


class PipelineIterator:
    """Iterator over the items of one epoch."""

    def __init__(self, pipeline: Pipeline, flow: Flow) -> None:
        self._pipeline = pipeline
        self._flow = flow

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next item.

        Raises:
            TimeoutError: If no item comes within the ``timeout`` of ``build``. Nothing is lost:
                call ``next()`` again. :meth:`Pipeline.stats` shows which stages are busy.
            ClosedLoaderError: If the epoch was left or has failed before.
            WorkerDiedError: If a worker process has died.
            TooManyFailures: If more calls failed than ``max_failures`` allows.
            Exception: The exception of an op, with a note that names stage and item. This ends the
                epoch.
        """
        return self._pipeline._next(self._flow)

    def __del__(self, threads: Threads = PROCESS.threads) -> None:
        if not threads.is_exiting and not self._flow.is_over:
            self._flow.leave("its iterator was left")
            self._pipeline._end_epoch(self._flow, "its iterator was left")
