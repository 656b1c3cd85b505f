"""The iterator of a loader without workers."""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from shmloader.batch.arrays import LocalArrays, no_gatherer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import describe_indices
from shmloader.batch.fetchers import EmptyBatchError, map_style_stop
from shmloader.batch.maker import BatchMaker
from shmloader.batch.timer import Timer, bytes_of
from shmloader.engine.delivery import Instead
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.insight.record import Record
from shmloader.interruptions import describe_interruption, is_interruption
from shmloader.loader.calls import (
    REPLACED,
    CountingIterator,
    begin_by_torch,
    cpu_transform,
    no_transform,
)
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.loader.local_dataset import LocalDataset
from shmloader.sampling.plan import EpochPlan


class InProcessIterator(CountingIterator, _SingleProcessDataLoaderIter):
    """Makes batches on the consumer's thread, when they are asked for.

    ``seed=`` sets the process's random number generators for each sample. Their earlier states are
    restored after each batch.
    """

    # As slots, they are not among the attributes of torch's iterator: with too many of these, each
    # iterator's dict would have keys of its own, and take four times the memory.
    __slots__ = (
        "_checkpoints",
        "_closed_because",
        "_dataset_state",
        "_draw_ns",
        "_end",
        "_is_closed",
        "_is_drawing",
        "_is_exhausted",
        "_is_loading",
        "_is_made",
        "_is_stream",
        "_maker",
        "_plan",
        "_progress",
        "_record",
        "_seq",
        "_step",
        "_timer",
        "_transform",
        "_watch",
    )

    def __init__(
        self, loader: Any, config: LoaderConfig, plan: EpochPlan, parts: LoaderParts
    ) -> None:
        """Begin an epoch.

        Args:
            loader: The loader, for torch's base class.
            config: The loader's arguments.
            plan: The plan of the loader's epochs, which has begun one.
            parts: The objects that all iterators of the loader share.
        """
        begin_ns = time.monotonic_ns()
        self._checkpoints = parts.checkpoints = None
        is_tracked = config.fetch.is_iterable or config.saves_dataset
        self._dataset_state = LocalDataset(config, parts) if is_tracked else None
        begin_by_torch(self, loader, plan)
        if self._timeout != 0:
            raise AssertionError(
                "_SingleProcessDataLoaderIter requires timeout == 0: with num_workers=0, batches "
                "are loaded in this process, which cannot stop waiting for itself"
            )
        self._is_closed = self._is_exhausted = False
        self._closed_because = ""
        # Whether the next index batch is being drawn, and whether it was drawn but is not delivered
        # yet. An exception from outside would lose it.
        self._is_drawing = self._is_loading = False
        self._draw_ns = 0
        self._plan, self._progress = plan, plan.progress
        # The number of the newest index batch among those that this iterator has drawn.
        self._seq = -1
        self._is_stream = config.fetch.is_iterable
        self._watch = None if config.on_error == "raise" else config.watch_failures(parts)
        self._step = "build"
        self._transform: Callable[[Any], Any] = no_transform
        if self._pin_memory or config.devices != (None,) or config.device_transform is not None:
            self._step, self._transform = self._find_transform(config)
        self._timer = Timer()
        self._end: Callable[[], object] = _do_nothing
        fetcher = config.fetch.make_concurrent_fetcher()
        if fetcher is not None:
            finalizer = self._end = weakref.finalize(self, fetcher.close)
            finalizer.atexit = False
        make_maker = functools.partial(_make_maker, config, plan.epoch, self._timer, fetcher)
        if self._dataset_state is None:
            self._maker = make_maker()
        else:
            self._maker = self._dataset_state.begin(make_maker, is_elsewhere=plan.is_elsewhere)
            self._checkpoints = parts.checkpoints = self._dataset_state.checkpoint
        self._dataset_fetcher = self._maker.fetcher  # torch's name for it
        self._record = Record(plan.epoch, "in-process", 0, begin_ns=begin_ns)
        parts.statistics.begin(self._record, self)
        self._sampler_iter = plan.draw(self._sampler_iter, as_arrays=config.fetch.takes_arrays)
        self._record.begin()

    def _find_transform(self, config: LoaderConfig) -> tuple[str, Callable[[Any], Any]]:
        """Return what pins, moves and transforms a batch, and the stage whose time that is."""
        # No transform may refer to the iterator: in a reference cycle, only the garbage collector
        # could free the iterator.
        transform = cpu_transform(config)
        if config.has_device or config.has_steps:
            return "device", _after(functools.partial(_move, config), transform)
        if self._pin_memory:
            from shmloader.device.pin import pin_batch  # noqa: PLC0415 - few loaders pin

            pin = functools.partial(pin_batch, device=self._pin_memory_device)
            return "pin", _after(pin, transform)
        return "build", transform

    # One batch -------------------------------------------------------------------------------

    def _next_data(self) -> Any:
        self._is_drawing = self._is_loading = False
        self._draw_ns = 0
        while not self._is_exhausted:
            self._check_open()
            self._is_drawing = True
            began_ns = time.monotonic_ns()
            try:
                indices = next(self._sampler_iter)
                drawn_ns = time.monotonic_ns()
                self._draw_ns += drawn_ns - began_ns
                self._timer.begin(drawn_ns)
                self._seq += 1
                self._is_loading, self._is_drawing = True, False
                batch = self._make(indices)
                if batch is EmptyBatchError:
                    self._is_loading = False
                    continue
                if FAULTS is not None:
                    FAULTS.reach("main.deliver")
                return batch if self._transform is no_transform else self._transform(batch)
            except StopIteration as error:
                if self._is_drawing or self._is_stream:
                    break
                raise Instead(map_style_stop(error)) from None
            except Instead:
                raise
            except Exception as error:
                if is_interruption(error):
                    raise
                state = self._dataset_state
                if self._is_loading and state is not None and state.is_replaying:
                    self._close_since("its dataset could not be resumed")
                elif self._is_loading and self._watch is not None and not self._is_made:
                    self._count_failures()
                raise Instead(error) from None
        if not self._is_exhausted:
            self._end_epoch()
        raise Instead(StopIteration())

    def _make(self, indices: object) -> Any:
        """Return the batch of these indices, or EmptyBatchError if it is left out."""
        self._is_made = False
        batch: Any = EmptyBatchError
        with contextlib.suppress(EmptyBatchError):
            batch = (self._dataset_state or self._maker).make(indices)
        self._is_made = True
        if self._watch is not None:
            self._count_failures(indices if batch is EmptyBatchError else None)
        return batch

    def replace(self) -> None:
        """Deliver no further batch of this epoch, since the loader continues from a state."""
        if not self._is_closed:
            self._close_since(REPLACED)

    def _count_failures(self, left_out: object = None) -> None:
        """Note the samples of a batch that failed.

        Args:
            left_out: The indices of the batch, if all its samples failed.

        Raises:
            Instead: With a TooManyFailures if too many have failed.
        """
        report, watch, error = self._maker.take_report(), self._watch, None
        assert watch is not None
        if report is not None:
            self._record.failures += report.failed_count
            error = watch.note(report, f"batch {self._seq}")
        if error is None and left_out is not None:
            error = watch.left_out(f"batch {self._seq} ({describe_indices(left_out)})")
        if error is not None:
            self._close_since(error)
            raise Instead(error)

    def _end_epoch(self) -> None:
        """Note that the epoch has ended.

        Raises:
            Instead: With a TooManyFailures if too many samples of the epoch failed.
        """
        self._check_open()  # if it was closed meanwhile, the epoch has not ended
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._close_since(error)
            raise Instead(error)
        self._is_exhausted = self._progress.is_ended = True
        self._is_drawing = self._is_loading = False
        self._plan.commit()  # the loader's batch sampler shows what the next epoch begins with
        self.close()

    def _count(self, batch: Any, began_ns: int) -> None:
        work, nbytes = self._timer.read(), bytes_of(batch)
        ended_ns = time.monotonic_ns()
        self._record.add(began_ns, ended_ns, self._draw_ns, work, self._step, nbytes)
        self._count_done()

    def _count_error(self, error: BaseException, began_ns: int) -> None:
        is_end = isinstance(error, StopIteration)
        place = "end" if is_end else "other"
        self._record.add(began_ns, time.monotonic_ns(), 0, None, place, 0)
        if self._is_loading and not (is_end or self._is_closed):
            self._record.failures += 1
            self._count_done(has_failed=True)

    def _count_done(self, *, has_failed: bool = False) -> None:
        self._progress.done_until(self._seq)
        if self._dataset_state is not None:
            self._dataset_state.add_batch(has_failed=has_failed)

    # Ends ------------------------------------------------------------------------------------

    @property
    def _was_closed_by_user(self) -> bool:
        return self._is_closed and not (self._closed_because or self._is_exhausted)

    def _give_up(self, error: BaseException) -> None:
        if not self._is_closed:
            self._closed_because = describe_interruption(error, in_sampler=self._is_drawing)
        self.close()

    def _close_since(self, why: object) -> None:
        """Close the iterator for a reason that later calls report."""
        self._closed_because = f" since: {why}"
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            because = self._closed_because
            text = f"the iterator is closed{because}" if because else ITERATOR_CLOSED
            raise Instead(ClosedLoaderError(text))

    def close(self) -> None:
        """Give up the epoch. May be called again, and from any thread."""
        self._is_closed = True
        self._end()
        self._record.end()

    @property
    def is_closed(self) -> bool:
        """Whether ``close``, the epoch's end or too many failures closed it."""
        return self._is_closed

    def _shutdown_workers(self) -> None:
        """Close the iterator, under torch's name for :meth:`close`."""
        self.close()


