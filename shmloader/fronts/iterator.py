"""Iterators whose batches come out of an engine: with worker processes, and what these share.

They derive from torch's, which reads the loader, warns, draws the base seed and counts what was
yielded; so the main process's random streams are used as torch uses them.
"""

import abc
import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
)

from shmloader.engine.adapting import Adapter
from shmloader.engine.arena import Arena, PageLocker
from shmloader.engine.base import EngineBase
from shmloader.engine.engine import Engine
from shmloader.engine.stream_states import StreamStates
from shmloader.faults import FAULTS
from shmloader.fronts.recipe import (
    draw_batches,
    next_batch,
    no_transform,
    plan_and_watch,
    seed_of_workers,
    take_resumed,
    transform_here,
    warn_of_many_objects,
)
from shmloader.memory.limits import control_groups, free_memory
from shmloader.memory.room import Demand
from shmloader.memory.slot import uncapped_slot_bytes
from shmloader.options import Options, lend_limit, slot_share
from shmloader.sampling.plan import StepPlan
from shmloader.sampling.rollover import RolloverBatchSampler
from shmloader.stages.device import DeviceStage
from shmloader.stages.devices import DevicesStage
from shmloader.stages.pin import PinStage
from shmloader.stages.plain import PlainStage
from shmloader.stages.target import open_backend, parse_device
from shmloader.stages.thread import Stage, StageThread
from shmloader.stats.record import Record
from shmloader.workers.finishing import finish
from shmloader.workers.processes import ProcessPool


def _count_batches(index_sampler: Any) -> int | None:
    """Batches of an epoch, if the samplers are torch's own.

    The length of a user's sampler may take long, or draw random numbers, and is the user's to ask.
    """
    sampler = index_sampler
    if isinstance(sampler, StepPlan):
        return len(sampler) if sampler.has_own_order else None
    if type(sampler) in {BatchSampler, RolloverBatchSampler}:
        sampler = sampler.sampler
    if type(sampler) in {SequentialSampler, RandomSampler}:
        with contextlib.suppress(Exception):  # a dataset without a length
            return len(index_sampler)
    return None


def _end(pool: ProcessPool, arena: Arena) -> None:
    """What is left to do of an iterator that is garbage."""
    try:
        pool.close()
    finally:
        finish(arena.close)


def _device_stage(device: object, options: Options) -> tuple[Stage | None, PageLocker | None]:
    """What copies batches to a device, or to several, and what locks their slots for it."""
    wanted = [device] if options.devices is None else options.devices
    parsed = [parse_device(one) for one in wanted]
    backends = [None if one is None else open_backend(one) for one in parsed]
    # Memory that is locked for one device is so for all.
    locker = next((backend for backend in backends if backend is not None), None)
    if locker is None:
        return None, None
    ahead, transform = options.device_prefetch, options.transform
    if options.devices is None:
        return DeviceStage(locker, ahead, transform), locker
    return DevicesStage(backends, ahead, transform), locker


