"""Fetches the samples of a batch of a map-style dataset, as torch does, and collates them.

An error names the sample that failed. With an ``on_error`` other than "raise", the samples of a
map-style dataset that fail are skipped or replaced.
"""

import copy
import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from shmloader.batch.collator import Collator
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher, SampleResult
from shmloader.batch.dataset_state import Keep, save_dataset
from shmloader.batch.failures import (
    BadSample,
    OnError,
    SampleReport,
    add_note,
    describe_index,
    describe_indices,
)
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.sample_watch import SampleWatch
from shmloader.grammar import described_type
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.messages import Unsaved
from shmloader.sampling.pieces import CutDataset

_T = TypeVar("_T")

#: Returns the sample of an index, or the samples of indices.
Get = Callable[[Any], Any]

# Stands for a sample that failed and was not replaced.
_SKIPPED = object()


class FetchConfig(NamedTuple):
    """How batches are made of a dataset: the part of the configuration that crosses to workers.

    Attributes:
        is_iterable: Whether the dataset is an IterableDataset.
        auto_collation: Whether a ticket's index is a list of keys rather than one key.
        drop_last: Whether the last batch of an iterable dataset is dropped if it is short.
        copies_good: Whether copies of a good sample take the places of skipped ones, since other
            ranks expect batches of the same size.
        seed: Seed of the samples' own random number generators; None if they have none.
        snapshot_every: After how many batches of a worker a stateful dataset's state is saved
            again. For a map-style dataset, any number but 0 means after every batch. 0 means never.
        is_persistent: Whether workers persist for further epochs.
        concurrency: How many samples of a batch are loaded at once in a worker; None if the
            worker's own thread loads them one after the other.
        sample_timeout_s: The longest time that a sample may take, in seconds; None for no limit.
        is_threaded: Whether workers are threads, which share the process's random number
            generators.
        takes_arrays: Whether indices may be arrays or ranges, and batches may be gathered: the
            dataset seems to consist of arrays, and loading samples runs no code of the user's.
        told_epoch: The number that workers' copies of the dataset were told by ``set_epoch()``
            before they were made; None if that is not known.
        reads: Whether the dataset is a stream of shards, whose batches tickets ask for.
    """

    is_iterable: bool
    auto_collation: bool
    drop_last: bool
    copies_good: bool = False
    seed: int | None = None
    snapshot_every: int = 0
    is_persistent: bool = False
    concurrency: int | None = None
    sample_timeout_s: float | None = None
    is_threaded: bool = False
    takes_arrays: bool = False
    told_epoch: int | None = None
    reads: bool = False

    def make_concurrent_fetcher(self) -> ConcurrentFetcher | None:
        """Return a new fetcher that the caller closes, or None without ``concurrency``."""
        return None if self.concurrency is None else ConcurrentFetcher(self.concurrency)


class EmptyBatchError(Exception):
    """All samples of a batch failed, and none was replaced. Never reaches the user."""


class NotSamplesError(TypeError):
    """A dataset of lists alone returns no list of samples, so that none can be loaded by itself."""