def _make_maker(
    config: LoaderConfig, epoch: int | None, timer: Timer, fetcher: ConcurrentFetcher | None
) -> BatchMaker:
    takes_arrays = config.fetch.takes_arrays
    return BatchMaker(
        config.fetch,
        config.dataset,
        config.collate_fn,
        config.on_error,
        where="in the main process",
        timer=timer,
        epoch=epoch,
        restores_rngs=True,
        find_gatherer=LocalArrays(config.dataset).find_gatherer if takes_arrays else no_gatherer,
        concurrent_fetcher=fetcher,
    )


def _after(step: Callable[[Any], Any], transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that pins or moves a batch, and then transforms it."""

    def both(batch: Any) -> Any:
        try:
            batch = step(batch)
        except StopIteration as error:  # of an object's own to() or pin_memory()
            raise RuntimeError("to() or pin_memory() of a batch raised StopIteration") from error
        return batch if transform is no_transform else transform(batch)

    return both


def _move(config: LoaderConfig, batch: Any) -> Any:
    """Move a batch to the device, or each batch of a step to its own device."""
    if config.has_steps:
        return [_to_device(*part) for part in zip(batch, config.devices, strict=False)]
    return _to_device(batch, config.devices[0])


def _to_device(batch: Any, device: torch.device | None) -> Any:
    if device is None:
        return batch
    from shmloader.device.structure import map_tensors  # noqa: PLC0415 - few loaders have a device

    return map_tensors(lambda tensor: tensor.to(device), batch)


def _do_nothing() -> None:
    """Do nothing; used as a close function where there is nothing to close."""
