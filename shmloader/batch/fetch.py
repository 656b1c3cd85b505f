"""Loading a batch: torch's fetchers, one that bad samples do not stop, and our StopIteration."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Literal, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind

from shmloader.batch.bad_samples import BadSample, SampleReport
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher, SampleResult
from shmloader.batch.sample_rng import one_by_one
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.sampling.steps import is_sharded

#: What is done about a sample that fails; a function gets its index and its exception, and gives
#: a sample in its place.
OnError = Literal["raise", "skip"] | Callable[[Any, Exception], Any]

# Stands for a sample that failed and was not replaced.
_SKIPPED = object()


class EmptyBatchError(Exception):
    """All samples of a batch failed and none was replaced. Does not reach the user."""


class FetchConfig(NamedTuple):
    """How batches are made of a dataset: the part that crosses to the workers.

    Attributes:
        is_iterable: Whether the dataset is an IterableDataset.
        auto_collation: Whether an index is a list of keys, or one key.
        drop_last: Whether an iterable's last batch is left out when it is short.
        keep_size: Whether a skipped sample is replaced by a good one of its batch, since other
            ranks or shards count on as many.
        may_shard: Whether what is fetched may be a list of index lists: a list of batches.
        seed: Of the samples' own random streams; None if they have none.
        snapshot_every: After how many batches of a worker an iterable dataset's state is taken,
            if it has one; 0: never.
        is_persistent: Whether workers have further epochs.
        concurrency: How many samples of a batch are loaded at once in a worker; None: one after
            the other, on its own thread.
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

    @property
    def sets_global_streams(self) -> bool:
        """Whether the process's random streams can be set for a sample: not for several at once."""
        return self.concurrency is None

    def make_concurrent_fetcher(self) -> ConcurrentFetcher | None:
        """What loads several samples at once, if that is wanted; its owner closes it."""
        return None if self.concurrency is None else ConcurrentFetcher(self.concurrency)

    def make_fetcher(
        self,
        dataset: object,
        collate_fn: Callable[[Any], Any],
        on_error: OnError = "raise",
        where: str = "in the main process",
        sample_loader: "SampleLoader | None" = None,
    ) -> Any:
        """A fetcher of torch's, which calls ``iter(dataset)`` for an iterable one; or ours.

        Args:
            dataset: What to load from.
            collate_fn: Makes a batch of samples.
            on_error: Other than "raise", it makes a :class:`TolerantFetcher`. Not for an iterable
                dataset: an iterator that has raised gives nothing more.
            where: Where it runs, as the texts of failures have it.
            sample_loader: Loads several samples at once.
        """
        if on_error != "raise" and not self.is_iterable:
            return TolerantFetcher(self, dataset, collate_fn, on_error, where, sample_loader)
        if sample_loader is not None:
            dataset = _ConcurrentSamples(dataset, sample_loader)
        if self.may_shard:
            return ShardFetcher(dataset, self.auto_collation, collate_fn, self.drop_last)
        kind = _DatasetKind.Iterable if self.is_iterable else _DatasetKind.Map
        return _DatasetKind.create_fetcher(
            kind, dataset, self.auto_collation, collate_fn, self.drop_last
        )


class SampleLoader:
    """Loads several samples of a dataset at once, in order.

    Args:
        concurrent_fetcher: Does it.
        begin: Sets a sample's random stream, in its context; None: it has none of its own.
    """

    def __init__(
        self, concurrent_fetcher: ConcurrentFetcher, begin: Callable[[], None] | None = None
    ) -> None:
        self._concurrent_fetcher = concurrent_fetcher
        self._begin = begin

    def load(
        self, get: Callable[[Any], Any], indices: Iterable[Any], *, wants_all: bool
    ) -> list[SampleResult]:
        """See :meth:`ConcurrentFetcher.load`."""
        return self._concurrent_fetcher.load(get, indices, self._begin, wants_all=wants_all)


class _ConcurrentSamples:
    """A map-style dataset for torch's fetcher, which asks for a batch by ``__getitems__``."""

    def __init__(self, dataset: Any, sample_loader: SampleLoader) -> None:
        self._get = one_by_one(dataset)
        self._sample_loader = sample_loader

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        results = self._sample_loader.load(self._get, indices, wants_all=False)
        for result in results:
            result.take()  # the first that failed is raised, whether or not others were begun
        return [result.value for result in results]

    def __getitem__(self, index: Any) -> Any:
        (sample,) = self.__getitems__([index])
        return sample


class ShardFetcher(_MapDatasetFetcher):
    """torch's fetcher; where the index is a list of index lists, it makes a list of batches."""

    def fetch(self, possibly_batched_index: Any) -> Any:
        """The batch, or the batches."""
        fetch: Callable[[Any], Any] = super().fetch
        if is_sharded(possibly_batched_index):
            return [fetch(shard) for shard in possibly_batched_index]
        return fetch(possibly_batched_index)


