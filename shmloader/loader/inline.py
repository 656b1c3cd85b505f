"""Makes batches on the thread that asks for them, for a loader without workers.

``seed=`` sets the process's random number generators for each sample. Their earlier states are
restored after each batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

from shmloader.batch.arrays import Arrays
from shmloader.batch.collator import Timer
from shmloader.batch.failures import describe_indices
from shmloader.batch.fetch import EmptyBatchError, map_style_stop
from shmloader.batch.maker import BatchMaker
from shmloader.engine.delivery import Delivery, Instead, delivery_of
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.insight.record import Record
from shmloader.interruptions import describe_interruption, is_interruption
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.loader.local_dataset import LocalDataset
from shmloader.sampling.plan import EpochPlan


def do_nothing(*_: object) -> None:
    """Do nothing: where there is nothing to close, to begin or to set."""


class InlineEngine:
    """Makes the batches of an epoch when they are asked for.

    It has what the iterator uses of an :class:`~shmloader.engine.engine.Engine`.

    Args:
        config: The loader's arguments.
        plan: The plan of the loader's epochs.
        parts: The objects that all iterators of the loader share.
        local: Tracks the dataset's state; None if it is not saved.
        pins: Whether batches are copied to page-locked memory.
        pin_device: The type of the accelerator that will read it.

    Attributes:
        end: Ends the threads that load samples.
        staged: The name, in the statistics, of what is done to a batch after it is collated.
    """

    is_waiting = False
    beginnings = counts = None
    delivery: Delivery | None = None
    draw_ns, staged = 0, "build"
    is_closed = False
    _seq, _closed_because = -1, ""
    _step: Callable[[Any], Any] | None = None
    end: Callable[[], object] = staticmethod(do_nothing)
    record: Record  # of the epoch, which the iterator sets

    def __init__(
        self,
        config: LoaderConfig,
        plan: EpochPlan,
        parts: LoaderParts,
        local: LocalDataset | None,
        pins: bool,
        pin_device: str | None,
    ) -> None:
        fetch = config.fetch
        timer = self._timer = Timer()
        fetcher = fetch.make_concurrent_fetcher()
        if fetcher is not None:
            self.end = fetcher.close

        def make_maker() -> BatchMaker:  # does not refer to the engine, which may keep it
            return BatchMaker(
                fetch,
                config.dataset,
                config.collate_fn,
                config.on_error,
                where="in the main process",
                timer=timer,
                epoch=plan.epoch,
                restores_rngs=True,
                arrays=Arrays(config.dataset) if fetch.takes_arrays else None,
                concurrent_fetcher=fetcher,
            )

        if local is not None:
            local.begin(make_maker, is_elsewhere=plan.is_elsewhere)
        self._local, self._maker = local, local or make_maker()
        if pins or config.has_device or config.device_transform is not None:
            self.staged, self._step = make_step(config, pins=pins, pin_device=pin_device)
        self._watch, self._is_stream = config.watch_failures(parts), fetch.is_iterable

    def start(self, tickets: Iterator[Any]) -> None:
        """Begin the epoch."""
        self._draw: Callable[[], Any] = tickets.__next__

    def next_batch(self) -> Any:
        """Return the next batch; see :meth:`shmloader.engine.engine.Engine.next_batch`."""
        self.delivery, self.draw_ns = None, 0
        timer = self._timer
        while True:
            if self.is_closed:
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
                self._deliver(timer.read())
                return batch
            except Instead:
                raise
            except StopIteration as stop:
                if not drawn or self._is_stream:
                    raise Instead(self._end_epoch()) from None
                error: Exception = map_style_stop(stop)
            except Exception as raised:
                if is_interruption(raised):
                    raise
                error = raised
            if drawn and not self.is_closed:
                self._deliver(None)
            raise Instead(error) from None

    def _deliver(self, times: Any) -> None:
        datasets = () if self._local is None else self._local.updates
        self.delivery = delivery_of((self._seq, (), datasets, times))

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
            elif self._watch is not None:
                self._count_failures()
            raise
        if self._watch is not None:
            self._count_failures(indices if batch is EmptyBatchError else None)
        return batch

    def _count_failures(self, left_out: object = None) -> None:
        """Count the samples of a batch that failed.

        Args:
            left_out: The indices of the batch, if all its samples failed.

        Raises:
            Instead: With a TooManyFailures if too many have failed.
        """
        watch, error, report = self._watch, None, self._maker.pop_report()
        assert watch is not None
        if report is not None:
            self.record.failures += report.failed_count
            error = watch.add(report, f"batch {self._seq}")
        if error is None and left_out is not None:
            error = watch.left_out(f"batch {self._seq} ({describe_indices(left_out)})")
        if error is not None:
            self._close_since(error)
            raise Instead(error)

    def _end_epoch(self) -> BaseException:
        """Return the epoch's end, or a TooManyFailures if too many samples of the epoch failed."""
        self._check_open()  # if it was closed meanwhile, the epoch has not ended
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._close_since(error)
        return error or StopIteration()

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
        self.end()


def make_step(
    config: LoaderConfig, *, pins: bool = False, pin_device: str | None = None
) -> tuple[str, Callable[[Any], Any] | None]:
    """Return the name of what is done to a batch on the user's thread, and a function that does it.

    It pins or moves a batch, and calls the ``device_transform``.

    Args:
        config: The loader's arguments.
        pins: Whether batches are copied to page-locked memory.
        pin_device: The type of the accelerator that will read it.
    """
    transform, kind = config.device_transform, "build"
    if config.has_device:
        # Few loaders have a device.
        from shmloader.device.structure import map_tensors  # noqa: PLC0415

        kind = "device"
    elif pins and not config.has_steps:
        from shmloader.device.stage import pin_batch  # noqa: PLC0415

        kind = "pin"
    elif transform is None:
        return kind, None

    def one(batch: Any, device: Any) -> Any:
        if device is not None:
            batch = map_tensors(lambda tensor: tensor.to(device), batch)
        elif kind == "pin":
            batch = pin_batch(batch, device=pin_device)
        return batch if transform is None else transform(batch)

    def step(batch: Any) -> Any:
        try:
            if config.has_steps:
                return [one(*part) for part in zip(batch, config.devices, strict=False)]
            return one(batch, config.devices[0])
        except StopIteration as error:  # which would silently end the epoch
            text = "a batch's device_transform or pin_memory raised StopIteration"
            raise RuntimeError(text) from error

    return kind, step
