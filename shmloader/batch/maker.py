"""Makes batches: in a worker process, in a worker thread, or in the main process.

A batch maker holds the parts of a loader that make batches: the dataset, the fetcher, the collate
function, the samples' random number generators, the policy for bad samples, and a timer. Only its
constructor puts these parts together, and callers differ only in the arguments that they pass. The
caller puts the batch into a slot or a queue, or returns it to the user.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from shmloader.batch.arrays import ArrayFetcher, Arrays, is_plain_data
from shmloader.batch.collator import Collator, Timer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.dataset_state import Keep
from shmloader.batch.failures import OnError, SampleReport
from shmloader.batch.fetch import FetchConfig, MapFetcher
from shmloader.batch.reader_fetcher import ReaderFetcher
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.sample_watch import SampleWatch
from shmloader.batch.stream import StreamFetcher
from shmloader.memory.writer import SlotWriter


class BatchMaker:
    """Makes the batches of a dataset. One thread at a time uses it.

    For an iterable dataset the constructor calls ``iter(dataset)``, unless the samples have random
    number generators whose epoch is not known yet.

    Attributes:
        fetcher: Loads samples and collates them.
        rng: The samples' random number generators; None without a seed.
        timer: Measures the parts of the work. The caller begins it with each ticket.

    Args:
        config: How a batch is fetched and collated.
        dataset: The dataset.
        collate_fn: Makes a batch of samples.
        on_error: How bad samples are handled. Ignored for an iterable dataset, since an iterator
            that has raised yields nothing more.
        where: Where this runs, in words, for the texts of failures.
        timer: The timer that measures the work.
        worker_id: Number of the worker that loads; 0 in the main process and in threads.
        epoch: Number of the epoch that begins; None if it becomes known with the first ticket.
        restores_rngs: Whether the process's random number generators are put back after each
            batch for which ``config.seed`` has set them.
        arrays: Gathers batches of the dataset while it consists of arrays; None if it does not.
        concurrent_fetcher: Loads several samples at once. With None, samples are loaded one after
            the other.
        sample_watch: Watches how long samples take; None if they may take any time.
        writer: In a worker process, the writer of its slots; else None.
        opened: The readers of a stream that threads share; None if each maker has its own.
    """

    fetcher: Any

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
        arrays: Arrays | None = None,
        concurrent_fetcher: ConcurrentFetcher | None = None,
        sample_watch: SampleWatch | None = None,
        writer: SlotWriter | None = None,
        opened: dict[int, Any] | None = None,
    ) -> None:
        self.timer, rng = timer, None
        if config.seed is not None:
            rng = SampleRng(
                config.seed,
                worker_id,
                epoch=epoch,
                is_iterable=config.is_iterable,
                sets_global=concurrent_fetcher is None and not config.is_threaded,
                restores_global=restores_rngs,
                draws_nothing=not callable(on_error) and is_plain_data(dataset),
            )
        self.rng = rng
        collator = Collator(
            collate_fn, timer, takes_list=config.auto_collation, writer=writer, rng=rng
        )
        common = config, dataset, collator, on_error, where
        if config.reads:
            self.rng = None  # each record has its own position
            self.fetcher = ReaderFetcher(*common, rng, sample_watch, opened)
        elif config.is_iterable:
            self.fetcher = StreamFetcher(config, dataset, collator, rng, sample_watch)
        else:
            self.fetcher = MapFetcher(*common, concurrent_fetcher, rng, sample_watch)
        #: Returns the report on the samples since the last call; None if there is none.
        self.pop_report: Callable[[], SampleReport | None] = self.fetcher.pop_report
        #: Returns the dataset's state, copied or pickled by its argument; None if it has none.
        self.save: Callable[[Keep[Any]], Any] = self.fetcher.save
        if arrays is not None:
            self.fetcher = ArrayFetcher(arrays, self.fetcher, timer, collate_fn)

    def make(self, indices: Any) -> Any:
        """Load the samples of a ticket and collate them.

        Raises:
            StopIteration: At the end of an iterable dataset.
            EmptyBatchError: If all samples failed and were to be skipped.
            BaseException: What the dataset, ``collate_fn`` or ``on_error`` raises.
        """
        if self.rng is None:
            batch = self.fetcher.fetch(indices)
        else:
            with self.rng.at(indices) as plain:
                batch = self.fetcher.fetch(plain)
        self.timer.fetched_ns = time.monotonic_ns()
        return batch

    def loading(self, indices: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a ticket's samples have their position."""
        return contextlib.nullcontext(indices) if self.rng is None else self.rng.at(indices)