class MapFetcher:
    """Makes batches of a map-style dataset.

    A sample is bad if loading it raises an ``Exception``. Other exceptions of the dataset
    (``SystemExit``, ``KeyboardInterrupt``) and those of the collate function are always raised. See
    :class:`~shmloader.batch.maker.BatchMaker` for the arguments.
    """

    def __init__(
        self,
        config: FetchConfig,
        dataset: Any,
        collate: Collator,
        on_error: OnError = "raise",
        where: str = "in the main process",
        concurrent_fetcher: ConcurrentFetcher | None = None,
        rng: SampleRng | None = None,
        watch: SampleWatch | None = None,
    ) -> None:
        self._config, self._dataset, self._collate = config, dataset, collate
        self._on_error, self._where, self._is_strict = on_error, where, on_error == "raise"
        # None if bad samples are neither skipped nor replaced.
        self._report = None if self._is_strict else SampleReport()
        self._concurrent_fetcher, self._rng = concurrent_fetcher, rng
        # What is called for each sample, in order, before several are loaded at once.
        self._begins = [one.begin_sample for one in (rng, watch) if one is not None]
        # Otherwise each sample is loaded by itself, even if the dataset has ``__getitems__``.
        self._loads_lists = rng is None and concurrent_fetcher is None
        self._watch, self._pid = watch, 0
        get = item_getter(dataset)
        if rng is not None and concurrent_fetcher is None:
            get = functools.partial(rng.load, get)
        self._get = get if watch is None else functools.partial(watch.load, get)

    def pop_report(self) -> SampleReport | None:
        """Return the report on the samples since the last call; None if bad samples are raised."""
        report = self._report
        if report is not None:
            self._report = SampleReport()
        return report

    def save(self, keep: Keep[_T]) -> _T | Unsaved | None:
        """Return the state of the dataset, copied or pickled by ``keep``; None if it has none."""
        return save_dataset(self._dataset, keep)

    def fetch(self, index: Any) -> Any:
        """Return the batch of an index list or one key.

        Raises:
            EmptyBatchError: If all samples failed and were to be skipped.
            BaseException: What the dataset, ``on_error`` or the collate function raises.
        """
        is_batch, self._pid = self._config.auto_collation, os.getpid()
        if not is_batch:
            index = [index]
        elif not self._is_strict and isinstance(index, Iterator):
            index = list(index)  # it may be read twice
        # Asked for each batch, as torch does.
        getitems = list_getter(self._dataset) if is_batch and self._loads_lists else None
        if getitems is None:
            samples = self._load_each(self._get, index)
        else:
            samples = self._load_list(getitems, index)
        if self._report is not None and self._report.failed_count and type(samples) is list:
            samples, index = self._without_skipped(samples, index)
        return self._collate(samples if is_batch else samples[0], index)

    def collate(self, samples: Any, indices: Any) -> Any:
        """Return the batch of samples that were loaded elsewhere, and use no random numbers."""
        if self._rng is not None:
            for _ in samples:
                self._rng.begin_sample()
        return self._collate(samples, indices)

    def _load_list(self, getitems: Get, indices: Any) -> Any:
        """Load samples by one call of the dataset's ``__getitems__``."""
        if self._watch is not None:
            getitems = functools.partial(self._watch.load_list, getitems)
        try:
            samples = getitems(indices)
            if self._report is not None:
                self._report.sample_count += len(indices) if isinstance(indices, Sized) else 1
            return samples
        except BaseException as error:
            what = f"One call of __getitems__ for {describe_indices(indices)}"
            if not self._is_bad(error, what):
                raise
            reason = error
        try:
            # This shows which sample failed.
            return self._load_each(self._get, indices)
        except NotSamplesError as error:
            raise error from reason
        finally:
            del reason  # whose traceback refers to this frame

    def _load_each(self, get: Get, indices: Iterable[Any]) -> list[Any]:
        """Return a sample for each index; ``_SKIPPED`` for one that failed and is not replaced."""
        try:
            keys: Iterable[Any] = iter(indices)
        except TypeError as error:
            raise TypeError(
                f"{error}: batch_sampler should yield lists of indices, but it yielded "
                f"{describe_index(indices)}"
            ) from None
        samples: list[Any] = []
        report, add = self._report, samples.append
        fetcher = self._concurrent_fetcher
        if fetcher is not None:
            keys = fetcher.load(get, keys, self._begins)
            get = SampleResult.get
        for key in keys:
            if report is not None:
                report.sample_count += 1
            try:
                sample = get(key)
            except BaseException as error:
                index = key if fetcher is None else key.index
                if not self._is_bad(error, f"The {_named(index)}"):
                    raise
                run = operator.call if fetcher is None else key.context.run
                sample = run(self._replacement, index, error)
            add(sample)
        return samples

    def _is_bad(self, error: BaseException, what: str) -> bool:
        """Whether an exception of a sample is not raised. One that is raised gets a note."""
        if is_from_outside(error):
            return False
        if os.getpid() != self._pid:  # a child that a sample has forked
            os._exit(1)
        may_skip = isinstance(error, Exception) and not isinstance(error, NotSamplesError)
        if may_skip and not self._is_strict:
            return True
        add_note(error, f"{what} failed.")
        return False

    def _replacement(self, index: Any, error: Any) -> Any:
        """Record a bad sample, whose error is being handled; return what replaces it."""
        assert self._report is not None
        self._report.add(BadSample.caught(index, self._where))
        if not callable(self._on_error):
            return _SKIPPED
        try:
            return self._on_error(index, error)
        except BaseException as raised:
            if not is_from_outside(raised):
                add_note(raised, f"It was raised by on_error for the {_named(index)}.")
            raise

    def _without_skipped(self, samples: list[Any], index: Any) -> tuple[list[Any], Any]:
        """Return the samples without skipped ones, and their indices.

        With ``copies_good``, copies of the first good sample take the places of skipped ones.
        """
        good = [sample for sample in samples if sample is not _SKIPPED]
        if len(good) == len(samples):
            return samples, index
        if not good:
            raise EmptyBatchError
        if self._config.copies_good:
            return [_copy(good[0]) if one is _SKIPPED else one for one in samples], index
        return good, [at for at, one in zip(index, samples, strict=True) if one is not _SKIPPED]


