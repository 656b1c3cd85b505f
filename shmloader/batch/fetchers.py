"""Fetches the samples of a batch as torch's fetchers do. Errors name the sample that failed."""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from shmloader.batch.concurrent_fetcher import ConcurrentFetcher, SampleResult
from shmloader.batch.failures import (
    describe_bad_index,
    describe_bad_list,
    describe_bad_number,
    describe_index,
)
from shmloader.batch.ragged import collate
from shmloader.batch.remote_error import note_sample
from shmloader.interruptions import is_interruption
from shmloader.probing import probe
from shmloader.sampling.steps import is_sharded


class EmptyBatchError(Exception):
    """All samples of a batch failed, and none was replaced. Never reaches the user."""


def one_by_one(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that loads the sample of an index.

    It uses the dataset's ``__getitem__``, or ``__getitems__`` if the dataset has no
    ``__getitem__``.
    """
    if _gives_lists_alone(dataset):
        return functools.partial(_get_by_list, dataset)
    return functools.partial(operator.getitem, dataset)


def _gives_lists_alone(dataset: Any) -> bool:
    """Whether a dataset has only ``__getitems__``; torch's base ``__getitem__`` only raises."""
    own = getattr(type(dataset), "__getitem__", None)
    return own in (None, Dataset.__getitem__) and bool(probe(dataset, "__getitems__"))


def _get_by_list(dataset: Any, index: Any) -> Any:
    (sample,) = dataset.__getitems__([index])
    return sample


class SampleLoader:
    """Loads several samples of a dataset at once, in order.

    Args:
        concurrent_fetcher: Loads the samples.
        begins: Functions that are called for each sample, in order, in the sample's context, for
            instance to seed its generators.
    """

    def __init__(
        self, concurrent_fetcher: ConcurrentFetcher, begins: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._concurrent_fetcher = concurrent_fetcher
        self._begins = begins

    def load(
        self, get: Callable[[Any], Any], indices: Iterable[Any], *, wants_all: bool
    ) -> list[SampleResult]:
        """Load samples; see :meth:`ConcurrentFetcher.load`."""
        return self._concurrent_fetcher.load(get, indices, self._begins, wants_all=wants_all)


class ConcurrentSamples:
    """A map-style dataset for torch's fetcher, which calls ``__getitems__`` for a batch."""

    def __init__(self, dataset: Any, sample_loader: SampleLoader) -> None:
        self._get = one_by_one(dataset)
        self._sample_loader = sample_loader

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        results = self._sample_loader.load(self._get, indices, wants_all=False)
        for result in results:
            try:
                result.take()  # the first failure is raised, whether or not others were begun
            except BaseException as error:
                if not is_from_outside(error):
                    note_sample(error, describe_bad_index(result.index))
                raise
        return [result.value for result in results]

    def __getitem__(self, index: Any) -> Any:
        (sample,) = self.__getitems__([index])
        return sample


class MapFetcher(_MapDatasetFetcher):
    """torch's fetcher of a map-style dataset, whose errors say which sample failed."""

    dataset: Any
    collate_fn: Callable[[Any], Any]

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the batch of an index list, or of one key without batching."""
        dataset = self.dataset
        if not self.auto_collation:
            return self.collate_fn(self._load_each(dataset, [possibly_batched_index])[0])
        getitems = list_loader(dataset)
        if getitems is None:
            samples = self._load_each(dataset, possibly_batched_index)
        else:
            try:
                samples = getitems(possibly_batched_index)
            except BaseException as error:
                if not (isinstance(dataset, ConcurrentSamples) or is_from_outside(error)):
                    note_sample(error, describe_bad_list(possibly_batched_index))
                raise
        return collate(self.collate_fn, samples, possibly_batched_index)

    @staticmethod
    def _load_each(dataset: Any, indices: Iterable[Any]) -> list[Any]:
        try:
            keys = iter(indices)
        except TypeError as error:
            raise TypeError(
                f"{error}: batch_sampler should yield lists of indices, but it yielded "
                f"{describe_index(indices)}"
            ) from None
        samples = []
        for index in keys:
            try:
                sample = dataset[index]
            except BaseException as error:
                if not is_from_outside(error):
                    note_sample(error, describe_bad_index(index))
                raise
            samples.append(sample)
        return samples


def list_loader(dataset: Any) -> Any:
    """Return a dataset's ``__getitems__``; None if it has none, or one that loads one by one.

    The ``__getitems__`` of torch's ``Subset`` loads samples one by one if the dataset in the subset
    has no ``__getitems__``.
    """
    getitems = getattr(dataset, "__getitems__", None)
    if not getitems:
        return None
    inner = dataset
    while type(inner) is Subset and "__getitems__" not in vars(inner):
        inner = inner.dataset
    if inner is not dataset and not callable(getattr(inner, "__getitems__", None)):
        return None
    return getitems


class ShardFetcher(MapFetcher):
    """A fetcher that also makes a list of batches from a list of index lists."""

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the batch, or the shards' batches."""
        fetch = super().fetch
        if is_sharded(possibly_batched_index):
            return [fetch(shard) for shard in possibly_batched_index]
        return fetch(possibly_batched_index)


class StreamFetcher(_IterableDatasetFetcher):
    """torch's fetcher of an iterable dataset, whose errors say which sample failed.

    Attributes:
        is_resumed: Whether the dataset has loaded a state, so that samples were yielded before.
    """

    dataset_iter: Iterator[Any]
    collate_fn: Callable[[Any], Any]

    def __init__(
        self, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool
    ) -> None:
        super().__init__(dataset, auto_collation, collate_fn, drop_last)
        self.is_resumed = False
        # How many samples the iterator has yielded.
        self._count = 0

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the next batch, or the next sample without batching.

        Raises:
            StopIteration: At the end of the dataset.
        """
        if self.ended:
            raise StopIteration
        count = len(possibly_batched_index) if self.auto_collation else 1
        samples = self._take(count)
        if not self.auto_collation:
            if not samples:
                raise StopIteration
            return self.collate_fn(samples[0])
        self.ended = len(samples) < count
        if not samples or (self.drop_last and self.ended):
            raise StopIteration
        return collate(self.collate_fn, samples, None)

    def _take(self, count: int) -> list[Any]:
        """Return the iterator's next samples, fewer at its end."""
        iterator = self.dataset_iter
        samples: list[Any] = []
        add = samples.append
        try:
            for _ in range(count):
                add(next(iterator))
        except StopIteration:
            pass
        except BaseException as error:
            if not is_from_outside(error):
                number, is_here = self._count + len(samples), get_worker_info() is None
                note = describe_bad_number(number, is_resumed=self.is_resumed, is_here=is_here)
                note_sample(error, note)
            raise
        finally:
            self._count += len(samples)
        return samples


def is_from_outside(error: BaseException) -> bool:
    """Whether an exception comes from outside the dataset, such as from a signal handler.

    Always False in a worker process: a signal handler there is the dataset's own, such as an alarm
    that ends a slow sample.
    """
    return get_worker_info() is None and is_interruption(error)


def map_style_stop(error: StopIteration) -> RuntimeError:
    """Return the RuntimeError that replaces a StopIteration of a map-style dataset.

    torch's loader takes a StopIteration for the end of the epoch, and silently drops the other
    batches.
    """
    stop = RuntimeError(
        "a map-style dataset (or its collate_fn) raised StopIteration, which would silently end "
        "the epoch"
    )
    stop.__cause__ = error
    return stop
