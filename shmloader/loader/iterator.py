"""The iterator of a loader: ``next()``, its one ``raise``, and what an interruption does.

The iterator takes batches from an engine: one with workers (:mod:`shmloader.loader.engines`), or
one that makes them on this thread (:mod:`shmloader.loader.inline`). It derives from torch's
iterator, which reads the loader, warns, draws the base seed and counts the yielded batches. So the
main process's random number generators are used as torch uses them.

A signal handler may raise between any two instructions. If a batch or a ticket was on its way at
that point, continuing would silently leave it out. So there is one rule: **an exception that leaves
``next()`` and is not an** :class:`~shmloader.engine.delivery.Instead` **closes the iterator, unless
the iterator only waited for a batch.** The loader's state stays that of the last batch that
``next()`` returned.

Guarantees:
    * Counting the batch is the last thing that ``next()`` does before it returns.
    * An interrupted iterator delivers everything that is left, or raises ``ClosedLoaderError``.
    * If two threads call ``next()`` at once, the second raises RuntimeError; the first continues.

The module is long because torch and frameworks read the iterator's attributes and methods on one
object.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.sample_rng import base_seed
from shmloader.engine.delivery import DatasetCheckpoints, Instead, unwrapped
from shmloader.engine.scheduler import Ticket
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.insight.record import Record
from shmloader.interruptions import is_interruption, uninterruptible
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.loader.engines import Workers
from shmloader.loader.inline import InlineEngine, make_step
from shmloader.sampling.plan import EpochPlan

_REPLACED = (
    "load_state_dict() was called after this iterator was made: call iter() of the loader again, "
    "which continues from the loaded state"
)


def _refuse(first: int, second: int) -> NoReturn:
    """Raise the error for a call on a thread that began before that on another had ended."""
    if first in {thread.ident for thread in threading.enumerate()} - {second}:
        raise RuntimeError(
            "another thread is in next() of this iterator. Hold a lock around next(), or give "
            "each thread its own loader."
        )
    raise ClosedLoaderError(
        "the iterator cannot go on: a call of next() on this thread is still running, or did not "
        "finish because exceptions from outside interrupted it"
    )


class BatchIterator(_BaseDataLoaderIter):
    """Delivers the batches of an engine, and counts them. One thread at a time uses it.

    Its workers end when it is closed or garbage.
    """

    _IterableDataset_len_called: int | None  # type: ignore[assignment]
    # The thread that is inside next(), or that was when an exception left next() unfinished.
    _caller = 0
    _is_exhausted = _is_replaced = False
    # Set by install() on an iterator that keeps persistent workers: the loader of ours behind it.
    _stand_in: Any = None
    # Checkpoints of the datasets after the last delivered batch; None if none are kept.
    _checkpoints: DatasetCheckpoints | None = None
    # What makes the batches, and what delivers them: the same, or a stage behind it.
    _engine: Any = None
    _source: Any = None
    # Only with workers: what the iterator does with them, and their pool.
    _opened: Any = None
    _pool: Any = None
    # Decides how many workers there are, with num_workers="auto", and what it has decided.
    _adapter: Any = None
    _wanted: int | None = None
    _finalizer: Any = None
    # Called with each batch on this thread; None for nothing.
    _transform: Callable[[Any], Any] | None = None

    def __init__(
        self, loader: Any, config: LoaderConfig, plan: EpochPlan, parts: LoaderParts
    ) -> None:
        began_ns = time.monotonic_ns()
        # Python keeps up to 30 attributes of an object in less time and memory; torch has 19.
        self._config, self._plan, self._parts = config, plan, parts
        resumed = parts.pop_resumed()
        inline = None if config.num_workers else InlineEngine(config, parts, resumed)
        # The seed of a resumed epoch was drawn when the epoch first began. So torch's global
        # generator is set back afterwards: a user may have restored its state.
        before = torch.get_rng_state() if plan.is_continued and plan.generator is None else None
        super().__init__(loader.as_torch_sees_it)
        if before is not None:
            torch.set_rng_state(before)
        if config.fetch.seed is not None:
            assert plan.counter.newest is not None
            self._base_seed = base_seed(config.fetch.seed, plan.counter.newest)
        try:
            if inline is None:
                unwrapped(self._open_workers, loader, resumed)
            else:
                self._open_inline(inline)
            self._begin_record(loader, began_ns)
            if config.num_workers:
                # A second time, as torch does.
                super()._reset(loader.as_torch_sees_it, first_iter=True)
                unwrapped(self._draw_for, self._source.start)
            else:
                self._draw_for(self._source.start)
        except BaseException:
            if self._source is not None:
                self.close()
            raise

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's methods iterate: the order's, which may add to the loader's."""
        return self._plan.newest.index_sampler

    @_index_sampler.setter
    def _index_sampler(self, _: object) -> None:
        """Ignore the loader's, which torch's constructor sets."""

    # Epochs ----------------------------------------------------------------------------------

    def _open_inline(self, engine: InlineEngine) -> None:
        """Open the engine that makes batches on this thread."""
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        engine.open(self._plan, self._pin_memory, self._pin_memory_device)
        self._engine = self._source = engine
        if engine.checkpoints is not None:
            self._checkpoints = self._parts.checkpoints = engine.checkpoints
        self._end_with_iterator(engine.end)

    def _open_workers(self, loader: Any, resumed: DatasetCheckpoints | None) -> None:
        """Start the workers, and open their engine."""
        config, parts = self._config, self._parts
        if config.saves_dataset:
            first = resumed or DatasetCheckpoints(
                [Checkpoint()] * config.num_workers, base_seed=int(self._base_seed)
            )
            self._base_seed = first.base_seed or self._base_seed
            self._checkpoints = parts.checkpoints = first
        opened = self._opened = Workers(
            config,
            parts,
            base_seed=int(self._base_seed),
            checkpoints=self._checkpoints,
            pin=(self._pin_memory, self._pin_memory_device),
        )
        self._engine, self._source, self._pool = opened.engine, opened.source, opened.pool
        self._adapter, self._loader = parts.adapter, weakref.ref(loader)
        if config.device is None:  # otherwise, its stage calls the transform
            _, self._transform = make_step(config)
        self._end_with_iterator(opened.end)

    def _end_with_iterator(self, end: Callable[[], object]) -> None:
        """Call a function, which must not hold the sampler, when the iterator is garbage."""
        self._finalizer = weakref.finalize(self, end)
        self._finalizer.atexit = False

    def _begin_record(self, loader: Any, began_ns: int) -> None:
        is_inline = self._opened is None
        self._record = self._engine.record = Record(
            self._plan.counter.newest,
            self._config.kind,
            loader.num_workers,
            persistent_workers=self._persistent_workers,
            in_order=self._config.in_order,
            fetch_concurrency=0 if is_inline else self._config.samples_at_once,
            has_transform=self._config.device_transform is not None,
            counts=self._engine.counts,
            readings=None if is_inline else self._pool.readings,
            # Without workers, the engine counts them in the record.
            failed=None if is_inline else self._parts.failures,
            begin_ns=began_ns,
        )
        self._parts.statistics.begin(self._record, self)

    def _draw_for(self, start: Callable[[Any], object]) -> None:
        """Begin to draw the epoch's index batches, and start or restart the engine with them."""
        if self._opened is not None:
            self._opened.begin_epoch()
        if self._adapter is not None:
            self._adapter.begin(self._engine.scheduler.workers.present_count)
            self._wanted = None
        takes_arrays = self._config.fetch.takes_arrays
        self._sampler_iter = self._plan.draw(self._sampler_iter, as_arrays=takes_arrays)
        self._progress = self._plan.counter.progress
        if self._is_exhausted or self._is_replaced:
            self._is_exhausted = self._is_replaced = False
        try:
            start(self._sampler_iter)
        except Instead:
            raise
        except BaseException as interruption:
            uninterruptible(functools.partial(self._give_up, interruption))
            raise
        self._record.begin(self._source.draw_ns)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin a further epoch with the same workers; torch's ``__iter__`` calls this."""
        if self._stand_in is None or self._stand_in is loader:
            loader.begin_epoch(functools.partial(self._go_on, loader, first_iter), draws_seed=False)
        else:
            self._stand_in.begin(loader, self)

    def _go_on(self, loader: Any, first_iter: bool) -> Self:
        self._begin_record(loader, time.monotonic_ns())
        super()._reset(loader.as_torch_sees_it, first_iter)
        unwrapped(self._draw_for, self._source.restart)
        if self._engine.beginnings is not None:
            self._checkpoints = self._parts.checkpoints = self._engine.beginnings
        return self

    # One batch -------------------------------------------------------------------------------

    def __next__(self) -> Any:
        """Return the next batch."""
        began_ns = time.monotonic_ns()
        # No other thread runs between this test and the assignment: Python switches threads only at
        # calls and backward jumps.
        caller = threading.get_ident()
        if self._caller:
            _refuse(self._caller, caller)
        mark = None
        try:
            self._caller = caller
            progress, checkpoints = self._progress, self._checkpoints
            mark = (
                (progress.position, progress.ahead),
                None if checkpoints is None else checkpoints.mark(),
            )
            try:
                # torch's __next__ takes longer, so it is called only where it does more: it warns
                # of an iterable dataset that is longer than its length, and tells the profiler.
                if self._IterableDataset_len_called is None and not _profiler_enabled():
                    batch = self._next_data()
                    self._num_yielded += 1
                else:
                    batch = super().__next__()
            except (Instead, UserWarning) as instead:  # torch's warning may be made an error
                error = instead.error if isinstance(instead, Instead) else instead
                self._count_error(error, began_ns)
            else:
                self._count(began_ns)
                self._caller = 0
                return batch
            self._caller = 0
        except BaseException as interruption:
            try:
                self._leave(interruption, mark, began_ns)
            finally:
                self._caller = 0
            if isinstance(interruption, KeyboardInterrupt):
                # Hides the exception that was being handled, which does not concern the user.
                raise interruption from interruption.__cause__
            raise
        try:
            raise error
        finally:
            del error  # breaks a reference cycle, as its traceback refers to this frame

    def _next_data(self) -> Any:
        """Return the next batch, or raise an ``Instead``; torch's ``__next__`` calls this, too."""
        if self._is_replaced:
            raise Instead(RuntimeError(_REPLACED))
        if self._is_exhausted:
            raise Instead(StopIteration())
        try:
            batch = self._source.next_batch()
        except Instead as instead:
            if not isinstance(instead.error, StopIteration):
                raise
        else:
            try:
                return batch if self._transform is None else self._transform(batch)
            except Exception as error:
                if is_interruption(error):
                    raise
                raise Instead(error) from None
        self._end_epoch()
        raise Instead(StopIteration())

    def _end_epoch(self) -> None:
        if self._checkpoints is not None and self._persistent_workers:
            self._checkpoints.end_epoch(self._engine.scheduler.next_beginnings)
        self._is_exhausted = self._progress.is_ended = True
        self._plan.newest.forget_ended()
        if not self._persistent_workers:
            self.close()

    def _count(self, began_ns: int) -> None:
        """Count a delivered batch, and record how long its steps took."""
        source, record = self._source, self._record
        ended_ns = time.monotonic_ns()
        delivery = source.delivery
        times = delivery.times
        about = "other" if times is None else source.staged
        record.add(began_ns, ended_ns, source.draw_ns, times, about)
        if self._adapter is not None:
            self._adapt(self._adapter, began_ns, ended_ns)
        progress = self._progress
        if progress.is_plain and record.in_order and self._checkpoints is None:
            progress.position = progress.start + (delivery.seq + 1) * progress.unit
        else:
            self._count_done(delivery)

    def _adapt(self, adapter: Any, began_ns: int, ended_ns: int) -> None:
        """Adapt the number of workers after a batch."""
        wanted = adapter.count_batch(ended_ns, ended_ns - began_ns)
        if wanted != self._wanted:
            self._wanted = wanted
            self._engine.want_workers(wanted)
        loader, present = self._loader(), self._engine.scheduler.workers.present_count
        self._record.num_workers, count = present, min(wanted, present)
        if loader is not None:
            loader.num_workers = count

    def _count_done(self, delivery: Ticket) -> None:
        if self._checkpoints is not None:
            self._checkpoints.update(delivery.datasets)
        if self._record.in_order:
            self._progress.done_until(delivery.seq)
        else:
            for each in (*delivery.left_out, delivery):
                self._progress.done(each.seq)

    def _count_error(self, error: BaseException, began_ns: int) -> None:
        """Count an exception in place of a batch, or at the epoch's end."""
        record, delivery = self._record, self._source.delivery
        is_end = isinstance(error, StopIteration)
        record.add(began_ns, time.monotonic_ns(), 0, None, "end" if is_end else "other")
        if is_end:
            record.end()
        elif delivery is not None:
            record.failures += 1
            self._count_done(delivery)

    # Interruptions and the end ---------------------------------------------------------------

    def _leave(self, error: BaseException, mark: Any, began_ns: int) -> None:
        """Handle an exception that has interrupted a call: close, unless that only waited."""
        if self._source.is_waiting:
            self._record.add(began_ns, time.monotonic_ns(), 0, None, "other")
            return
        was_closed = self.is_closed and not is_interruption(error)
        uninterruptible(functools.partial(self._give_up, error, mark))
        if was_closed:  # by another thread, since which anything may fail
            raise ClosedLoaderError(ITERATOR_CLOSED) from error

    def _give_up(self, error: BaseException, mark: Any = None) -> None:
        """Close after an interruption, with the state of the last batch that was returned."""
        if mark is not None:
            self._progress.go_back(mark[0])
            if self._checkpoints is not None:
                self._checkpoints.go_back(mark[1])
        self._source.give_up(error)
        self._end_record()

    def replace(self) -> None:
        """Deliver no further batch of this epoch, since the loader continues from a state."""
        self._is_replaced = not self._is_exhausted

    def close(self) -> None:
        """End the workers and free the memory. May be called again, and from any thread."""
        try:
            self._source.close()
        finally:
            self._end_record()

    def _end_record(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if hasattr(self, "_record"):
            self._record.end()

    @property
    def is_closed(self) -> bool:
        """Whether ``close``, the epoch's end, a worker's death or too many failures closed it."""
        return bool(self._engine.is_closed)

    def _shutdown_workers(self) -> None:
        """Close the iterator, under torch's name for :meth:`close`."""
        self.close()

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, for tools that read this attribute of torch's iterator."""
        handles = getattr(self._pool, "handles", ())  # which only a pool of processes has
        return [handle.process for handle in handles if handle.process is not None]
