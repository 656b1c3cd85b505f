"""The iterator of a loader without workers."""

import contextlib
import time
from typing import Any

import torch
from torch.utils.data.dataloader import (
    _DatasetKind,
    _SingleProcessDataLoaderIter,
)

from shmloader.batch.arrays import ArrayFetcher, ArraysHere
from shmloader.batch.fetch import EmptyBatchError, map_style_stop
from shmloader.batch.fingerprint import FingerprintingCollate
from shmloader.batch.iterable_state import (
    IterableCheckpoint,
    Saved,
    load_dataset,
    load_iterator,
    read,
    replay,
    take_fingerprints,
)
from shmloader.batch.maker import BatchMaker
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.timer import Timer, bytes_of
from shmloader.device.pin import pin_batch
from shmloader.device.structure import map_tensors
from shmloader.engine.failures import FailureWatch
from shmloader.engine.stream_here import DatasetHere, StreamHere
from shmloader.engine.wording import describe_indices, describe_interruption
from shmloader.errors import ClosedLoaderError, TooManyFailures
from shmloader.insight.record import Record
from shmloader.interruptions import is_interruption
from shmloader.loader.calls import CountingIterator
from shmloader.loader.common import begin_by_torch, seed_of_workers, transform_here
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.memory.collate import is_plain
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.rng import global_rng_state, kept, with_global_rng_state


