"""Makes batches on the thread that asks for them, for a loader without workers.

``seed=`` sets the process's random number generators for each sample. Their earlier states are
restored after each batch.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shmloader.batch.arrays import LocalArrays, no_gatherer
from shmloader.batch.collator import Timer
from shmloader.batch.failures import describe_indices
from shmloader.batch.fetch import EmptyBatchError, map_style_stop
from shmloader.batch.maker import BatchMaker
from shmloader.engine.delivery import Delivery, Instead
from shmloader.engine.failures import FailureWatch
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.insight.record import Record
from shmloader.interruptions import describe_interruption, is_interruption
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.loader.local_dataset import LocalDataset
from shmloader.sampling.plan import EpochPlan


def do_nothing(*_: object) -> None:
    """Do nothing: where there is nothing to close, to begin or to set."""


@dataclass(slots=True)
class Opened:
    """An engine, and what its iterator does with it besides asking for batches.

    Attributes:
        engine: The engine.
        source: The engine, or a stage on another thread that is behind it.
        end: Ends all. It refers neither to the sampler nor to the iterator.
        begin_epoch: Called before the epoch's first index batch is drawn.
        set_window: Sets how many index batches are drawn when the next epoch begins.
        pool: The engine's workers; None without any.
        adapting: Adapts the number of workers, with ``num_workers="auto"``.
        is_on_device: Whether the source has called the ``device_transform``.
        keeps: Objects that the pool refers to only weakly.
    """

    engine: Any
    source: Any
    end: Callable[[], object]
    begin_epoch: Callable[[], object] = do_nothing
    set_window: Callable[[int], object] = do_nothing
    pool: Any = None
    adapting: Any = None
    is_on_device: bool = False
    keeps: object = None


class InlineEngine:
    """Makes the batches of an epoch when they are asked for.

    It has what the iterator uses of an :class:`~shmloader.engine.engine.Engine`.

    Args:
        maker: Makes a batch of a ticket's indices.
        timer: Measures the parts of the work.
        step: Pins, moves and transforms a batch; None for nothing.
        stage: The name of that step in the statistics.
        watch: Counts bad samples; None if their errors are raised.
        close: Ends the threads that load samples.
        is_stream: Whether the dataset is iterable, so that its StopIteration ends the epoch.
    """

    is_waiting = False
    beginnings = None

    def __init__(
        self,
        maker: BatchMaker | LocalDataset,
        timer: Timer,
        step: Callable[[Any], Any] | None,
        stage: str,
        watch: FailureWatch | None,
        close: Callable[[], object],
        *,
        is_stream: bool,
    ) -> None:
        self._maker, self._timer = maker, timer
        self._local = maker if isinstance(maker, LocalDataset) else None
        self._step, self.staged, self._watch = step, stage, watch
        self._end, self._is_stream = close, is_stream
        self._draw: Callable[[], Any] = iter(()).__next__
        self._seq = -1
        self.delivery: Delivery | None = None
        self.draw_ns = 0
        self.is_closed = False
        self._closed_because = ""
        self.record: Record  # of the epoch, which the iterator sets

    def start(self, tickets: Iterator[Any]) -> None:
        """Begin the epoch."""
        self._draw = tickets.__next__

    def next_batch(self) -> Any:
        """Return the next batch; see :meth:`shmloader.engine.engine.Engine.next_batch`."""
        self.delivery, self.draw_ns = None, 0
        timer = self._timer
        while True:
            self._check_open()
            timer.begin()
            drawn = False
            try:
                indices = self._draw()
                drawn = True
                began_ns = timer.began_ns
                timer.begin()
                self.draw_ns += timer.began_ns - began_ns
                self._seq += 1
                batch = self._load(indices)
                if batch is EmptyBatchError:
                    continue
                if FAULTS is not None:
                    FAULTS.reach("main.deliver")
                if self._step is not None:
                    batch = self._step(batch)
                datasets = () if self._local is None else self._local.updates
                self.delivery = Delivery(self._seq, (), datasets, timer.read())  # type: ignore[arg-type]
                return batch
            except StopIteration as error:
                if drawn and not self._is_stream:
                    self._raise(map_style_stop(error), drawn=True)
                self._end_epoch()
            except Instead:
                raise
            except Exception as error:
                if is_interruption(error):
                    raise
                self._raise(error, drawn=drawn)

    def _load(self, indices: Any) -> Any:
        """Return the batch of these indices, or EmptyBatchError if it is left out."""
        batch: Any
        try:
            batch = self._maker.make(indices)
        except EmptyBatchError:
            batch = EmptyBatchError
        except StopIteration:
            raise
        except Exception:
            if self._local is not None and self._local.is_resuming:
                self._close_since("its dataset could not be resumed")
            else:
                self._count_failures()
            raise
        self._count_failures(indices if batch is EmptyBatchError else None)
        return batch

    def _count_failures(self, left_out: object = None) -> None:
        """Count the samples of a batch that failed.

        Args:
            left_out: The indices of the batch, if all its samples failed.

        Raises:
            Instead: With a TooManyFailures if too many have failed.
        """
        watch, error = self._watch, None
        if watch is None:
            return
        report = self._maker.pop_report()
        if report is not None:
            self.record.failures += report.failed_count
            error = watch.add(report, f"batch {self._seq}")
        if error is None and left_out is not None:
            error = watch.left_out(f"batch {self._seq} ({describe_indices(left_out)})")
        if error is not None:
            self._close_since(error)
            raise Instead(error)

    def _raise(self, error: BaseException, *, drawn: bool) -> None:
        """Raise what the user's code has raised; if in place of a batch, that is delivered."""
        if drawn and not self.is_closed:
            datasets = () if self._local is None else self._local.updates
            self.delivery = Delivery(self._seq, (), datasets)
        raise Instead(error) from None

    def _end_epoch(self) -> None:
        """Raise the epoch's end, or a TooManyFailures if too many samples of the epoch failed."""
        self._check_open()  # if it was closed meanwhile, the epoch has not ended
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._close_since(error)
        raise Instead(error or StopIteration()) from None

    def _check_open(self) -> None:
        if self.is_closed:
            because = self._closed_because
            text = f"the iterator is closed{because}" if because else ITERATOR_CLOSED
            raise Instead(ClosedLoaderError(text)) from None

    def _close_since(self, why: object) -> None:
        """Close for a reason that later calls report."""
        self._closed_because = f" since: {why}"
        self.close()

    def give_up(self, error: BaseException) -> None:
        """Close, and have later calls report the exception that interrupted the engine."""
        if not self.is_closed:
            self._closed_because = describe_interruption(error)
        self.close()

    @property
    def was_closed_by_user(self) -> bool:
        """Whether ``close()`` was called, and nothing else closed the engine."""
        return self.is_closed and not self._closed_because

    def close(self) -> None:
        """Make no further batch. May be called again, and from any thread."""
        self.is_closed = True
        self._draw = iter(()).__next__
        self._end()


