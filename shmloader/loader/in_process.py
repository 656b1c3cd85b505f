"""The iterator of a loader without workers."""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from shmloader.batch.arrays import ArraysHere, no_gatherer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.failures import describe_indices
from shmloader.batch.fetchers import EmptyBatchError, map_style_stop
from shmloader.batch.iterable_state import (
    Saved,
    load_dataset,
    load_iterator,
    read,
    replay,
)
from shmloader.batch.maker import BatchMaker
from shmloader.batch.timer import Timer, bytes_of
from shmloader.device.pin import pin_batch
from shmloader.device.structure import map_tensors
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.delivery import Instead
from shmloader.engine.state_cost import StateCost
from shmloader.engine.stream_here import DatasetHere, StreamHere
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.insight.record import Record
from shmloader.interruptions import describe_interruption, is_interruption
from shmloader.loader.calls import REPLACED, CountingIterator
from shmloader.loader.common import begin_by_torch, no_transform, transform_here
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.memory.collate import is_plain
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.rng import (
    changed,
    global_rng_state,
    set_global_rng_state,
    with_global_rng_state,
)


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
        resumed = parts.take_resumed()
        checkpoint = DatasetCheckpoint() if resumed is None else resumed.checkpoints[0]
        saved = None if checkpoint.snapshot is None else read(checkpoint.snapshot)
        loaded = parts.loaded_generators
        # Before the sampler is iterated, which may depend on the dataset's state.
        if saved is not None and saved.of == "dataset":
            with _as_before(checkpoint.rng):
                before = global_rng_state()
                load_dataset(config.dataset, saved)
                loaded = changed(before)
        begin_by_torch(self, loader, plan)
        if saved is None:
            # The whole epoch is resumed. As in the earlier run, torch has drawn from them since,
            # and for a shuffled order draws once more.
            loaded = global_rng_state(loaded) if config.fetch.is_iterable else {}
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
        self._watch = config.watch_failures(parts)
        self._step, self._transform = self._find_transform(config)
        self._timer = Timer()
        self._end: Callable[[], object] = _do_nothing
        fetcher = config.fetch.make_concurrent_fetcher()
        if fetcher is not None:
            finalizer = self._end = weakref.finalize(self, fetcher.close)
            finalizer.atexit = False
        self._maker = LocalMaker(
            config,
            checkpoint,
            saved,
            loaded,
            plan.epoch,
            self._timer,
            fetcher,
            parts.state_cost,
            is_elsewhere=plan.is_elsewhere,
        )
        self._dataset_fetcher = self._maker.fetcher  # torch's name for it
        self._checkpoints = parts.checkpoints = self._maker.checkpoint
        self._record = Record(plan.epoch, "in-process", 0, begin_ns=begin_ns)
        parts.statistics.begin(self._record, self)
        self._sampler_iter = plan.draw(self._sampler_iter, as_arrays=config.fetch.takes_arrays)
        self._record.begin()

    def _find_transform(self, config: LoaderConfig) -> tuple[str, Callable[[Any], Any]]:
        """Return what pins, moves and transforms a batch, and the stage whose time that is."""
        # No transform may refer to the iterator: in a reference cycle, only the garbage collector
        # could free the iterator.
        transform = transform_here(config)
        if config.has_device or config.has_steps:
            return "device", _after(functools.partial(_move, config), transform)
        if self._pin_memory:
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
                if self._is_loading and self._maker.is_replaying:
                    self._close_since("its dataset could not be resumed")
                elif self._is_loading and self._watch is not None and not self._is_made:
                    self._note_samples()
                raise Instead(error) from None
        if not self._is_exhausted:
            self._end_epoch()
        raise Instead(StopIteration())

    def _make(self, indices: object) -> Any:
        """Return the batch of these indices, or EmptyBatchError if it is left out."""
        self._is_made = False
        batch: Any = EmptyBatchError
        with contextlib.suppress(EmptyBatchError):
            batch = self._maker.make(indices)
        self._is_made = True
        if self._watch is not None:
            self._note_samples(indices if batch is EmptyBatchError else None)
        return batch

    def replace(self) -> None:
        """Deliver no further batch of this epoch, since the loader continues from a state."""
        if not self._is_closed:
            self._close_since(REPLACED)

    def _note_samples(self, left_out: object = None) -> None:
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
        self._note_done()

    def _count_error(self, error: BaseException, began_ns: int) -> None:
        is_end = isinstance(error, StopIteration)
        place = "end" if is_end else "other"
        self._record.add(began_ns, time.monotonic_ns(), 0, None, place, 0)
        if self._is_loading and not (is_end or self._is_closed):
            self._record.failures += 1
            self._note_done(has_failed=True)

    def _note_done(self, *, has_failed: bool = False) -> None:
        self._progress.done_until(self._seq)
        if self._checkpoints is not None:
            fingerprint, is_short = self._maker.last
            assert not isinstance(self._checkpoints, DatasetCheckpoints)
            self._checkpoints.note_batch(fingerprint, has_failed=has_failed, is_short=is_short)

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


