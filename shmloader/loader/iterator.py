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
from shmloader.device.stage import Stage
from shmloader.device.staged_engine import StagedEngine
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.delivery import Delivery, Instead, unwrapped
from shmloader.engine.engine import Engine
from shmloader.insight.record import Record
from shmloader.interruptions import is_interruption
from shmloader.loader.calls import (
    REPLACED,
    CountingIterator,
    begin_by_torch,
    cpu_transform,
    no_transform,
    seed_of_workers,
)
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.pools import Pool
from shmloader.pools.adapting import Adapter
from shmloader.pools.slot_memory import PageLocker
from shmloader.sampling.plan import EpochPlan
from shmloader.threads.uninterruptible import uninterruptible


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
    _checkpoints: DatasetCheckpoints | None

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
        resumed = parts.pop_resumed()
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
            unwrapped(self._begin, loader, begin_ns, stage, locker)
        except BaseException:
            self._close_all()
            raise

    def _begin(
        self, loader: Any, begin_ns: int, stage: Stage | None, locker: PageLocker | None
    ) -> None:
        """Start the workers and draw the first tickets."""
        self._open(locker)
        config = self._config
        self._begin_record(config.num_workers, begin_ns)
        # The finalizer ends the workers when the iterator is garbage, but not at the interpreter's
        # exit. It must not hold the sampler, which may hold the loader and this iterator. An engine
        # without its own thread holds the sampler, so there the finalizer closes the pool instead.
        self._source: Engine | StagedEngine = self._engine
        end = self._ender()
        if stage is not None:
            self._pool.enable_wake()
            self._source = StagedEngine(self._engine, stage, config.window, config.timeout_s)
            end = self._source.owner.end
        self._finalizer = weakref.finalize(self, end)
        self._finalizer.atexit = False
        self._is_exhausted = self._is_replaced = False
        super()._reset(loader.as_torch_sees_it, first_iter=True)  # a second time, as torch does
        self._begin_draws()
        self._source.start(self._sampler_iter)
        self._record.begin(self._source.draw_ns)

    def _close_all(self) -> None:
        """Close what the constructor has opened."""
        if hasattr(self, "_finalizer"):
            self.close()
        if hasattr(self, "_pool"):
            self._pool.close()  # after a Ctrl-C no other code closes the workers

    def _begin_checkpoints(self, resumed: DatasetCheckpoints | None) -> None:
        """Begin to track the workers' datasets, if states of the loader contain theirs.

        Args:
            resumed: The checkpoints from which they resume; None for their beginnings.
        """
        self._checkpoints = None
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
        self._transform = cpu_transform(config) if stage is None else no_transform
        if stage is None and self._pin_memory:
            kind = self._pin_memory_device
            stage = PinStage(kind, current_index(kind or "cuda"))  # as torch 2.6 has it: CUDA
        return stage, locker

    @abc.abstractmethod
    def _open(self, locker: PageLocker | None) -> None:
        """Start the workers, ``_pool``, and make their ``_engine``."""

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
        unwrapped(self._restart)
        if self._engine.beginnings is not None:
            self._checkpoints = self._parts.checkpoints = self._engine.beginnings
        self._record.begin(self._source.draw_ns)
        return self

    def _restart(self) -> None:
        try:
            self._source.restart(self._sampler_iter)
        except Instead:
            raise
        except BaseException as interruption:
            uninterruptible(functools.partial(self._give_up, interruption))
            raise

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
            raise Instead(RuntimeError(REPLACED))
        if self._is_exhausted:
            raise Instead(StopIteration())
        try:
            batch = self._source.next_batch()
        except Instead as instead:
            if not isinstance(instead.error, StopIteration):
                raise
        else:
            return batch if self._transform is no_transform else self._transformed(batch)
        self._end_epoch()
        raise Instead(StopIteration())

    def replace(self) -> None:
        """Deliver no further batch of this epoch, since the loader continues from a state."""
        self._is_replaced = not self._is_exhausted

    def _transformed(self, batch: Any) -> Any:
        try:
            return self._transform(batch)
        except Exception as error:
            if is_interruption(error):
                raise
            raise Instead(error) from None

    def _end_epoch(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.note(self._engine.take_notes())
        self._is_exhausted = self._progress.is_ended = True
        self._plan.commit()  # the loader's batch sampler shows what the next epoch begins with
        if not self._persistent_workers:
            self.close()

    def _count(self, batch: Any, began_ns: int) -> None:  # noqa: ARG002 - the delivery has it
        source, record = self._source, self._record
        ended_ns = time.monotonic_ns()
        delivery = source.delivery
        assert delivery is not None
        times = delivery.times
        if times is None:
            record.add(began_ns, ended_ns, 0, None, "other", 0)
        else:
            record.add(began_ns, ended_ns, source.draw_ns, times, source.staged, 0)
            if delivery.notes or self._adapter is not None:
                self._note_costs(delivery, began_ns, ended_ns)
        progress = self._progress
        if progress.is_plain and self._in_order and self._checkpoints is None:
            progress.position = progress.start + delivery.seq + 1
        else:
            self._note_done(delivery)

    def _note_costs(self, delivery: Delivery, began_ns: int, ended_ns: int) -> None:
        """Note what the states of datasets cost, and adapt the number of workers."""
        assert delivery.times is not None
        busy_ns = sum(delivery.times.work[1:4])
        for note in delivery.notes:
            if isinstance(note.snapshot, bytes | memoryview):
                cost, batch_ns = self._parts.state_cost, busy_ns - note.state_ns
                cost.add(len(note.snapshot), note.state_ns, batch_ns)
        if self._adapter is not None:
            self._adapt(self._adapter, ended_ns, ended_ns - began_ns, busy_ns)

    def _note_done(self, delivery: Delivery) -> None:
        if self._checkpoints is not None:
            self._checkpoints.note(delivery.notes)
        if self._in_order:
            self._progress.done_until(delivery.seq)
        else:
            for each in (*delivery.left_out, delivery.seq):
                self._progress.done(each)

    def _begin_adapting(self, adapter: Adapter) -> None:
        """Begin an epoch with ``num_workers="auto"``."""

    def _adapt(self, adapter: Adapter, now_ns: int, wait_ns: int, busy_ns: int) -> None:
        """Set the number of workers, and show it on the loader (``num_workers="auto"``).

        The arguments are those of :meth:`Adapter.note`, for one batch.
        """

    @property
    def _is_waiting(self) -> bool:
        return self._source.is_waiting

    @property
    def _was_closed_by_user(self) -> bool:
        is_over = self._is_exhausted or self._is_replaced
        return self._engine.was_closed_by_user and not is_over

    def _count_wait(self, began_ns: int) -> None:
        self._record.add(began_ns, time.monotonic_ns(), 0, None, "other", 0)

    def _count_error(self, error: BaseException, began_ns: int) -> None:
        record, delivery = self._record, self._source.delivery
        if isinstance(error, StopIteration):
            record.add(began_ns, time.monotonic_ns(), 0, None, "end", 0)
            record.end()
            return
        record.add(began_ns, time.monotonic_ns(), 0, None, "other", 0)
        if delivery is not None:
            record.failures += 1
            self._note_done(delivery)

    def _give_up(self, error: BaseException) -> None:
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
