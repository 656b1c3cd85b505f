"""The iterator of a loader without workers."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _SingleProcessDataLoaderIter,
)

from shmloader.engine.failures import FailureWatch
from shmloader.engine.stream_states import Place, StreamHere
from shmloader.engine.wording import describe_indices
from shmloader.errors import ClosedLoaderError, TooManyFailures
from shmloader.fronts.recipe import (
    draw_batches,
    next_batch,
    plan_and_watch,
    seed_of_workers,
    take_resumed,
    takes_arrays,
    transform_here,
)
from shmloader.options import Options
from shmloader.sampling.streams import kept
from shmloader.stages.pin import pin_batch
from shmloader.stages.structure import map_tensors
from shmloader.stages.target import parse_device
from shmloader.stats.record import Record
from shmloader.workers.array_fetch import ArrayFetcher, ArraysHere
from shmloader.workers.fetch import EmptyBatchError, Together, map_style_stop
from shmloader.workers.sample_streams import SampleStreams
from shmloader.workers.stopwatch import Stopwatch, bytes_of
from shmloader.workers.stream import load_dataset, load_iterator, pass_over, read


class InProcessIterator(_SingleProcessDataLoaderIter):
    """Loads on the consumer's thread: torch's own iterator, but for a map-style StopIteration.

    And for bad samples, where these are not raised; and for samples with random streams of their
    own, during which the process's are set aside.
    """

    def __init__(self, loader: Any, options: Options) -> None:
        begin_ns = time.monotonic_ns()
        resumed = take_resumed(loader)
        place = Place() if resumed is None else resumed.places[0]
        saved = None if place.snapshot is None else read(place.snapshot)
        load_dataset(loader.dataset, saved)
        # Not torch's own for one process, which calls iter(dataset).
        _BaseDataLoaderIter.__init__(self, loader)
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        self._base_seed = seed_of_workers(loader, self._base_seed)
        self._sampler_iter = loader._begin_draws(draw_batches(self, loader))
        self._device = parse_device(loader.device)
        self._devices = [parse_device(device) for device in options.devices or ()]
        self._transform = transform_here(options)
        self._progress = loader._progress
        self._is_closed = False
        self._closed_because = ""
        plan, self._watch = plan_and_watch(self, loader)
        self._stopwatch = Stopwatch()
        collate_fn = self._stopwatch.wrap(self._collate_fn, counts_items=plan.auto_collation)
        self._sample_streams: SampleStreams | None = None
        self._gatherer = plan.make_gatherer()
        together = None
        if plan.seed is None:
            if self._gatherer is not None:
                together = Together(self._gatherer)
            self._dataset_fetcher = plan.make_fetcher(
                self._dataset, collate_fn, loader.on_error, together=together
            )
        else:
            is_alone = plan.sets_global_streams
            self._sample_streams = SampleStreams(
                plan.seed, epoch=loader._plan.epoch, sets_global=is_alone
            )
            if self._gatherer is not None:
                together = Together(self._gatherer, self._sample_streams.begin_sample)
            with kept():
                self._dataset_fetcher = plan.make_fetcher(
                    *self._sample_streams.wrap(
                        self._dataset,
                        collate_fn,
                        is_iterable=plan.is_iterable,
                        may_fail=loader.on_error != "raise",
                        begins_samples=is_alone,
                    ),
                    loader.on_error,
                    together=together,
                )
        if takes_arrays(self, loader):
            self._dataset_fetcher = ArrayFetcher(
                ArraysHere(self._dataset).find_gatherer,
                self._dataset_fetcher,
                self._stopwatch.count,
                may_shard=plan.may_shard,
            )
        self._ticket_count = 0
        self._streams: StreamHere | None = None
        if self._dataset_kind == _DatasetKind.Iterable:
            load_iterator(self._dataset_fetcher, saved)
            self._dataset_fetcher.ended |= place.has_ended
            self._streams = loader._streams = StreamHere(self._dataset_fetcher, place.given)
        self._given_before, self._to_skip = place.given, place.skip
        self._finishing = "build"
        if self._device is not None or self._devices:
            self._finishing = "device"
        elif self._pin_memory:
            self._finishing = "pin"
        self._record = Record(
            loader._epoch, "in-process", 0, failed=loader.failures, begin_ns=begin_ns
        )
        loader._statistics.begin(self._record, self)
        self._record.begun()

    def __next__(self) -> Any:
        """The next batch."""
        began_ns = time.monotonic_ns()
        try:
            batch = next_batch(self, super().__next__)
        except Exception as error:
            self._record.waited(began_ns, time.monotonic_ns())
            if isinstance(error, StopIteration):
                self._record.end()
            else:
                self._record.failures += 1
            raise
        work, nbytes = self._stopwatch.read(), bytes_of(batch)
        self._record.loaded_here(work, began_ns, time.monotonic_ns(), nbytes, self._finishing)
        return batch

    def _next_data(self) -> Any:
        if self._is_closed:
            raise ClosedLoaderError(f"the iterator is closed{self._closed_because}")
        try:
            data = self._fetch() if self._watch is None else self._fetch_good(self._watch)
            self._stopwatch.fetched()
            data = self._finish(data)
        except StopIteration:
            self._progress.is_ended = True
            if self._streams is not None:
                self._streams.has_ended = True
            raise
        except Exception:
            self._note_done()
            raise
        self._note_done()
        return data

    def _note_done(self) -> None:
        """All tickets that were drawn are done: the last one's batch, or exception, is given."""
        if self._ticket_count:
            self._progress.done_until(self._ticket_count - 1)
        if self._streams is not None:
            given = self._given_before + self._ticket_count
            self._streams.note(given, is_short=self._dataset_fetcher.ended)

    def _draw(self) -> Any:
        index = self._next_index()  # type: ignore[no-untyped-call]
        self._ticket_count += 1
        self._stopwatch.begin()
        return index

    def _finish(self, data: Any) -> Any:
        """What pins a batch, or moves it, and the user's transform."""
        try:
            if self._device is not None:
                data = _move(data, self._device)
            elif self._devices:
                data = [_move(*part) for part in zip(data, self._devices, strict=False)]
            elif self._pin_memory:
                data = pin_batch(data, self._pin_memory_device)
        except StopIteration as error:  # of an object's own to() or pin_memory()
            raise RuntimeError("what moves or pins a batch raised StopIteration") from error
        return self._transform(data)

    def _fetch(self) -> Any:
        index = self._draw()
        to_skip, self._to_skip = self._to_skip, 0
        if to_skip:
            with self._seeded(index) as indices:
                pass_over(self._dataset_fetcher, to_skip, indices)
        try:
            return self._load(index)
        except StopIteration as error:
            if self._dataset_kind == _DatasetKind.Iterable:
                raise
            raise map_style_stop(error) from error

    def _load(self, index: Any) -> Any:
        if self._sample_streams is None:
            return self._dataset_fetcher.fetch(index)
        with self._seeded(index) as indices:
            return self._dataset_fetcher.fetch(indices)

    @contextlib.contextmanager
    def _seeded(self, index: Any) -> Iterator[Any]:
        """Load inside of this; gives the plain indices. The process's streams are put back."""
        if self._sample_streams is None:
            yield index
        else:
            with kept(), self._sample_streams.at(index) as indices:
                yield indices

    def _fetch_good(self, watch: FailureWatch) -> Any:
        """The next batch of which something is left."""
        while True:
            try:
                index = self._draw()
            except StopIteration:
                self._raise_if(watch.end_epoch())
                raise
            batch = f"batch {self._ticket_count - 1}"
            try:
                data = self._load(index)
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
        self._raise_if(watch.note(self._dataset_fetcher.take_report(), batch))

    def _raise_if(self, error: TooManyFailures | None) -> None:
        if error is not None:
            self._closed_because = f" since: {error}"
            self.close()
            raise error

    def close(self) -> None:
        """No further batch; may be called again."""
        self._is_closed = True
        if self._gatherer is not None:
            self._gatherer.close()
        if hasattr(self, "_record"):
            self._record.end()


def _move(batch: Any, device: torch.device | None) -> Any:
    return batch if device is None else map_tensors(lambda tensor: tensor.to(device), batch)
