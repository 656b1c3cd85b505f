"""Loads the samples of a batch as torch's fetchers do, or with tolerance for bad samples."""

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal, NamedTuple

from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from shmloader.batch.concurrent_fetcher import ConcurrentFetcher, SampleResult
from shmloader.batch.failures import (
    BadSample,
    SampleReport,
    describe_bad_index,
    describe_bad_list,
    describe_bad_number,
    describe_bad_replacement,
    describe_index,
    note_sample,
)
from shmloader.batch.ragged import collate
from shmloader.grammar import described_type
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.probing import probe
from shmloader.sampling.steps import is_sharded

#: How a sample that fails is handled. A function gets the sample's index and the exception, and
#: returns another sample.
OnError = Literal["raise", "skip"] | Callable[[Any, Exception], Any]

# Stands for a sample that failed and was not replaced.
_SKIPPED = object()


class EmptyBatchError(Exception):
    """All samples of a batch failed and none was replaced. Never reaches the user."""


class FetchConfig(NamedTuple):
    """How batches are made of a dataset: the part of the configuration that crosses to workers.

    Attributes:
        is_iterable: Whether the dataset is an IterableDataset.
        auto_collation: Whether a ticket's index is a list of keys rather than one key.
        drop_last: Whether the last batch of an iterable dataset is dropped if it is short.
        keep_size: Whether a skipped sample is replaced by a good one of its batch, since other
            ranks or shards expect batches of the same size.
        may_shard: Whether a ticket's index may be a list of index lists, one for each shard, which
            makes a list of batches.
        seed: Seed of the samples' own random number generators; None if they have none.
        snapshot_every: A stateful dataset's state is saved after every so many batches of a
            worker; 0 means never.
        is_persistent: Whether workers persist for further epochs.
        concurrency: How many samples of a batch are loaded at once in a worker; None if the
            worker's own thread loads one after the other.
        sample_timeout_s: The longest time that a sample may take, in seconds; None for no limit.
    """

    is_iterable: bool
    auto_collation: bool
    drop_last: bool
    keep_size: bool = False
    may_shard: bool = False
    seed: int | None = None
    snapshot_every: int = 0
    is_persistent: bool = False
    concurrency: int | None = None
    sample_timeout_s: float | None = None

    @property
    def sets_global_rngs(self) -> bool:
        """Whether a sample can seed the process's generators: not if several are loaded at once."""
        return self.concurrency is None

    def make_concurrent_fetcher(self) -> ConcurrentFetcher | None:
        """Return a new fetcher that the caller closes, or None without ``concurrency``."""
        return None if self.concurrency is None else ConcurrentFetcher(self.concurrency)

    def make_fetcher(
        self,
        dataset: object,
        collate_fn: Callable[[Any], Any],
        on_error: OnError = "raise",
        where: str = "in the main process",
        sample_loader: "SampleLoader | None" = None,
    ) -> Any:
        """Return a fetcher. For an iterable dataset, torch's fetcher calls ``iter(dataset)`` now.

        Args:
            dataset: The dataset.
            collate_fn: Makes a batch of samples.
            on_error: How bad samples are handled; any value but "raise" makes a
                :class:`TolerantFetcher`. Ignored for an iterable dataset, since an iterator that
                has raised yields nothing more.
            where: Where this runs, for the texts of errors.
            sample_loader: Loads several samples at once; None loads one after the other.
        """
        if on_error != "raise" and not self.is_iterable:
            return TolerantFetcher(self, dataset, collate_fn, on_error, where, sample_loader)
        if sample_loader is not None:
            dataset = _ConcurrentSamples(dataset, sample_loader)
        kind: Any = ShardFetcher if self.may_shard else MapFetcher
        if self.is_iterable:
            kind = StreamFetcher
        return kind(dataset, self.auto_collation, collate_fn, self.drop_last)


