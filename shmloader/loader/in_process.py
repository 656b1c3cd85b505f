"""The iterator of a loader without workers."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from shmloader.batch.arrays import ArraysHere
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.iterable_state import (
    Saved,
    load_dataset,
    load_iterator,
    read,
    replay,
    take_fingerprints,
)
from shmloader.batch.maker import BatchMaker
from shmloader.batch.timer import Timer, bytes_of
from shmloader.device.pin import pin_batch
from shmloader.device.stage import Stage
from shmloader.device.structure import map_tensors
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.engine import Engine
from shmloader.engine.stream_here import DatasetHere, StreamHere
from shmloader.insight.record import Record
from shmloader.interruptions import is_interruption
from shmloader.loader.common import no_transform, transform_here
from shmloader.loader.config import LoaderConfig
from shmloader.loader.iterator import EngineIterator
from shmloader.memory.collate import is_plain
from shmloader.pools.arena import PageLocker
from shmloader.pools.inline import InlinePool, ResumeError
from shmloader.sampling.rng import global_rng_state, with_global_rng_state


class InProcessIterator(EngineIterator, _SingleProcessDataLoaderIter):
    """Makes batches on the consumer's thread, when they are asked for.

    ``seed=`` sets the process's random number generators for each sample. Their earlier states are
    restored after each batch.
    """

    _pool: InlinePool
    _checkpoints: StreamHere | DatasetHere | None  # type: ignore[assignment]

    def _load_dataset(self, config: LoaderConfig, resumed: DatasetCheckpoints | None) -> None:
        """Load the dataset's state, which the sampler may depend on when it is iterated."""
        checkpoint = DatasetCheckpoint() if resumed is None else resumed.checkpoints[0]
        saved = None if checkpoint.snapshot is None else read(checkpoint.snapshot)
        with _as_before(checkpoint.rng):
            load_dataset(config.dataset, saved)
        self._resumed: tuple[DatasetCheckpoint, Saved | None] | None = (checkpoint, saved)

    def _begin_checkpoints(self, resumed: DatasetCheckpoints | None) -> None:
        """Do nothing: the maker tracks the dataset's position."""

    def _make_stage(self) -> tuple[Stage | None, PageLocker | None]:
        """Return no stage: batches are pinned and moved to a device on the consumer's thread."""
        config = self._config
        self._step = "build"
        self._transform = transform_here(config)
        # No transform may refer to the iterator: in a reference cycle, only the garbage collector
        # could free the iterator.
        if config.has_device or config.has_steps:
            self._step = "device"
            self._transform = _after(functools.partial(_move, config), self._transform)
        elif self._pin_memory:
            self._step = "pin"
            pin = functools.partial(pin_batch, device=self._pin_memory_device)
            self._transform = _after(pin, self._transform)
        return None, None

    def _open(self, locker: PageLocker | None) -> None:  # noqa: ARG002 - nothing is page-locked
        if self._timeout != 0:
            raise AssertionError(
                "_SingleProcessDataLoaderIter requires timeout == 0: with num_workers=0, batches "
                "are loaded in this process, which cannot stop waiting for itself"
            )
        config, fetch = self._config, self._config.fetch
        self._timer = Timer()
        self._concurrent_fetcher = fetch.make_concurrent_fetcher()
        assert self._resumed is not None
        resumed, self._resumed = self._resumed, None
        maker = LocalMaker(
            config, *resumed, self._plan.epoch, self._timer, self._concurrent_fetcher
        )
        self._checkpoints = self._parts.checkpoints = maker.checkpoint
        self._maker = maker
        self._dataset_fetcher = maker.fetcher  # torch's name for it
        self._pool = InlinePool(
            maker.make,
            self._timer,
            maker.take_report,
            _do_nothing if self._concurrent_fetcher is None else self._concurrent_fetcher.close,
            is_iterable=fetch.is_iterable,
        )
        self._engine = Engine(
            self._pool,
            worker_count=1,
            window=0,
            lend_limit=0,
            in_order=True,
            timeout_s=0,
            watch=config.watch_failures(self._parts.failures),
        )

    def _ender(self) -> Callable[[], object]:
        # Not the pool's close: the pool refers to the dataset, which may refer to the loader.
        fetcher = self._concurrent_fetcher
        return _do_nothing if fetcher is None else fetcher.close

    def _iterate_again(self, loader: Any) -> None:
        """Do nothing: torch iterates the sampler once here."""

    def _make_record(self, worker_count: int, begin_ns: int) -> Record:  # noqa: ARG002 - none
        failed = self._parts.failures
        return Record(self._plan.epoch, "in-process", 0, failed=failed, begin_ns=begin_ns)

    def _note_times(self, batch: Any, began_ns: int) -> None:
        work, nbytes = self._timer.read(), bytes_of(batch)
        self._record.note_local_batch(
            work, began_ns, time.monotonic_ns(), nbytes, self._step, self._source.draw_ns
        )

    def _note_datasets(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.end()

    def _loses(self, error: BaseException) -> bool:
        source = self._source
        if not source.loses(error):
            return False
        if source.delivery is None or is_interruption(error):
            return True
        # The error came in place of the batch. It may be torch's warning of a wrong length, if
        # warnings are errors.
        source.raised_id = id(error)
        return False

    def _note_done(self, *, has_failed: bool = False) -> None:
        delivery = self._engine.delivery
        if delivery is not None:
            self._progress.done_until(delivery.seq)
            if self._checkpoints is not None:
                fingerprint, is_short = self._maker.last
                self._checkpoints.note_batch(fingerprint, has_failed=has_failed, is_short=is_short)


class LocalMaker:
    """Makes batches in the main process, and tracks how far the dataset has come.

    Attributes:
        checkpoint: The checkpoint of the dataset; None if states of the loader contain none.
        fetcher: torch's fetcher, or one of ours.
        take_report: Returns the report on a batch's samples; None with ``on_error="raise"``.

    Args:
        config: The loader's arguments.
        checkpoint: The checkpoint from which the dataset resumes.
        saved: The state in ``checkpoint``, which the dataset has loaded already; None without one.
        epoch: Number of the epoch.
        timer: Times the work.
        concurrent_fetcher: Loads several samples at once; None to load one after the other.
    """

    def __init__(
        self,
        config: LoaderConfig,
        checkpoint: DatasetCheckpoint,
        saved: Saved | None,
        epoch: int | None,
        timer: Timer,
        concurrent_fetcher: ConcurrentFetcher | None,
    ) -> None:
        fetch = config.fetch
        is_seeded = fetch.seed is not None
        rng = global_rng_state() if fetch.is_iterable and not is_seeded else None
        with _as_before(None if is_seeded else checkpoint.rng):
            self._maker = BatchMaker(
                fetch,
                config.dataset,
                config.collate_fn,
                config.on_error,
                where="in the main process",
                timer=timer,
                epoch=epoch,
                restores_rngs=True,
                find_gatherer=ArraysHere(config.dataset).find_gatherer,
                concurrent_fetcher=concurrent_fetcher,
            )
            if fetch.is_iterable and not is_seeded:
                load_iterator(self._maker.fetcher, saved)
        self.fetcher = self._maker.fetcher
        self.checkpoint: StreamHere | DatasetHere | None = None
        self.take_report = None if config.on_error == "raise" else self._maker.take_report
        if fetch.is_iterable:
            self._only_reads = is_plain(config.collate_fn)
            self._begin_stream(config, checkpoint, saved, rng)
        elif config.saves_dataset:
            self.checkpoint = DatasetHere(config.dataset)

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
        if checkpoint.rng is not None or checkpoint.skip:
            self._resumed = checkpoint
        if config.fetch.seed is not None:
            load_iterator(self.fetcher, saved)
        self.fetcher.ended |= checkpoint.has_ended
        self._fingerprints = take_fingerprints(self.fetcher)
        self._stream = self.checkpoint = StreamHere(
            self.fetcher, checkpoint, rng, asks=config.fetch.snapshot_every > 0
        )

    @property
    def last(self) -> tuple[int | None, bool]:
        """The last batch's fingerprint, and whether an iterable dataset has ended with it."""
        if isinstance(self.checkpoint, StreamHere):
            return self._fingerprints.value, self.fetcher.ended
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
        return self._maker.make(indices)

    def _make_of_stream(self, indices: Any) -> Any:
        self._stream.begin_batch()
        self._fingerprints.reset()
        if self._resumed is None:
            return self._maker.make(indices)
        return self._make_first(indices, self._resumed)

    def _make_first(self, indices: Any, checkpoint: DatasetCheckpoint) -> Any:
        """Make the first batch since the stream was resumed."""
        # The dataset may draw its order when its first sample is read.
        rng = dict(checkpoint.rng_at).get(0, checkpoint.rng)
        left = self._replay(indices, checkpoint, rng) if checkpoint.skip else None
        self._resumed = None
        self._fingerprints.reset()
        if rng is None:
            return self._maker.make(indices)
        now = global_rng_state()
        if checkpoint.skip:
            if left != now:
                self._stream.note_rng()
                self._stream.begin_batch()
            return self._maker.make(indices)
        if rng == now:
            return self._maker.make(indices)
        self._stream.note_rng()  # later batches draw from the process's own states
        with with_global_rng_state(rng):
            return self._maker.make(indices)

    def _replay(
        self, indices: Any, checkpoint: DatasetCheckpoint, rng: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Re-read and discard the batches since the snapshot; return the generators' states.

        Raises:
            ResumeError: If the batches cannot be read again, or differ.
        """
        try:
            with _as_before(rng), self._maker.loading(indices) as plain:
                replay(
                    self.fetcher,
                    checkpoint,
                    plain,
                    self._fingerprints,
                    only_reads=self._only_reads,
                )
                return None if rng is None else global_rng_state()
        except Exception as error:
            if is_interruption(error):
                raise
            raise ResumeError(error) from error


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
