"""Fetches the samples of a batch, and skips or replaces those that fail."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

from shmloader.batch.failures import (
    BadSample,
    OnError,
    SampleReport,
    describe_bad_index,
    describe_bad_replacement,
)
from shmloader.batch.fetchers import (
    EmptyBatchError,
    SampleLoader,
    is_from_outside,
    one_by_one,
)
from shmloader.batch.ragged import collate
from shmloader.batch.remote_error import note_sample
from shmloader.forked_child import end_if_forked
from shmloader.grammar import described_type
from shmloader.interruptions import Suppressed
from shmloader.sampling.steps import is_sharded

if TYPE_CHECKING:
    from shmloader.batch.fetch import FetchConfig  # that module imports this one

# Stands for a sample that failed and was not replaced.
_SKIPPED = object()


class TolerantFetcher:
    """Makes batches of a map-style dataset, and skips or replaces samples that fail.

    A sample is bad if loading it raises an ``Exception``. Other exceptions of the dataset
    (``SystemExit``, ``KeyboardInterrupt``) and those of ``collate_fn`` are raised.

    Args:
        config: How batches are fetched.
        dataset: The map-style dataset.
        collate_fn: Makes a batch of samples.
        on_error: "skip", or a function that returns a replacement; see :data:`OnError`.
        where: Where this runs, in words, for the texts of failures.
        sample_loader: Loads several samples at once. With None, samples are loaded one after the
            other.
    """

    def __init__(
        self,
        config: "FetchConfig",
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
        self._pid = os.getpid()

    def take_report(self) -> SampleReport:
        """Return the report on the samples since the last call, whether or not fetching raised."""
        report, self._report = self._report, SampleReport()
        return report

    def fetch(self, index: Any) -> Any:
        """Return a batch, or a list of the shards' batches.

        Args:
            index: An index list, one key without batching, or a list of the shards' index lists.

        Raises:
            EmptyBatchError: If all samples failed and were to be skipped. With ``keep_size``, also
                if all samples of one shard did.
            BaseException: What ``collate_fn`` or ``on_error`` raises.
        """
        self._pid = os.getpid()
        if self._config.may_shard and is_sharded(index):
            return self._fetch_batches(index)
        return self._fetch_batch(index)

    def _fetch_batches(self, shards: Iterable[Any]) -> list[Any]:
        """Return the batches of the shards of which at least one sample is left."""
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
        if isinstance(index, Iterator):
            index = list(index)  # it is read twice
        samples = self._load_each(self._get_one, index)
        good = self._without_skipped(samples)
        if len(good) < len(samples):
            index = [at for at, one in zip(index, samples, strict=True) if one is not _SKIPPED]
        return collate(self._collate_fn, good, index)

    def _get_one(self, index: Any) -> Any:
        return self._dataset[index]

    def _load_at_once(self, sample_loader: SampleLoader, indices: Iterable[Any]) -> list[Any]:
        """Load samples as :meth:`_load_each` does, but several at once."""
        samples = []
        for result in sample_loader.load(one_by_one(self._dataset), indices, wants_all=True):
            self._report.sample_count += 1
            try:
                sample = result.take()
            except Exception as error:
                if is_from_outside(error):
                    raise
                sample = result.context.run(self._replacement, result.index, error)
            samples.append(sample)
        return samples

    def _replacement(self, index: Any, error: Exception) -> Any:
        """Note a bad sample, and return its replacement or ``_SKIPPED``.

        Called while the sample's exception is being handled.
        """
        end_if_forked(self._pid)
        self._report.note(BadSample.caught(index, self._where))
        if self._replace is None:
            return _SKIPPED
        try:
            return self._replace(index, error)
        except BaseException as raised:
            if not is_from_outside(raised):
                note_sample(raised, describe_bad_replacement(index))
            raise

    def _load_by_getitems(self, getitems: Callable[[Any], Any], indices: Any) -> Any:
        """Load all samples by one call. If that fails, load each by a call of its own."""
        if isinstance(indices, Iterator):
            indices = list(indices)  # it may be read twice
        try:
            samples = getitems(indices)
        except Exception as error:
            if is_from_outside(error):
                raise
            end_if_forked(self._pid)
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
                if is_from_outside(error):
                    raise
                samples.append(self._replacement(index, error))
            except BaseException as error:
                if not is_from_outside(error):
                    note_sample(error, describe_bad_index(index))
                raise
            else:
                samples.append(sample if unwrap is None else unwrap(sample))
        return samples

    def _without_skipped(self, samples: list[Any]) -> list[Any]:
        """Return the samples without skipped ones.

        With ``keep_size``, copies of the first good sample take the places of skipped ones.

        Raises:
            EmptyBatchError: If all samples were skipped.
        """
        good = [sample for sample in samples if sample is not _SKIPPED]
        if len(good) == len(samples):
            return samples
        if not good:
            raise EmptyBatchError
        if not self._config.keep_size:
            return good
        return [_copy(good[0]) if sample is _SKIPPED else sample for sample in samples]


def _only_one(samples: Any) -> Any:
    """Return the one sample in the list that ``__getitems__`` returned for one index.

    Raises:
        TypeError: If ``samples`` is not a sequence of one sample.
    """
    if isinstance(samples, Mapping) or not isinstance(samples, Sized) or len(samples) != 1:
        raise TypeError(
            "__getitems__ failed for a batch, and for one index of it returned "
            f"{described_type(samples)} instead of a list of one sample, so the bad samples cannot "
            "be identified"
        )
    return samples[0]  # type: ignore[index]


def _copy(sample: Any) -> Any:
    """Copy a sample, since collate may change samples in place, for instance remove a field."""
    with Suppressed(Exception):  # a sample that cannot be copied is used twice
        return copy.deepcopy(sample)
    return sample
