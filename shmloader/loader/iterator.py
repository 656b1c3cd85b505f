"""Iterators that deliver an engine's batches: the base classes.

They derive from torch's iterator, which reads the loader, warns, draws the base seed and counts the
yielded batches. So the main process's random number generators are used as torch uses them.
"""

import abc
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, Self

from shmloader.device.backend import current_index
from shmloader.device.device import Destination, DevicesStage, DeviceStage
from shmloader.device.pin import PinStage
from shmloader.device.stage import PassThroughStage, Stage
from shmloader.device.staged_engine import StagedEngine
from shmloader.engine.base import EngineBase
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.engine import Engine
from shmloader.errors import CLOSED_MEANWHILE, ClosedLoaderError
from shmloader.insight.record import Record
from shmloader.interruptions import is_interruption
from shmloader.loader.calls import REPLACED, CountingIterator
from shmloader.loader.common import (
    begin_by_torch,
    no_transform,
    seed_of_workers,
    transform_here,
)
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.pools import Pool
from shmloader.pools.adapting import Adapter
from shmloader.pools.slot_memory import PageLocker
from shmloader.sampling.plan import EpochPlan
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.tracebacks import user_part

# An engine that has moved to its own thread stays there for at least so many batches. A move takes
# some 0.3 ms, and to an engine that runs on the user's thread, a pause of the user's looks like a
# long batch.
_BATCHES_BETWEEN_MOVES = 1_000


def _device_stage(
    config: LoaderConfig, destination: Destination | None
) -> tuple[Stage | None, PageLocker | None]:
    """Return the stage that copies batches to the devices, and its locker of slots' pages."""
    if destination is None:
        return None, None
    locks, backends = destination.locks, destination.backends
    ahead, transform = config.device_prefetch, config.device_transform
    if config.has_steps:
        return DevicesStage(backends, locks, ahead, transform), locks
    (backend,) = backends
    assert backend is not None  # the only device
    return DeviceStage(backend, locks, ahead, transform), locks