class TolerantFetcher:
    """Makes batches of a map-style dataset, leaving out or replacing what fails.

    An ``Exception`` out of the dataset makes a bad sample; what else it raises (``SystemExit``,
    ``KeyboardInterrupt``), and what collate raises, is raised.
    """

    def __init__(
        self,
        plan: FetchConfig,
        dataset: object,
        collate_fn: Callable[[Any], Any],
        on_error: OnError,
        where: str,
        sample_loader: SampleLoader | None = None,
    ) -> None:
        self._sample_loader = sample_loader
        self._plan = plan
        self._dataset: Any = dataset
        self._collate_fn = collate_fn
        self._replace = on_error if callable(on_error) else None
        self._where = where
        self._report = SampleReport()

    def take_report(self) -> SampleReport:
        """What became of the samples since it was last asked: of one batch, raised or not."""
        report, self._report = self._report, SampleReport()
        return report

    def fetch(self, index: Any) -> Any:
        """The batch of these indices, or of this one without batching; or a list of batches.

        Raises:
            EmptyBatchError: If all samples failed and were to be skipped; of one batch of a list
                where none may be left out.
            BaseException: What collate or ``on_error`` raises.
        """
        if self._plan.may_shard and is_sharded(index):
            return self._fetch_batches(index)
        return self._fetch_batch(index)

    def _fetch_batches(self, shards: Iterable[Any]) -> list[Any]:
        """Those of which something is left."""
        batches = []
        for shard in shards:
            try:
                batches.append(self._fetch_batch(shard))
            except EmptyBatchError:
                if self._plan.keep_size:
                    raise
        if not batches:
            raise EmptyBatchError
        return batches

    def _fetch_batch(self, index: Any) -> Any:
        if not self._plan.auto_collation:
            return self._collate_fn(self._settle(self._load_each(self._get_one, [index]))[0])
        getitems = getattr(self._dataset, "__getitems__", None)
        if getitems and self._sample_loader is None:
            samples = self._load_together(getitems, index)
        else:
            samples = self._settle(self._load_each(self._get_one, index))
        return self._collate_fn(samples)

    def _get_one(self, index: Any) -> Any:
        return self._dataset[index]

    def _load_at_once(self, sample_loader: SampleLoader, indices: Iterable[Any]) -> list[Any]:
        """As :meth:`_load_each`."""
        samples = []
        for result in sample_loader.load(one_by_one(self._dataset), indices, wants_all=True):
            self._report.sample_count += 1
            try:
                sample = result.take()
            except Exception as error:
                if _is_from_outside(error):
                    raise
                sample = result.context.run(self._instead_of, result.index, error)
            samples.append(sample)
        return samples

    def _instead_of(self, index: Any, error: Exception) -> Any:
        """Note a bad sample that is being handled; what comes in its place, or ``_SKIPPED``."""
        self._report.note(BadSample.caught(index, self._where))
        return _SKIPPED if self._replace is None else self._replace(index, error)

    def _load_together(self, getitems: Callable[[Any], Any], indices: Any) -> Any:
        """By one call; one by one if that fails."""
        if isinstance(indices, Iterator):
            indices = list(indices)  # else nothing of it is left for a second look
        try:
            samples = getitems(indices)
        except Exception as error:
            if _is_from_outside(error):
                raise
            # Which of the samples it was shows when each is asked for.
        else:
            self._report.sample_count += len(indices) if isinstance(indices, Sized) else 1
            return samples
        # Not by __getitem__: a dataset need not have it.
        return self._settle(self._load_each(lambda index: getitems([index]), indices, _only_one))

    def _load_each(
        self,
        load: Callable[[Any], Any],
        indices: Iterable[Any],
        unwrap: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """A sample for each index; for one that failed what ``on_error`` gives, or ``_SKIPPED``."""
        if self._sample_loader is not None:
            return self._load_at_once(self._sample_loader, indices)
        samples = []
        for index in indices:
            self._report.sample_count += 1
            try:
                sample = load(index)
            except Exception as error:
                if _is_from_outside(error):
                    raise
                samples.append(self._instead_of(index, error))
            else:
                samples.append(sample if unwrap is None else unwrap(sample))
        return samples

    def _settle(self, samples: list[Any]) -> list[Any]:
        """The samples without those that were skipped, or with the first good one in their place.

        Raises:
            EmptyBatchError: If none is left.
        """
        good = [sample for sample in samples if sample is not _SKIPPED]
        if len(good) == len(samples):
            return samples
        if not good:
            raise EmptyBatchError
        if not self._plan.keep_size:
            return good
        return [_copy(good[0]) if sample is _SKIPPED else sample for sample in samples]


def _is_from_outside(error: Exception) -> bool:
    """Whether an exception is no bad sample, but for the program, out of a signal handler.

    Not so in a worker process, where a handler is the dataset's own: an alarm that ends a sample
    which takes too long, say.
    """
    return get_worker_info() is None and is_interruption(error)


def _only_one(samples: Any) -> Any:
    """The sample in what ``__getitems__`` gave for one index.

    Raises:
        TypeError: If that is not a sequence of one.
    """
    if isinstance(samples, Mapping) or not isinstance(samples, Sized) or len(samples) != 1:
        raise TypeError(
            "__getitems__ failed for a batch, and for one index of it gave no list of one sample "
            f"but a {type(samples).__name__}: bad samples cannot be told apart"
        )
    return samples[0]  # type: ignore[index]


def _copy(sample: Any) -> Any:
    """A sample of its own, since collate may change it: take a field out, scale it in place."""
    with Suppressed(Exception):  # what cannot be copied is there twice
        return copy.deepcopy(sample)
    return sample


def map_style_stop(error: StopIteration) -> RuntimeError:
    """What a StopIteration out of a map-style dataset becomes.

    torch's loader takes it for the end of the epoch and says nothing of the batches that are
    missing.
    """
    stop = RuntimeError(
        "a map-style dataset (or its collate_fn) raised StopIteration, which would have ended the "
        "epoch in silence"
    )
    stop.__cause__ = error
    return stop