class InProcessIterator(CountingIterator, _SingleProcessDataLoaderIter):
    """Loads on the consumer's thread: torch's own iterator, but for a map-style StopIteration.

    And for bad samples, where these are not raised; and for samples with random streams of their
    own, during which the process's are set aside.
    """

    # Whether a batch is on its way, from its indices on; and whether these are being drawn.
    _in_transit = _is_drawing = False

    def __init__(
        self, loader: Any, config: LoaderConfig, plan: EpochPlan, parts: LoaderParts
    ) -> None:
        """Begin an epoch; the arguments are those of :class:`EngineIterator`."""
        begin_ns = time.monotonic_ns()
        resumed, fetch = parts.take_resumed(), config.fetch
        checkpoint = IterableCheckpoint() if resumed is None else resumed.checkpoints[0]
        saved = None if checkpoint.snapshot is None else read(checkpoint.snapshot)
        with _as_before(checkpoint.rng):
            load_dataset(config.dataset, saved)
        # Not torch's own for one process, which calls iter(dataset).
        begin_by_torch(self, loader, plan)
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._base_seed = seed_of_workers(config, plan, self._base_seed)
        as_arrays = config.takes_arrays
        self._sampler_iter = plan.draw(self._sampler_iter, as_arrays=as_arrays)
        self._devices, self._has_steps = config.devices, config.has_steps
        self._transform = transform_here(config)
        self._progress = plan.progress
        self._is_closed = False
        self._closed_because = ""
        self._watch = config.watch_failures(parts.failures)
        self._timer = Timer()
        self._concurrent_fetcher = fetch.make_concurrent_fetcher()
        rng = global_rng_state() if fetch.is_iterable and fetch.seed is None else None
        sample_rng: SampleRng | None = None
        if fetch.seed is not None:
            sample_rng = SampleRng(fetch.seed, epoch=plan.epoch, sets_global=fetch.sets_global_rngs)
        with _as_before(checkpoint.rng) if sample_rng is None else kept():
            self._maker = BatchMaker(
                fetch,
                self._dataset,
                self._collate_fn,
                config.on_error,
                where="in the main process",
                timer=self._timer,
                rng=sample_rng,
                concurrent_fetcher=self._concurrent_fetcher,
                keeps_global=True,
            )
            if fetch.is_iterable and sample_rng is None:
                load_iterator(self._maker.fetcher, saved)
        if as_arrays:
            self._maker.fetcher = ArrayFetcher(
                ArraysHere(self._dataset).find_gatherer,
                self._maker.fetcher,
                self._timer.count,
                may_shard=fetch.may_shard,
            )
        self._dataset_fetcher = self._maker.fetcher  # torch's name for it
        self._ticket_count = 0
        self._begin_stream(config, checkpoint, saved, rng)
        parts.streams = self._streams
        self._finishing = "build"
        if config.has_device or self._has_steps:
            self._finishing = "device"
        elif self._pin_memory:
            self._finishing = "pin"
        self._record = Record(plan.epoch, "in-process", 0, failed=parts.failures, begin_ns=begin_ns)
        parts.statistics.begin(self._record, self)
        self._record.begun()

    def _begin_stream(
        self,
        config: LoaderConfig,
        checkpoint: IterableCheckpoint,
        saved: Saved | None,
        rng: dict[str, Any] | None,
    ) -> None:
        """Have an iterable dataset go on where it is resumed; note where the dataset is."""
        self._streams: StreamHere | DatasetHere | None = None
        self._fingerprints: FingerprintingCollate | None = None
        # Where the stream is resumed with the first batch.
        self._resumed_at: IterableCheckpoint | None = None
        fetch = config.fetch
        if fetch.is_iterable:
            if checkpoint.rng is not None or checkpoint.skip:
                self._resumed_at = checkpoint
            fetcher = self._dataset_fetcher
            if fetch.seed is not None:
                load_iterator(fetcher, saved)
            fetcher.ended |= checkpoint.has_ended
            self._fingerprints = take_fingerprints(fetcher)
            self._streams = StreamHere(fetcher, checkpoint, rng, asks=fetch.snapshot_every > 0)
        elif config.saves_dataset:
            self._streams = DatasetHere(config.dataset)
        self._only_reads = is_plain(config.collate_fn)

    def _mark(self) -> Any:
        return self._progress.mark(), None if self._streams is None else self._streams.mark()

    def _note_times(self, batch: Any, began_ns: int) -> None:
        work, nbytes = self._timer.read(), bytes_of(batch)
        self._record.loaded_here(work, began_ns, time.monotonic_ns(), nbytes, self._finishing)

    def _loses(self, error: BaseException) -> bool:
        return self._in_transit and is_interruption(error)

    def _note_raised(self, error: BaseException, began_ns: int) -> None:
        self._record.waited(began_ns, time.monotonic_ns())
        if isinstance(error, StopIteration):
            self._progress.is_ended = True
            if self._streams is not None:
                self._streams.end()
            self._record.end()
        elif self._in_transit:
            self._record.failures += 1
            if self._resumed_at is None:
                self._note_done(has_failed=True)

    def _give_up(self, error: BaseException, mark: Any) -> None:
        position, given = mark
        self._progress.go_back(position)
        if self._streams is not None:
            self._streams.go_back(given)
        if not self._is_closed:
            self._closed_because = describe_interruption(error, in_sampler=self._is_drawing)
        self.close()

    def _next_data(self) -> Any:
        self._in_transit = False
        if self._is_closed:
            raise ClosedLoaderError(f"the iterator is closed{self._closed_because}")
        self._in_transit = True
        data = self._fetch() if self._watch is None else self._fetch_good(self._watch)
        return self._finish(data)

    def _note_done(self, *, has_failed: bool = False) -> None:
        # All tickets that were drawn are done: the last one's batch, or exception, is given.
        if self._ticket_count:
            self._progress.done_until(self._ticket_count - 1)
        if self._streams is not None:
            taken = self._fingerprints
            self._streams.gave(
                None if taken is None else taken.value,
                has_failed=has_failed,
                is_short=getattr(self._dataset_fetcher, "ended", False),
            )

    def _draw(self) -> Any:
        self._is_drawing = True
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            self._is_drawing = False
            raise
        self._is_drawing = False
        self._ticket_count += 1
        self._timer.begin()
        return index

    def _finish(self, data: Any) -> Any:
        """What pins a batch, or moves it, and the user's transform."""
        try:
            if self._has_steps:
                data = [_move(*part) for part in zip(data, self._devices, strict=False)]
            elif self._devices[0] is not None:
                data = _move(data, self._devices[0])
            elif self._pin_memory:
                data = pin_batch(data, self._pin_memory_device)
        except StopIteration as error:  # of an object's own to() or pin_memory()
            raise RuntimeError("what moves or pins a batch raised StopIteration") from error
        return self._transform(data)

    def _fetch(self) -> Any:
        index = self._draw()
        if self._streams is not None:
            self._streams.begin_batch()
        if self._fingerprints is not None:
            self._fingerprints.reset()
        try:
            checkpoint = self._resumed_at
            return (
                self._maker.make(index)
                if checkpoint is None
                else self._load_resumed(index, checkpoint)
            )
        except StopIteration as error:
            if self._dataset_kind == _DatasetKind.Iterable:
                raise
            raise map_style_stop(error) from error

    def _load_resumed(self, index: Any, checkpoint: IterableCheckpoint) -> Any:
        """The first batch since the stream was resumed."""
        assert self._fingerprints is not None
        assert isinstance(self._streams, StreamHere)
        # An order may be drawn with the first sample that is read.
        rng = dict(checkpoint.rng_at).get(0, checkpoint.rng)
        try:
            if checkpoint.skip:
                with _as_before(rng), self._maker.loading(index) as indices:
                    replay(
                        self._dataset_fetcher,
                        checkpoint,
                        indices,
                        self._fingerprints,
                        only_reads=self._only_reads,
                    )
                    left = None if rng is None else global_rng_state()
        except BaseException as error:
            self._closed_because = f" since its dataset could not be resumed: {error!r}"
            self.close()
            raise
        self._resumed_at = None
        self._fingerprints.reset()
        if rng is None:
            return self._maker.make(index)
        now = global_rng_state()
        if checkpoint.skip:
            if left != now:
                self._streams.note_rng()
                self._streams.begin_batch()
            return self._maker.make(index)
        if rng == now:
            return self._maker.make(index)
        self._streams.note_rng()  # from the batch after this on, they are the process's
        with with_global_rng_state(rng):
            return self._maker.make(index)

    def _fetch_good(self, watch: FailureWatch) -> Any:
        """The next batch of which something is left."""
        while True:
            try:
                index = self._draw()
            except StopIteration:
                self._raise_if(watch.end_epoch())
                raise
            if self._streams is not None:
                self._streams.begin_batch()
            batch = f"batch {self._ticket_count - 1}"
            try:
                data = self._maker.make(index)
            except EmptyBatchError:
                self._note_samples(watch, batch)
                self._raise_if(watch.left_out(f"{batch} ({describe_indices(index)})"))
            except StopIteration as error:  # of collate, or of the function of on_error
                self._note_samples(watch, batch)
                raise map_style_stop(error) from error
            except Exception:
                self._note_samples(watch, batch)
                raise
            else:
                self._note_samples(watch, batch)
                return data

    def _note_samples(self, watch: FailureWatch, batch: str) -> None:
        report = self._maker.take_report()
        assert report is not None  # there is a watch only where bad samples are not raised
        self._raise_if(watch.note(report, batch))

    def _raise_if(self, error: TooManyFailures | None) -> None:
        if error is not None:
            self._closed_because = f" since: {error}"
            self.close()
            raise error

    def close(self) -> None:
        """No further batch; may be called again."""
        self._is_closed = True
        if self._concurrent_fetcher is not None:
            self._concurrent_fetcher.close()
        if hasattr(self, "_record"):
            self._record.end()


def _as_before(rng: dict[str, Any] | None) -> contextlib.AbstractContextManager[None]:
    """Have the global generators in the states of an earlier run; the process's own come back."""
    return contextlib.nullcontext() if rng is None else with_global_rng_state(rng)


def _move(batch: Any, device: torch.device | None) -> Any:
    return batch if device is None else map_tensors(lambda tensor: tensor.to(device), batch)