class EngineIterator(CountingIterator):
    """Delivers the batches of an engine. A subclass chooses the pool.

    One thread at a time uses it. Its workers end when it is closed or garbage.
    """

    _pool: Pool
    _engine: Engine

    def __init__(
        self, loader: Any, config: LoaderConfig, plan: EpochPlan, parts: LoaderParts
    ) -> None:
        """Start the workers and fill the window.

        Args:
            loader: The loader, for torch's base class and the number of workers with "auto".
            config: The loader's arguments.
            plan: The plan of the loader's epochs, which has begun one.
            parts: The objects that all iterators of the loader share.
        """
        begin_ns = time.monotonic_ns()
        resumed = parts.take_resumed()
        self._config, self._plan, self._parts = config, plan, parts
        begin_by_torch(self, loader, plan)
        self._base_seed = seed_of_workers(config, plan, self._base_seed)
        self._progress = plan.progress
        self._begin_checkpoints(resumed)
        self._in_order = config.in_order
        stage, locker = self._make_stage()
        self._adapter = parts.adapter
        self._loader = weakref.ref(loader)
        try:
            self._open(locker)
            config = self._config
            self._begin_record(config.num_workers, begin_ns)
            # The finalizer ends the workers when the iterator is garbage, but not at the
            # interpreter's exit. It must not hold the sampler, which may hold the loader and this
            # iterator. An engine without its own thread holds the sampler, so there the finalizer
            # closes the pool instead.
            self._source: EngineBase | StagedEngine = self._engine
            self._staged: StagedEngine | None = None
            is_optional = stage is None and self._needs_thread
            if is_optional:
                stage = PassThroughStage()
            if stage is None:
                self._finalize_by(self._ender())
            else:
                self._pool.enable_wake()
                self._staged = StagedEngine(self._engine, stage, config.window, config.timeout_s)
                self._source = self._staged
                self._finalize_by(self._staged.owner.end)
            self._has_optional_thread = is_optional and self._adapter is None
            # The engine does not move again before this many batches of the epoch.
            self._stays_until = 0
            self._is_exhausted = self._is_replaced = False
            super()._reset(loader.as_torch_sees_it, first_iter=True)  # a second time, as torch does
            self._begin_draws()
            self._source.start(self._sampler_iter)
            self._record.begin(self._source.draw_ns)
        except BaseException:
            if hasattr(self, "_finalizer"):
                self.close()
            if hasattr(self, "_pool"):
                self._pool.close()  # after a Ctrl-C no other code closes the workers
            raise

    def _begin_checkpoints(self, resumed: DatasetCheckpoints | None) -> None:
        """Begin to track the workers' datasets, if states of the loader contain theirs.

        Args:
            resumed: The checkpoints from which they resume; None for their beginnings.
        """
        self._checkpoints: DatasetCheckpoints | None = None
        config = self._config
        if config.saves_dataset:
            begun = resumed or DatasetCheckpoints.at_beginning(
                config.num_workers, int(self._base_seed)
            )
            if begun.base_seed is not None:
                self._base_seed = begun.base_seed
            self._checkpoints = self._parts.checkpoints = begun

    def _make_stage(self) -> tuple[Stage | None, PageLocker | None]:
        """Return the stage that pins batches or copies them to a device, on its own thread.

        Also decides what :meth:`_next_data` does to each batch on the consumer's thread.
        """
        config = self._config
        if config.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        stage, locker = _device_stage(config, self._parts.open_destination(config))
        # Without a device, or with "cpu", the device_transform runs on this thread.
        self._transform = transform_here(config) if stage is None else no_transform
        if stage is None and self._pin_memory:
            kind = self._pin_memory_device
            stage = PinStage(kind, current_index(kind or "cuda"))  # as torch 2.6 has it: CUDA
        return stage, locker

    @abc.abstractmethod
    def _open(self, locker: PageLocker | None) -> None:
        """Start the workers, ``_pool``, and make their ``_engine``."""

    def _finalize_by(self, end: Callable[[], object]) -> None:
        """Set what is called when the iterator is garbage, in place of an earlier function."""
        before = getattr(self, "_finalizer", None)
        self._finalizer = weakref.finalize(self, end)
        self._finalizer.atexit = False
        if before is not None:
            before.detach()

    @property
    def _needs_thread(self) -> bool:
        """Whether a thread has to serve the workers while the user's thread does other things."""
        engine = self._engine
        return engine.needs_thread or (engine.is_dynamic and self._adapter is not None)

    def _ender(self) -> Callable[[], object]:
        """Return the function that ends the workers; it must not refer to the sampler."""
        return self._pool.close

    def _begin_draws(self) -> None:
        """Begin to draw the epoch's index batches."""
        as_arrays = self._config.fetch.takes_arrays
        self._sampler_iter = self._plan.draw(self._sampler_iter, as_arrays=as_arrays)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin a further epoch with the same workers (``persistent_workers=True``).

        torch's ``__iter__`` calls this, and so may that of a subclass.
        """
        stand_in = getattr(self, "_stand_in", loader)
        if stand_in is loader:
            loader.begin_epoch(functools.partial(self._go_on, loader, first_iter), draws_seed=False)
        else:
            stand_in.begin(loader, self)

    def _go_on(self, loader: Any, first_iter: bool) -> Self:
        config, worker_count = self._config, loader.num_workers
        self._begin_record(worker_count, time.monotonic_ns())
        if self._adapter is not None and isinstance(self._source, StagedEngine):
            self._source.set_window(config.window_of(worker_count))
        self._order = self._plan.newest
        super()._reset(loader.as_torch_sees_it, first_iter)
        self._begin_draws()
        self._progress = self._plan.progress
        self._is_exhausted = self._is_replaced = False
        self._stays_until = 0
        self._source.restart(self._sampler_iter)
        if self._engine.beginnings is not None:
            self._checkpoints = self._parts.checkpoints = self._engine.beginnings
        self._record.begin(self._source.draw_ns)
        return self

    def _begin_record(self, worker_count: int, begin_ns: int) -> None:
        self._record = self._make_record(worker_count, begin_ns)
        self._parts.statistics.begin(self._record, self)
        if self._adapter is not None:
            self._begin_adapting(self._adapter)

    def _make_record(self, worker_count: int, begin_ns: int) -> Record:
        return Record(
            self._plan.epoch,
            self._config.kind,
            worker_count,
            keeps_workers=self._persistent_workers,
            in_order=self._in_order,
            counts=self._engine.counts,
            readings=self._pool.readings,
            failed=self._parts.failures,
            begin_ns=begin_ns,
        )

    def _next_data(self) -> Any:
        if self._is_replaced:
            raise RuntimeError(REPLACED)
        if not self._is_exhausted:
            try:
                if self._has_optional_thread:
                    self._place_engine()
                batch = self._source.next_batch()
            except StopIteration:
                self._note_end()
            else:
                return batch if self._transform is no_transform else self._transformed(batch)
            if not self._persistent_workers:
                self.close()  # outside the except block, so that an interrupt has no context
        raise StopIteration

    def _place_engine(self) -> None:
        """Run the engine on a thread of its own while that is needed, and otherwise on this one.

        If tickets never wait for a worker, the thread would have nothing to do between two calls,
        and each batch would cost the switches to it and back. Without the thread, a seeded loader
        of single ints with two workers takes 0.45 (0.33 to 0.46) of the time, and 0.34 (0.25 to
        0.42) of this process's CPU (five rounds in turns, two idle cores of an AMD EPYC,
        2026-11-25).
        """
        staged, is_needed = self._staged, self._engine.needs_thread
        assert staged is not None
        if staged.is_leaving:
            self._move_engine(staged, to_thread=False)
        elif is_needed is (self._source is not staged) and self._num_yielded >= self._stays_until:
            self._move_engine(staged, to_thread=is_needed)

    def _move_engine(self, staged: StagedEngine, *, to_thread: bool) -> None:
        """Move the engine to its thread, or to this one, if that is possible now."""
        engine = self._engine
        if engine.is_closed or self._pool.is_inherited:
            return
        staged.raised_id = 0
        try:
            if not to_thread and staged.leave_to_user():
                self._finalize_by(self._ender())
                self._source = engine
            elif to_thread and (count := engine.ticket_count):
                self._stays_until = self._num_yielded + _BATCHES_BETWEEN_MOVES
                if staged.take_over(self._sampler_iter, count):
                    self._finalize_by(staged.owner.end)
                    self._source = staged
        except BaseException as error:
            if engine.is_closed_elsewhere(error):
                raise ClosedLoaderError(CLOSED_MEANWHILE) from error
            if staged.raised_id != id(error):
                uninterruptible(functools.partial(staged.give_up, error))
                staged.in_transit = True  # so that the caller ends the record
            raise

    def replace(self) -> None:
        """Deliver no further batch of this epoch, since the loader continues from a state."""
        self._is_replaced = not self._is_exhausted

    def _transformed(self, batch: Any) -> Any:
        try:
            return self._transform(batch)
        except Exception as error:
            if not is_interruption(error):
                self._source.raised_id = id(error)  # the user's own error, in place of the batch
            raise

    def _note_end(self) -> None:
        source = self._source
        source.in_transit = True  # an interrupt here would leave ends of streams uncounted
        if self._checkpoints is not None:
            self._checkpoints.note(self._engine.take_notes())
        self._is_exhausted = self._progress.is_ended = True
        source.in_transit = False
        self._plan.commit()  # the loader's batch sampler shows what the next epoch begins with

    def _note_done(self, *, has_failed: bool = False) -> None:  # noqa: ARG002 - the workers note it
        delivery = self._source.delivery
        if delivery is not None:
            seq, left_out, notes, _ = delivery
            if self._checkpoints is not None:
                self._checkpoints.note(notes)
            if self._in_order:
                self._progress.done_until(seq)
            else:
                for each in (*left_out, seq):
                    self._progress.done(each)

    def _mark(self) -> tuple[int, Any]:
        checkpoints = self._checkpoints
        return self._progress.mark(), None if checkpoints is None else checkpoints.mark()

    def _note_times(self, batch: Any, began_ns: int) -> None:  # noqa: ARG002 - the delivery has it
        ended_ns = time.monotonic_ns()
        source = self._source
        delivery = source.delivery
        if delivery is not None and delivery.times is not None:
            self._record.add(began_ns, ended_ns, source.draw_ns, delivery.times, source.staged, 0)
            for note in delivery.notes:
                if type(note.snapshot) is bytes:
                    batch_ns = sum(delivery.times.work[1:4]) - note.state_ns
                    cost = self._parts.state_cost
                    cost.note(len(note.snapshot), note.state_ns, batch_ns, stacklevel=3)
            if self._adapter is not None:
                busy_ns = sum(delivery.times.work[1:4])
                self._adapt(self._adapter, ended_ns, ended_ns - began_ns, busy_ns)
        else:
            self._record.add(began_ns, ended_ns, 0, None, "other", 0)

    def _begin_adapting(self, adapter: Adapter) -> None:
        """Begin an epoch with ``num_workers="auto"``."""

    def _adapt(self, adapter: Adapter, now_ns: int, wait_ns: int, busy_ns: int) -> None:
        """Set the number of workers, and show it on the loader (``num_workers="auto"``).

        The arguments are those of :meth:`Adapter.note`, for one batch.
        """

    def _loses(self, error: BaseException) -> bool:
        return self._source.loses(error)

    def _note_raised(self, error: BaseException, began_ns: int) -> None:
        record, source = self._record, self._source
        place = "end" if isinstance(error, StopIteration) else "other"
        record.add(began_ns, time.monotonic_ns(), 0, None, place, 0)
        if isinstance(error, StopIteration):
            record.end()
        elif source.raised_id == id(error) and source.delivery is not None:
            record.failures += 1
            self._note_done(has_failed=True)
        if source.raised_id == id(error):
            error.with_traceback(user_part(error.__traceback__))

    def _give_up(self, error: BaseException, mark: tuple[int, Any]) -> None:
        self._progress.go_back(mark[0])
        if self._checkpoints is not None:
            self._checkpoints.go_back(mark[1])
        self._source.give_up(error)
        self._end_record()

    def close(self) -> None:
        """End the workers and free the memory. May be called again."""
        try:
            self._source.close()
        finally:
            self._end_record()

    def _end_record(self) -> None:
        self._finalizer.detach()
        if hasattr(self, "_record"):
            self._record.end()

    @property
    def is_closed(self) -> bool:
        """Whether ``close``, the epoch's end, a worker's death or too many failures closed it."""
        return self._engine.is_closed

    def _shutdown_workers(self) -> None:
        """Close the iterator, under torch's name for :meth:`close`."""
        self.close()