def one_by_one(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that loads a sample by ``__getitem__``, or ``__getitems__`` without it."""
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
        begins: Called for each sample, in order, in the sample's context; to seed its generators,
            for instance.
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


class _ConcurrentSamples:
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
                if not _is_from_outside(error):
                    note_sample(error, describe_bad_index(result.index))
                raise
        return [result.value for result in results]

    def __getitem__(self, index: Any) -> Any:
        (sample,) = self.__getitems__([index])
        return sample


class SwitchingDataset:
    """A map-style dataset that may step aside for a batch, so that its samples cost no more."""

    def for_batch(self) -> Any:
        """Return the dataset from which the samples of the next batch are loaded."""
        raise NotImplementedError


class MapFetcher(_MapDatasetFetcher):
    """torch's fetcher of a map-style dataset, whose errors say which sample failed."""

    dataset: Any
    collate_fn: Callable[[Any], Any]

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the batch of an index list, or of one key without batching."""
        dataset = self.dataset
        if isinstance(dataset, SwitchingDataset):
            dataset = dataset.for_batch()
        if not self.auto_collation:
            return self.collate_fn(self._load_each(dataset, [possibly_batched_index])[0])
        getitems = list_loader(dataset)
        if getitems is None:
            samples = self._load_each(dataset, possibly_batched_index)
        else:
            try:
                samples = getitems(possibly_batched_index)
            except BaseException as error:
                if not (isinstance(dataset, _ConcurrentSamples) or _is_from_outside(error)):
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
                if not _is_from_outside(error):
                    note_sample(error, describe_bad_index(index))
                raise
            samples.append(sample)
        return samples


def list_loader(dataset: Any) -> Any:
    """Return a dataset's ``__getitems__``; None if it has none, or loads one by one by it.

    torch's ``Subset`` does so if the dataset in it has no ``__getitems__``.
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
            if not _is_from_outside(error):
                number, is_here = self._count + len(samples), get_worker_info() is None
                note = describe_bad_number(number, is_resumed=self.is_resumed, is_here=is_here)
                note_sample(error, note)
            raise
        finally:
            self._count += len(samples)
        return samples


class TolerantFetcher:
    """Makes batches of a map-style dataset, and skips or replaces samples that fail.

    A sample is bad if loading it raises an ``Exception``. Other exceptions of the dataset
    (``SystemExit``, ``KeyboardInterrupt``) and those of ``collate_fn`` are raised.
    """

    def __init__(
        self,
        config: FetchConfig,
        dataset: object,
        collate_fn: Callable[[Any], Any],
        on_error: OnError,
        where: str,
        sample_loader: SampleLoader | None = None,
    ) -> None:
        self._sample_loader = sample_loader
        self._config = config
        self._dataset: Any = dataset
        self._collate_fn = collate_fn
        self._replace = on_error if callable(on_error) else None
        self._where = where
        self._report = SampleReport()

    def take_report(self) -> SampleReport:
        """Return the report on the samples since the last call, whether or not fetching raised."""
        report, self._report = self._report, SampleReport()
        return report

    def fetch(self, index: Any) -> Any:
        """Return the batch of an index list, or of one key without batching, or shards' batches.

        Raises:
            EmptyBatchError: If all samples failed and were to be skipped; with ``keep_size``, if
                that is so for any shard.
            BaseException: What ``collate_fn`` or ``on_error`` raises.
        """
        if self._config.may_shard and is_sharded(index):
            return self._fetch_batches(index)
        return self._fetch_batch(index)

    def _fetch_batches(self, shards: Iterable[Any]) -> list[Any]:
        """Return the batches of those shards that are not empty."""
        batches = []
        for shard in shards:
            try:
                batches.append(self._fetch_batch(shard))
            except EmptyBatchError:
                if self._config.keep_size:
                    raise
        if not batches:
            raise EmptyBatchError
        return batches

    def _fetch_batch(self, index: Any) -> Any:
        if not self._config.auto_collation:
            samples = self._without_skipped(self._load_each(self._get_one, [index]))
            return self._collate_fn(samples[0])
        getitems = getattr(self._dataset, "__getitems__", None)
        if getitems and self._sample_loader is None:
            return collate(self._collate_fn, self._load_by_getitems(getitems, index), index)
        samples = self._load_each(self._get_one, index)
        good = self._without_skipped(samples)
        if len(good) < len(samples):
            index = [at for at, one in zip(index, samples, strict=True) if one is not _SKIPPED]
        return collate(self._collate_fn, good, index)

    def _get_one(self, index: Any) -> Any:
        return self._dataset[index]

    def _load_at_once(self, sample_loader: SampleLoader, indices: Iterable[Any]) -> list[Any]:
        """Do as :meth:`_load_each`, several samples at once."""
        samples = []
        for result in sample_loader.load(one_by_one(self._dataset), indices, wants_all=True):
            self._report.sample_count += 1
            try:
                sample = result.take()
            except Exception as error:
                if _is_from_outside(error):
                    raise
                sample = result.context.run(self._replacement, result.index, error)
            samples.append(sample)
        return samples

    def _replacement(self, index: Any, error: Exception) -> Any:
        """Note a bad sample, whose exception is being handled; return another or ``_SKIPPED``."""
        self._report.note(BadSample.caught(index, self._where))
        if self._replace is None:
            return _SKIPPED
        try:
            return self._replace(index, error)
        except BaseException as raised:
            if not _is_from_outside(raised):
                note_sample(raised, describe_bad_replacement(index))
            raise

    def _load_by_getitems(self, getitems: Callable[[Any], Any], indices: Any) -> Any:
        """Load all samples by one call, or by one call for each if that fails."""
        if isinstance(indices, Iterator):
            indices = list(indices)  # it may be read twice
        try:
            samples = getitems(indices)
        except Exception as error:
            if _is_from_outside(error):
                raise
            # Loading them one by one shows which sample failed.
        else:
            self._report.sample_count += len(indices) if isinstance(indices, Sized) else 1
            return samples
        # The dataset need not have __getitem__.
        each = self._load_each(lambda index: getitems([index]), indices, _only_one)
        return self._without_skipped(each)

    def _load_each(
        self,
        load: Callable[[Any], Any],
        indices: Iterable[Any],
        unwrap: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Return a sample for each index; ``_SKIPPED`` for one that failed and is not replaced."""
        if self._sample_loader is not None:
            return self._load_at_once(self._sample_loader, indices)
        samples, report = [], self._report
        for index in indices:
            report.sample_count += 1
            try:
                sample = load(index)
            except Exception as error:
                if _is_from_outside(error):
                    raise
                samples.append(self._replacement(index, error))
            except BaseException as error:
                if not _is_from_outside(error):
                    note_sample(error, describe_bad_index(index))
                raise
            else:
                samples.append(sample if unwrap is None else unwrap(sample))
        return samples

    def _without_skipped(self, samples: list[Any]) -> list[Any]:
        """Return the samples without skipped ones, which ``keep_size`` replaces by a good one.

        Raises:
            EmptyBatchError: If all were skipped.
        """
        good = [sample for sample in samples if sample is not _SKIPPED]
        if len(good) == len(samples):
            return samples
        if not good:
            raise EmptyBatchError
        if not self._config.keep_size:
            return good
        return [_copy(good[0]) if sample is _SKIPPED else sample for sample in samples]


def _is_from_outside(error: BaseException) -> bool:
    """Whether an exception comes from outside the dataset, such as from a signal handler.

    Always False in a worker process: a signal handler there is the dataset's own, such as an alarm
    that ends a slow sample.
    """
    return get_worker_info() is None and is_interruption(error)


def _only_one(samples: Any) -> Any:
    """Return the sample in what ``__getitems__`` returned for one index.

    Raises:
        TypeError: If that is not a sequence of one sample.
    """
    if isinstance(samples, Mapping) or not isinstance(samples, Sized) or len(samples) != 1:
        raise TypeError(
            "__getitems__ failed for a batch, and for one index of it returned "
            f"{described_type(samples)} instead of a list of one sample, so the bad samples cannot "
            "be identified"
        )
    return samples[0]  # type: ignore[index]


def _copy(sample: Any) -> Any:
    """Copy a sample, since collate may change it: remove a field, or scale it in place."""
    with Suppressed(Exception):  # a sample that cannot be copied is used twice
        return copy.deepcopy(sample)
    return sample


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