def _named(index: Any) -> str:
    return f"sample of index {describe_index(index)}"


def _copy(sample: Any) -> Any:
    """Copy a sample, since collate may change samples in place, for instance remove a field."""
    with Suppressed(Exception):  # a sample that cannot be copied is used twice
        return copy.deepcopy(sample)
    return sample


def _innermost(dataset: Any) -> Any:
    """Return the dataset that loads what a Subset or a CutDataset passes on to it."""
    while type(dataset) in (Subset, CutDataset) and "__getitems__" not in vars(dataset):
        dataset = dataset.dataset
    return dataset


def item_getter(dataset: Any) -> Get:
    """Return what loads one sample: as a list of one if the dataset has only ``__getitems__``."""
    own = getattr(type(_innermost(dataset)), "__getitem__", None)
    if own in (None, Dataset.__getitem__) and list_getter(dataset) is not None:
        return functools.partial(_load_list_of_one, dataset)
    return functools.partial(operator.getitem, dataset)


def _load_list_of_one(dataset: Any, index: Any) -> Any:
    samples = dataset.__getitems__([index])
    if isinstance(samples, Sequence | torch.Tensor | np.ndarray) and len(samples) == 1:
        return samples[0]
    raise NotSamplesError(
        f"__getitems__ of the dataset returned {described_type(samples)} for a list of one index. "
        "Samples are loaded one by one with seed=, on_error=, fetch_concurrency= and in "
        "ShardedDataLoader. It has to return a list of one sample, or the dataset needs a "
        "__getitem__."
    )


def list_getter(dataset: Any) -> Get | None:
    """Return a dataset's ``__getitems__``; None if it has none, or one that loads one by one.

    Those of torch's ``Subset`` and of ``CutDataset`` do so if the dataset in them has none.
    """
    getitems: Get | None = getattr(dataset, "__getitems__", None)
    return getitems if getitems and getattr(_innermost(dataset), "__getitems__", None) else None


def map_style_stop(error: StopIteration) -> RuntimeError:
    """Return the RuntimeError that replaces a StopIteration of a map-style dataset.

    torch's loader silently drops the other batches.
    """
    stop = RuntimeError(
        "a map-style dataset (or its collate_fn) raised StopIteration, which would silently end "
        "the epoch"
    )
    stop.__cause__ = error
    return stop


def is_from_outside(error: BaseException) -> bool:
    """Whether an exception comes from outside the dataset, such as from a signal handler.

    Always False in a worker process: a signal handler there is the dataset's own.
    """
    return get_worker_info() is None and is_interruption(error)
