"""What a thread is given to load, how it does, and what comes of it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.arrays import ArrayFetcher, ArraysHere
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import EmptyBatchError, FetchConfig, OnError, one_by_one
from shmloader.batch.maker import BatchMaker
from shmloader.batch.sample_rng import SampleRng
from shmloader.batch.timer import Timer, bytes_of
from shmloader.pools.answers import Answer, Batch, Empty, Failure


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ThreadConfig:
    """How batches are made. Goes with each task, until that is done.

    Attributes:
        fetch: How a batch is fetched and collated.
        dataset: What is loaded from.
        collate_fn: Makes a batch of samples.
        on_error: What is done about bad samples.
        arrays: Gathers batches, where the dataset may be nothing but arrays.

    All of it may hold the loader, whose end must end the threads: so no thread that waits holds it.
    """

    fetch: FetchConfig
    dataset: Any
    collate_fn: Callable[[Any], Any]
    on_error: OnError
    arrays: ArraysHere | None = None


@dataclass(eq=False, slots=True)
class ThreadTask:
    """A ticket, as a thread gets it.

    Attributes:
        seq: Its number in the epoch.
        epoch: Number of the epoch.
        indices: What the sampler gave.
        config: How the batch is made; None when it is.
        is_dropped: Nobody wants its batch any more.
    """

    seq: int
    epoch: int
    indices: object
    config: ThreadConfig | None
    is_dropped: bool = False


class _Dropped(BaseException):
    """Ends the loading of a batch that nobody wants."""


class _Samples:
    """A task's dataset, as long as somebody wants the batch."""

    def __init__(self, task: ThreadTask, dataset: Any) -> None:
        self._task = task
        self._dataset = dataset
        self._get = one_by_one(dataset)

    def __getitem__(self, index: Any) -> Any:
        if self._task.is_dropped:
            raise _Dropped
        return self._get(index)

    @property
    def __getitems__(self) -> Any:
        """The dataset's own, if it has one."""
        return getattr(self._dataset, "__getitems__", None)


def load(
    task: ThreadTask,
    config: ThreadConfig,
    where: str,
    concurrent_fetcher: ConcurrentFetcher | None = None,
) -> Answer | None:
    """Make a task's batch.

    Args:
        task: It.
        config: How batches are made.
        where: Where this runs, as the texts of failures have it.
        concurrent_fetcher: Loads several samples at once.

    Returns:
        What came of it; None if it was dropped meanwhile.
    """
    fetch, timer = config.fetch, Timer()
    maker = BatchMaker(
        fetch,
        config.dataset,
        config.collate_fn,
        config.on_error,
        where=where,
        timer=timer,
        rng=None if fetch.seed is None else SampleRng(fetch.seed, sets_global=False),
        concurrent_fetcher=concurrent_fetcher,
        watch_samples=functools.partial(_Samples, task),
    )
    if config.arrays is not None:
        maker.fetcher = ArrayFetcher(
            config.arrays.find_gatherer, maker.fetcher, timer.count, may_shard=fetch.may_shard
        )
    batch, error = None, None
    try:
        batch = maker.make(task.indices)
    except _Dropped:
        return None
    except EmptyBatchError:
        return Empty(maker.take_report())
    except BaseException:  # noqa: BLE001 - handed on
        error = RemoteError.caught(where)
    if error is not None:
        return Failure(error, report=maker.take_report())
    times, nbytes = timer.read(), bytes_of(batch)
    return Batch(batch, report=maker.take_report(), times=times, nbytes=nbytes)
