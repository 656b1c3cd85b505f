"""Fetches the samples of a batch, as torch's fetchers do, and collates them.

An error names the sample that failed. With an ``on_error`` other than "raise", the samples of a
map-style dataset that fail are skipped or replaced.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import get_worker_info

from shmloader.batch.collator import Collator
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import (
    BadSample,
    OnError,
    SampleReport,
    add_note,
    describe_index,
    describe_indices,
)
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.fingerprint import fingerprint, fingerprint_of
from shmloader.batch.sample_watch import SampleWatch
from shmloader.batch.samples import Get, Wrapper, list_loader, one_by_one, one_of
from shmloader.errors import SampleTimeoutError
from shmloader.forked_child import end_if_forked
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.sampling.steps import is_sharded

# Stands for a sample that failed and was not replaced.
_SKIPPED = object()


class EmptyBatchError(Exception):
    """All samples of a batch failed, and none was replaced. Never reaches the user."""


class MapFetcher:
    """Makes batches of a map-style dataset.

    A sample is bad if loading it raises an ``Exception``. Other exceptions of the dataset
    (``SystemExit``, ``KeyboardInterrupt``) and those of the collate function are always raised.

    Args:
        config: How batches are fetched.
        dataset: The dataset.
        collate: Makes a batch of samples and their indices.
        on_error: How bad samples are handled.
        where: Where this runs, in words, for the texts of failures.
        concurrent_fetcher: Loads several samples at once. With None, samples are loaded one after
            the other.
        wrappers: Load the samples, the last one first, by what the dataset has.
        begins: With ``concurrent_fetcher``: functions that are called for each sample, in order, in
            the sample's context, for instance to seed its generators.
    """

    def __init__(
        self,
        config: FetchConfig,
        dataset: Any,
        collate: Collator,
        on_error: OnError = "raise",
        where: str = "in the main process",
        concurrent_fetcher: ConcurrentFetcher | None = None,
        wrappers: Sequence[Wrapper] = (),
        begins: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._config, self._dataset, self._collate = config, dataset, collate
        self._on_error, self._where, self._is_strict = on_error, where, on_error == "raise"
        self._concurrent_fetcher, self._begins = concurrent_fetcher, begins
        self._report = SampleReport()
        self._pid = os.getpid()
        self._get = one_by_one(dataset)
        for load, _ in wrappers:
            self._get = functools.partial(load, self._get)
        self._wrappers = wrappers
        self._takes_lists = concurrent_fetcher is None and all(
            load_list is not None for _, load_list in wrappers
        )

    def take_report(self) -> SampleReport | None:
        """Return the report on the samples since the last call, whether or not fetching raised.

        Returns None if bad samples are neither skipped nor replaced.
        """
        if self._is_strict:
            return None
        report, self._report = self._report, SampleReport()
        return report

    def fetch(self, index: Any) -> Any:
        """Return a batch, or a list of the shards' batches.

        Args:
            index: An index list, one key without batching, or a list of the shards' index lists.

        Raises:
            EmptyBatchError: If all samples failed and were to be skipped. With ``keep_size``, also
                if all samples of one shard did.
            BaseException: What the dataset, ``on_error`` or the collate function raises.
        """
        if not self._is_strict:
            self._pid = os.getpid()
        if not (self._config.may_shard and is_sharded(index)):
            return self._fetch_batch(index)
        batches = []
        for shard in index:
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
            (sample,) = self._without_skipped(self._load_each(self._get, [index]))
            return self._collate(sample, [index])
        if not self._is_strict and isinstance(index, Iterator):
            index = list(index)  # it may be read twice
        # Asked for each batch, as torch does.
        getitems = list_loader(self._dataset) if self._takes_lists else None
        if getitems is None:
            samples = self._load_each(self._get, index)
        else:
            samples = self._load_list(getitems, index)
        if self._report.failed_count and type(samples) is list:
            good = self._without_skipped(samples)
            if len(good) < len(samples):
                index = [at for at, one in zip(index, samples, strict=True) if one is not _SKIPPED]
            samples = good
        return self._collate(samples, index)

    def _load_list(self, getitems: Get, indices: Any) -> Any:
        """Load all samples by one call. If that fails and bad samples are tolerated, load each."""
        for _, load_list in self._wrappers:
            assert load_list is not None
            getitems = functools.partial(load_list, getitems)
        try:
            samples = getitems(indices)
        except BaseException as error:
            if is_from_outside(error):
                raise
            if self._is_strict or not isinstance(error, Exception):
                what = describe_indices(indices)
                add_note(error, f"One call of __getitems__ for {what} failed.")
                raise
            end_if_forked(self._pid)
        else:
            self._report.sample_count += len(indices) if isinstance(indices, Sized) else 1
            return samples
        # This shows which sample failed.
        return self._load_each(functools.partial(one_of, getitems), indices)

    def _load_each(self, get: Get, indices: Iterable[Any]) -> list[Any]:
        """Return a sample for each index; ``_SKIPPED`` for one that failed and is not replaced."""
        try:
            keys = iter(indices)
        except TypeError as error:
            raise TypeError(
                f"{error}: batch_sampler should yield lists of indices, but it yielded "
                f"{describe_index(indices)}"
            ) from None
        samples: list[Any] = []
        report, add, fetcher = self._report, samples.append, self._concurrent_fetcher
        if fetcher is not None:
            for result in fetcher.load(get, keys, self._begins, wants_all=not self._is_strict):
                report.sample_count += 1
                try:
                    sample = result.take()
                except BaseException as error:
                    if not self._is_bad(result.index, error):
                        raise
                    sample = result.context.run(self._replacement, result.index, error)
                add(sample)
            return samples
        for index in keys:
            report.sample_count += 1
            try:
                sample = get(index)
            except BaseException as error:
                if not self._is_bad(index, error):
                    raise
                sample = self._replacement(index, error)
            add(sample)
        return samples

    def _is_bad(self, index: Any, error: BaseException) -> bool:
        """Whether an exception of a sample is not raised. One that is raised gets a note."""
        if is_from_outside(error):
            return False
        if not self._is_strict and isinstance(error, Exception):
            return True
        add_note(error, f"The sample of index {describe_index(index)} failed.")
        return False

    def _replacement(self, index: Any, error: Any) -> Any:
        """Record a bad sample, and return its replacement or ``_SKIPPED``.

        Called while the sample's exception is being handled.
        """
        end_if_forked(self._pid)
        self._report.add(BadSample.caught(index, self._where))
        if not callable(self._on_error):
            return _SKIPPED
        try:
            return self._on_error(index, error)
        except BaseException as raised:
            if not is_from_outside(raised):
                what = f"the sample of index {describe_index(index)}"
                add_note(raised, f"It was raised by on_error for {what}.")
            raise

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


def _copy(sample: Any) -> Any:
    """Copy a sample, since collate may change samples in place, for instance remove a field."""
    with Suppressed(Exception):  # a sample that cannot be copied is used twice
        return copy.deepcopy(sample)
    return sample


class StreamFetcher:
    """Makes batches of an iterable dataset.

    Args:
        config: How batches are fetched.
        dataset: The dataset.
        dataset_iter: The iterator of its samples.
        collate: Makes a batch of samples.
        watch: Watches how long samples take; None if they may take any time.

    Attributes:
        dataset: The dataset.
        dataset_iter: The iterator.
        ended: Whether the iterator has no further sample.
        is_resumed: Whether the dataset has loaded a state, so that samples were yielded before.
        fingerprint: Fingerprint of the newest batch; None until its samples were read.
        only_reads: Whether batches are read but not collated.
    """

    def __init__(
        self,
        config: FetchConfig,
        dataset: Any,
        dataset_iter: Iterator[Any],
        collate: Collator,
        watch: SampleWatch | None = None,
    ) -> None:
        self.dataset, self.dataset_iter = dataset, dataset_iter
        self._config, self._collate, self._watch = config, collate, watch
        self.ended = self.is_resumed = self.only_reads = False
        self.fingerprint: int | None = None
        # How many samples the iterator has yielded.
        self._count = 0
        # Whether a sample hung: after that there are none, as after an exception of a generator.
        self._has_hung = False

    def fetch(self, indices: Any) -> Any:
        """Return the next batch, or the next sample without batching.

        Raises:
            StopIteration: At the end of the dataset.
        """
        self.fingerprint = None
        if self.ended or self._has_hung:
            raise StopIteration
        is_batch = self._config.auto_collation
        count = len(indices) if is_batch else 1
        samples = self._next(count)
        if is_batch:
            self.ended = len(samples) < count
        if not samples or (self.ended and self._config.drop_last):
            raise StopIteration
        whole = samples if is_batch else samples[0]
        self.fingerprint = fingerprint_of(samples) if is_batch else fingerprint(whole)
        return None if self.only_reads else self._collate(whole)

    def _next(self, count: int) -> list[Any]:
        """Return the iterator's next samples, fewer at its end."""
        iterator, watch = self.dataset_iter, self._watch
        samples: list[Any] = []
        add = samples.append
        try:
            for _ in range(count):
                add(next(iterator) if watch is None else watch.load_next(iterator))
        except StopIteration:
            pass
        except BaseException as error:
            self._has_hung = isinstance(error, SampleTimeoutError)
            if not is_from_outside(error):
                number, where = self._count + len(samples), " in this worker"
                add_note(
                    error,
                    f"The dataset's iterator failed at sample {number}, counted from 0"
                    f"{where if get_worker_info() is not None else ''} since "
                    f"{'its state was loaded' if self.is_resumed else 'the epoch began'}.",
                )
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
