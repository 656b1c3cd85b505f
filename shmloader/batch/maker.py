"""Makes batches: in a worker process, in a worker thread, or in the main process.

A batch maker holds the parts of a loader that make batches: the dataset, torch's fetcher or one of
ours, the collate function, the samples' random number generators, the policy for bad samples, and a
timer. Only its constructor puts these parts together, and callers differ only in the arguments that
they pass. The caller puts the batch into a slot or a queue, or returns it to the user.
"""

import contextlib
import inspect
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from shmloader.batch.arrays import ArrayFetcher, no_gatherer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import OnError, SampleReport
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.fetchers import SampleLoader
from shmloader.batch.sample_rng import SampleRng, loading
from shmloader.batch.sample_watch import SampleWatch, WatchedIterator, WatchedSamples
from shmloader.batch.seeded_datasets import seed_samples
from shmloader.batch.timer import Timer
from shmloader.batch.tolerant_fetcher import TolerantFetcher
from shmloader.memory.collate import is_plain, packs
from shmloader.memory.gather import RowGatherer


class BatchMaker:
    """Makes the batches of a dataset. One thread at a time uses it.

    For an iterable dataset the constructor calls ``iter(dataset)``, unless the samples have random
    number generators whose epoch is not known yet.

    Attributes:
        fetcher: torch's fetcher, or one of ours, by which samples are loaded and collated.
        rng: The samples' random number generators; None without a seed.
        timer: Measures the parts of the work. The caller begins it with each ticket.

    Args:
        config: How a batch is fetched and collated.
        dataset: The dataset.
        collate_fn: Makes a batch of samples.
        on_error: How bad samples are handled.
        where: Where this runs, in words, for the texts of failures.
        timer: The timer that measures the work.
        worker_id: Number of the worker that loads; 0 in the main process and in threads.
        epoch: Number of the epoch that begins; None if it becomes known with the first ticket.
        restores_rngs: Whether the process's random number generators are put back after each
            batch for which ``config.seed`` has set them.
        find_gatherer: Returns the gatherer of the next batch of a dataset of arrays, or None. It is
            called only with ``config.takes_arrays``.
        concurrent_fetcher: Loads several samples at once. With None, samples are loaded one after
            the other.
        sample_watch: Watches how long samples take; None if they may take any time.
        watch_samples: A function that wraps the dataset after all other wrappers. The fetcher loads
            samples from its result. None for no such wrapper.
    """

    def __init__(
        self,
        config: FetchConfig,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        on_error: OnError = "raise",
        *,
        where: str,
        timer: Timer,
        worker_id: int = 0,
        epoch: int | None = None,
        restores_rngs: bool = False,
        find_gatherer: Callable[[], RowGatherer | None] = no_gatherer,
        concurrent_fetcher: ConcurrentFetcher | None = None,
        sample_watch: SampleWatch | None = None,
        watch_samples: Callable[[Any], Any] | None = None,
    ) -> None:
        self.timer = timer
        self.rng = rng = None
        if config.seed is not None:
            self.rng = rng = SampleRng(
                config.seed,
                worker_id,
                epoch=epoch,
                sets_global=config.sets_global_rngs,
                restores_global=restores_rngs,
            )
        # Packing a batch draws no random numbers. Seeding the batch's generators takes as long as
        # seeding a sample's, so the collate function seeds only where it does not pack.
        begin_collate: Callable[[Any], None] | None = None
        if rng is not None:
            begin_collate = rng.begin_collate
            if not config.is_iterable and packs(collate_fn):
                begin_collate, collate_fn.before = None, rng.begin_default_collate
            elif is_plain(collate_fn):
                begin_collate = rng.begin_default_collate
        if not config.is_iterable and concurrent_fetcher is None:
            collate_fn = _refusing_coroutines(collate_fn)
        collate_fn = timer.wrap(collate_fn, counts_items=config.auto_collation)
        if rng is not None:
            dataset, collate_fn = seed_samples(
                rng,
                dataset,
                collate_fn,
                begin_collate,
                is_iterable=config.is_iterable,
                on_error=on_error,
                begins_samples=concurrent_fetcher is None,
            )
        sample_loader = None
        if concurrent_fetcher is not None:
            begins = [] if rng is None else [rng.begin_sample]
            if sample_watch is not None:
                begins.append(sample_watch.begin_sample)
            sample_loader = SampleLoader(concurrent_fetcher, begins)
        if sample_watch is not None and not config.is_iterable:
            dataset = WatchedSamples(sample_watch, dataset)
        if watch_samples is not None:
            dataset = watch_samples(dataset)
        self.fetcher = config.make_fetcher(dataset, collate_fn, on_error, where, sample_loader)
        if sample_watch is not None and config.is_iterable:
            self.fetcher.dataset_iter = WatchedIterator(sample_watch, self.fetcher.dataset_iter)
        if config.takes_arrays:
            self.fetcher = ArrayFetcher(
                find_gatherer, self.fetcher, timer.count, may_shard=config.may_shard
            )

    def make(self, indices: Any) -> Any:
        """Load the samples of a ticket and collate them.

        Args:
            indices: The ticket's indices from the epoch's plan, with their position if the samples
                have random number generators of their own.

        Raises:
            StopIteration: At the end of an iterable dataset.
            EmptyBatchError: If all samples failed and were to be skipped.
            BaseException: What the dataset, ``collate_fn`` or ``on_error`` raises.
        """
        if self.rng is None:
            batch = self.fetcher.fetch(indices)
        else:
            with self.loading(indices) as plain:
                batch = self.fetcher.fetch(plain)
        self.timer.fetched()
        return batch

    def loading(self, indices: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that sets the position of a ticket's samples.

        Its ``with`` block gets the plain indices.
        """
        return loading(self.rng, indices)

    def take_report(self) -> SampleReport | None:
        """Return the report on the samples since the last call.

        Returns None if bad samples are neither skipped nor replaced.
        """
        fetcher = self.fetcher
        return fetcher.take_report() if isinstance(fetcher, TolerantFetcher) else None


def describe_coroutines(source: str) -> str:
    """Return the text of the error for samples that nothing awaits.

    Args:
        source: The object that the samples come from, in words.
    """
    return (
        f"{source} gives coroutines for samples, since __getitem__ is an async def: give "
        "fetch_concurrency=, the number of samples of a batch that are awaited at the same time"
    )


def _refusing_coroutines(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a collate function so that coroutines that it does not await raise a TypeError.

    A collate function that awaits its samples works as with torch.
    """

    def collate(samples: Any) -> Any:
        first = samples[0] if isinstance(samples, list) and samples else samples
        # The same test as inspect.iscoroutine(), without a call for each batch.
        if type(first) is not CoroutineType:
            return collate_fn(samples)
        # Copied now, since collate_fn may change the list.
        own = list(samples) if isinstance(samples, list) else [samples]
        batch, error = None, None
        try:
            batch = collate_fn(samples)
        except Exception as caught:
            if inspect.getcoroutinestate(first) != inspect.CORO_CREATED:
                raise
            error = caught
        if inspect.getcoroutinestate(first) != inspect.CORO_CREATED:
            return batch
        for sample in own:
            if inspect.iscoroutine(sample):
                sample.close()  # else Python warns that it was never awaited
        raise TypeError(describe_coroutines("the dataset")) from error

    return collate