class LocalMaker:
    """Makes batches in the main process, and tracks how far the dataset has come.

    Attributes:
        checkpoint: The checkpoint of the dataset; None if states of the loader contain none.
        fetcher: Loads samples and collates them.
        take_report: Returns the report on a batch's samples.
        is_replaying: Whether batches are being re-read to resume an iterable dataset, or could not
            be.

    Args:
        config: The loader's arguments.
        checkpoint: The checkpoint from which the dataset resumes.
        saved: The state in ``checkpoint``, which the dataset has loaded already; None without one.
        loaded: The states of global generators that the dataset's ``load_state_dict()`` has set:
            they are set again before the first sample, and the process goes on from them.
        epoch: Number of the epoch.
        timer: Times the work.
        concurrent_fetcher: Loads several samples at once; None to load one after the other.
        cost: Warns if states of the dataset cost much.
        is_elsewhere: Whether the global generators have the states of the run that is resumed now,
            and will not have them when the first batch is made.
    """

    def __init__(
        self,
        config: LoaderConfig,
        checkpoint: DatasetCheckpoint,
        saved: Saved | None,
        loaded: dict[str, Any],
        epoch: int | None,
        timer: Timer,
        concurrent_fetcher: ConcurrentFetcher | None,
        cost: StateCost,
        *,
        is_elsewhere: bool,
    ) -> None:
        fetch = config.fetch
        is_seeded = fetch.seed is not None
        rng = global_rng_state() if fetch.is_iterable and not is_seeded else None
        gatherer = ArraysHere(config.dataset).find_gatherer if fetch.takes_arrays else no_gatherer
        with _as_before(None if is_seeded else checkpoint.rng):
            if loaded:
                set_global_rng_state(loaded)
            self._maker = BatchMaker(
                fetch,
                config.dataset,
                config.collate_fn,
                config.on_error,
                where="in the main process",
                timer=timer,
                epoch=epoch,
                restores_rngs=True,
                find_gatherer=gatherer,
                concurrent_fetcher=concurrent_fetcher,
            )
            if fetch.is_iterable and not is_seeded:
                if saved is not None:
                    before = global_rng_state()
                    load_iterator(self._maker.fetcher, saved)
                    loaded = loaded | changed(before)
                if is_elsewhere:
                    checkpoint = checkpoint._replace(rng=rng, rng_at=((0, global_rng_state()),))
            self._loaded = {} if is_seeded or not loaded else global_rng_state(loaded)
        self.fetcher = self._maker.fetcher
        self.checkpoint: StreamHere | DatasetHere | None = None
        self.take_report = self._maker.take_report
        self.is_replaying = False
        if fetch.is_iterable:
            self._only_reads = is_plain(config.collate_fn)
            self._begin_stream(config, checkpoint, saved, rng)
        elif config.saves_dataset:
            self.checkpoint = DatasetHere(config.dataset, cost)

    def _begin_stream(
        self,
        config: LoaderConfig,
        checkpoint: DatasetCheckpoint,
        saved: Saved | None,
        rng: dict[str, Any] | None,
    ) -> None:
        """Begin an iterable dataset's stream where a checkpoint says, and track its position."""
        # Set until the first batch after resuming is made.
        self._resumed: DatasetCheckpoint | None = None
        if checkpoint.rng is not None or checkpoint.skip or self._loaded:
            self._resumed = checkpoint
        if config.fetch.seed is not None:
            load_iterator(self.fetcher, saved)
        self.fetcher.ended |= checkpoint.has_ended
        self._stream = self.checkpoint = StreamHere(
            self.fetcher, checkpoint, rng, asks=config.fetch.snapshot_every > 0
        )

    @property
    def last(self) -> tuple[int | None, bool]:
        """The last batch's fingerprint, and whether an iterable dataset has ended with it."""
        if isinstance(self.checkpoint, StreamHere):
            return self.fetcher.fingerprint, self.fetcher.ended
        return None, False

    @property
    def make(self) -> Callable[[Any], Any]:
        """The function that makes the batch of a ticket's indices.

        It is not stored in an attribute: that would be a reference cycle, and only the garbage
        collector could free the maker, an iterable dataset's iterator, and the files that this
        iterator has open.
        """
        if isinstance(self.checkpoint, StreamHere):
            return self._make_of_stream
        return self._maker.make if self.checkpoint is None else self._make_and_note

    def _make_and_note(self, indices: Any) -> Any:
        assert self.checkpoint is not None
        self.checkpoint.begin_batch()
        if self._loaded:
            set_global_rng_state(self._loaded)
            self._loaded = {}
        return self._maker.make(indices)

    def _make_of_stream(self, indices: Any) -> Any:
        self._stream.begin_batch()
        if self._resumed is None:
            return self._maker.make(indices)
        return self._make_first(indices, self._resumed)

    def _make_first(self, indices: Any, checkpoint: DatasetCheckpoint) -> Any:
        """Make the first batch since the stream was resumed."""
        # The dataset may draw its order when its first sample is read.
        rng, loaded = dict(checkpoint.rng_at).get(0, checkpoint.rng), self._loaded
        if loaded:
            rng = {**(global_rng_state() if rng is None else rng), **loaded}
        left = self._replay(indices, checkpoint, rng) if checkpoint.skip else None
        self._resumed = None
        if rng is None:
            return self._maker.make(indices)
        set_global_rng_state({name: (left or rng)[name] for name in loaded})
        now = global_rng_state()
        if checkpoint.skip:
            if left != now:
                self._stream.note_rng()
                self._stream.begin_batch()
            return self._maker.make(indices)
        if rng == now:
            return self._maker.make(indices)
        self._stream.note_rng()  # later batches draw from the process's own states
        with with_global_rng_state(rng, leaves=loaded):
            return self._maker.make(indices)

    def _replay(
        self, indices: Any, checkpoint: DatasetCheckpoint, rng: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Re-read and discard the batches since the snapshot; return the generators' states.

        Raises:
            Exception: If the batches cannot be read again, or differ.
        """
        self.is_replaying = True
        with _as_before(rng), self._maker.loading(indices) as plain:
            replay(self.fetcher, checkpoint, plain, only_reads=self._only_reads)
            left = None if rng is None else global_rng_state()
        self.is_replaying = False
        return left


def _as_before(rng: dict[str, Any] | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the global generators have earlier states; None changes nothing."""
    return contextlib.nullcontext() if rng is None else with_global_rng_state(rng)


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
    return batch if device is None else map_tensors(lambda tensor: tensor.to(device), batch)


def _do_nothing() -> None:
    """Do nothing; used as a close function where there is nothing to close."""