def open_inline(
    config: LoaderConfig,
    plan: EpochPlan,
    parts: LoaderParts,
    local: LocalDataset | None,
    pins: bool,
    pin_device: str | None,
) -> Opened:
    """Return an engine for the epoch that has begun.

    Args:
        config: The loader's arguments.
        plan: The plan of the loader's epochs.
        parts: The objects that all iterators of the loader share.
        local: Tracks the dataset's state; None if it is not saved.
        pins: Whether batches are copied to page-locked memory.
        pin_device: The type of the accelerator that will read it.
    """
    fetcher, timer = config.fetch.make_concurrent_fetcher(), Timer()
    takes_arrays = config.fetch.takes_arrays
    make_maker = functools.partial(
        BatchMaker,
        config.fetch,
        config.dataset,
        config.collate_fn,
        config.on_error,
        where="in the main process",
        timer=timer,
        epoch=plan.epoch,
        restores_rngs=True,
        find_gatherer=LocalArrays(config.dataset).find_gatherer if takes_arrays else no_gatherer,
        concurrent_fetcher=fetcher,
    )
    if local is not None:
        local.begin(make_maker, is_elsewhere=plan.is_elsewhere)
    stage, step = _find_step(config, pins=pins, pin_device=pin_device)
    end = do_nothing if fetcher is None else fetcher.close
    engine = InlineEngine(
        local or make_maker(),
        timer,
        step,
        stage,
        config.watch_failures(parts),
        end,
        is_stream=config.fetch.is_iterable,
    )
    return Opened(engine, engine, end)


def _find_step(
    config: LoaderConfig, *, pins: bool, pin_device: str | None
) -> tuple[str, Callable[[Any], Any] | None]:
    """Return what pins, moves and transforms a batch, and the stage whose time that is."""
    transform = None if config.device_transform is None else cpu_transform(config)
    if config.devices != (None,) and config.has_device:
        return "device", _after(functools.partial(_move, config), transform)
    if pins and not config.has_steps:
        from shmloader.device.stage import pin_batch  # noqa: PLC0415 - few loaders pin

        return "pin", _after(functools.partial(pin_batch, device=pin_device), transform)
    return "build", transform


def _after(
    step: Callable[[Any], Any], transform: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """Return a function that pins or moves a batch, and then transforms it."""

    def both(batch: Any) -> Any:
        try:
            batch = step(batch)
        except StopIteration as error:  # of an object's own to() or pin_memory()
            raise RuntimeError("to() or pin_memory() of a batch raised StopIteration") from error
        return batch if transform is None else transform(batch)

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


def cpu_transform(config: LoaderConfig) -> Callable[[Any], Any] | None:
    """Return the function that transforms a batch on the user's thread; None for nothing.

    A StopIteration of the user's transform must not silently end the epoch.
    """
    transform, has_steps = config.device_transform, config.has_steps
    if transform is None:
        return None

    def transformed(batch: Any) -> Any:
        try:
            return [transform(each) for each in batch] if has_steps else transform(batch)
        except StopIteration as error:
            raise RuntimeError("the device_transform raised StopIteration") from error

    return transformed