class EngineIterator(_BaseDataLoaderIter):
    """Batches out of an engine; a subclass says what its workers are.

    Used from one thread at a time. Dropped or garbage, it ends its workers.
    """

    _pool: Any
    _engine: EngineBase

    def __init__(self, loader: Any, options: Options) -> None:
        """Start the workers and fill the window."""
        begin_ns = time.monotonic_ns()
        resumed = take_resumed(loader)
        super().__init__(loader)
        self._base_seed = seed_of_workers(loader, self._base_seed)
        self._progress = loader._progress
        self._streams: StreamStates | None = None
        if self._dataset_kind == _DatasetKind.Iterable:
            begun = resumed or StreamStates.at_beginning(loader.num_workers)
            self._streams = loader._streams = begun.copy()
        self._in_order: bool = loader.in_order
        if loader.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        stage, locker = _device_stage(loader.device, options)
        # Without a device (or "cpu") it runs here.
        self._transform = transform_here(options) if stage is None else no_transform
        if stage is None and self._pin_memory:
            index = torch.accelerator.current_device_index()
            stage = PinStage(self._pin_memory_device, index)
        self._adapter: Adapter | None = loader._adapter
        self._loader = weakref.ref(loader)
        window = options.window or loader.num_workers * loader.prefetch_factor
        try:
            self._open(loader, options, window, locker)
            self._begin_record(loader, begin_ns)
            # Ends the workers when the iterator is garbage. At the interpreter's exit others do.
            # It must not hold the sampler, which may hold the loader and us; an engine does,
            # unless it has a thread of its own.
            self._source: EngineBase | StageThread = self._engine
            if stage is None and self._engine.any_worker:
                stage = PlainStage()
            if stage is None:
                end = self._make_end()
            else:
                self._pool.enable_wake()
                self._source = StageThread(self._engine, stage, window, loader.timeout)
                end = self._source.running.end
            self._finalizer = weakref.finalize(self, end)
            self._finalizer.atexit = False
            self._next_batch: Callable[[], Any] = self._source.next_batch
            self._is_exhausted = False
            # As torch does: the sampler is iterated a second time.
            super()._reset(loader)
            self._begin_draws(loader)
            self._source.start(self._sampler_iter)
            self._record.begun()
        except BaseException:
            if hasattr(self, "_finalizer"):
                self.close()
            if hasattr(self, "_pool"):
                self._pool.close()  # a Ctrl-C may come before anybody else knows of the workers
            raise

    @abc.abstractmethod
    def _open(self, loader: Any, options: Options, window: int, locker: PageLocker | None) -> None:
        """Start the workers, ``_pool``, and make their ``_engine``."""

    def _begin_draws(self, loader: Any) -> None:
        """Begin to draw the epoch's index batches."""
        self._sampler_iter = loader._begin_draws(draw_batches(self, loader))

    @abc.abstractmethod
    def _make_end(self) -> Callable[[], None]:
        """What is left to do when this is garbage; holds neither this nor the engine."""

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin a further epoch with the same workers (``persistent_workers=True``)."""
        self._begin_record(loader, time.monotonic_ns())
        is_free = loader._window_wanted() is None
        if self._adapter is not None and is_free and isinstance(self._source, StageThread):
            self._source.set_window(loader.num_workers * loader.prefetch_factor)
        super()._reset(loader, first_iter)
        self._begin_draws(loader)
        self._progress = loader._progress
        self._is_exhausted = False
        self._source.restart(self._sampler_iter)
        begun = self._engine.stream_beginnings
        if begun is not None:
            self._streams = loader._streams = begun.copy()
        self._record.begun()

    def _begin_record(self, loader: Any, begin_ns: int) -> None:
        self._record = Record(
            loader._epoch,
            "threads" if loader.thread_pool else "processes",
            loader.num_workers,
            keeps_workers=self._persistent_workers,
            in_order=self._in_order,
            counts=self._engine.counts,
            readings=self._pool.readings,
            failed=loader.failures,
            begin_ns=begin_ns,
        )
        loader._statistics.begin(self._record, self)
        if self._adapter is not None:
            self._adapter.begin()

    def _next_data(self) -> Any:
        if not self._is_exhausted:
            try:
                batch = self._transform(self._next_batch())
            except StopIteration:
                self._is_exhausted = self._progress.is_ended = True
                if self._streams is not None:
                    self._streams.note(self._engine.take_stream_ends())
            except Exception:
                self._note_done()
                raise
            else:
                self._note_done()
                return batch
            if not self._persistent_workers:
                self.close()  # what interrupts it has no other exception behind it
        raise StopIteration

    def _note_done(self) -> None:
        """What was handed over, a batch or an exception in its place, is done."""
        receipt = self._source.receipt
        if receipt is not None:
            seq, left_out, streams, _ = receipt
            if self._streams is not None:
                self._streams.note(streams)
            if self._in_order:
                self._progress.done_until(seq)
            else:
                for each in (*left_out, seq):
                    self._progress.done(each)

    def __next__(self) -> Any:
        """The next batch."""
        began_ns = time.monotonic_ns()
        mark = self._progress.mark()
        streams = self._streams
        streams_mark = None if streams is None else streams.mark()
        try:
            batch = next_batch(self, super().__next__)
            if FAULTS is not None:
                FAULTS.reach("main.return")
            self._note_times(began_ns)
            return batch
        except Exception as error:
            self._note_no_batch(began_ns, is_end=isinstance(error, StopIteration))
            raise
        except BaseException:
            if self._source.has_delivered:
                self.close()  # a Ctrl-C: to go on would be to leave out a batch
                self._progress.go_back(mark)
                if streams is not None and streams_mark is not None:
                    streams.go_back(streams_mark)
            raise

    def _note_times(self, began_ns: int) -> None:
        """Where the time of the batch went that ``next()`` gives."""
        ended_ns = time.monotonic_ns()
        source = self._source
        receipt = source.receipt
        if receipt is not None and receipt.times is not None:
            self._record.handed(receipt.times, began_ns, ended_ns, source.staged)
            if self._adapter is not None:
                busy_ns = sum(receipt.times.work[1:4])
                self._adapt(self._adapter.note(ended_ns, ended_ns - began_ns, busy_ns))
        else:
            self._record.waited(began_ns, ended_ns)

    def _adapt(self, wanted: int) -> None:
        """Have so many workers, and say how many there are (``num_workers="auto"``)."""

    def _note_no_batch(self, began_ns: int, *, is_end: bool) -> None:
        record = self._record
        record.waited(began_ns, time.monotonic_ns())
        if is_end:
            record.end()
        elif self._source.receipt is not None:
            record.failures += 1

    def close(self) -> None:
        """End the workers and free the memory; may be called again."""
        try:
            self._source.close()
        finally:
            self._finalizer.detach()
            if hasattr(self, "_record"):
                self._record.end()

    @property
    def is_closed(self) -> bool:
        """Whether its workers were ended: by ``close``, the end, a death, many failures."""
        return self._engine.is_closed

    def _shutdown_workers(self) -> None:
        """torch's name for :meth:`close`."""
        self.close()


class WorkerIterator(EngineIterator):
    """Batches out of worker processes, through shared memory.

    Ended, it frees its memory, but for what lies under batches that the user holds.
    """

    _pool: ProcessPool
    _engine: Engine

    def _open(self, loader: Any, options: Options, window: int, locker: PageLocker | None) -> None:
        lent = lend_limit(has_device=locker is not None, device_prefetch=options.device_prefetch)
        if options.shm_bytes is None:
            slot_bytes = uncapped_slot_bytes()
        else:
            slot_bytes = slot_share(options.shm_bytes, window + lent)
        root = Path(options.root)
        demand = Demand(
            loader.num_workers,
            loader.prefetch_factor,
            lent,
            _count_batches(self._index_sampler),
            free_memory(root, control_groups(root)),
            options.root,
            options.window,
        )
        plan, watch = plan_and_watch(self, loader)
        warn_of_many_objects(loader)
        present = most = loader.num_workers
        if self._adapter is not None:
            most = max(present, self._adapter.most)
            if options.window is None:
                window = most * loader.prefetch_factor
        self._wanted = present
        self._pool = ProcessPool(
            loader.multiprocessing_context,
            most,
            (loader.dataset, loader.collate_fn, loader.worker_init_fn, loader.on_error),
            plan,
            int(self._base_seed),
            demand,
            may_replace=options.worker_restarts > 0 or self._adapter is not None,
            started=present,
        )
        self._engine = Engine(
            self._pool,
            worker_count=most,
            window=window,
            lend_limit=lent,
            slot_bytes=slot_bytes,
            in_order=loader.in_order,
            timeout_s=loader.timeout,
            worker_restarts=options.worker_restarts,
            streams=None if self._streams is None else self._streams.copy(),
            any_worker=loader._any_worker_will_do,
            is_seeded=loader._sample_seed is not None,
            locker=locker,
            demand=demand,
            watch=watch,
            present=present,
        )
        if options.shm_bytes is not None:
            self._engine.counts.share_bytes = slot_bytes
        self._engine.resume()

    def _make_end(self) -> Callable[[], None]:
        return functools.partial(_end, self._pool, self._engine.arena)

    def _adapt(self, wanted: int) -> None:
        if wanted != self._wanted:
            self._wanted = wanted
            self._engine.want_workers(wanted)
        loader, present = self._loader(), self._engine.present_workers
        if loader is not None and loader.num_workers != present:
            loader.num_workers = self._record.worker_count = present

    @property
    def _workers(self) -> list[Any]:
        """The worker processes; read by tools that know torch's iterator."""
        return self._pool.processes
