"""Makes the batch of one task on a worker thread."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shmloader.batch.arrays import no_gatherer
from shmloader.batch.concurrent_fetcher import ConcurrentFetcher
from shmloader.batch.failures import OnError
from shmloader.batch.fetch import FetchConfig
from shmloader.batch.fetchers import EmptyBatchError, list_loader, one_by_one
from shmloader.batch.maker import BatchMaker
from shmloader.batch.remote_error import RemoteError
from shmloader.batch.sample_watch import NO_SAMPLE, SampleWatch
from shmloader.batch.timer import Timer, bytes_of
from shmloader.forked_child import end_if_forked
from shmloader.memory.gather import RowGatherer
from shmloader.pools.answers import Answer, Batch, Empty, Failure


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ThreadConfig:
    """How batches are made. A task refers to it until a thread takes the task.

    A waiting thread must not refer to it: its parts may refer to the loader, and freeing the loader
    must end the threads.

    Attributes:
        fetch: How a batch is fetched and collated.
        dataset: The dataset.
        collate_fn: Makes a batch of samples.
        on_error: How bad samples are handled.
        init_fn: Called in each thread with its number, before its first batch; None for no call.
        find_gatherer: Returns the gatherer of the next batch's rows if the dataset consists of
            arrays; else None.
    """

    fetch: FetchConfig
    dataset: Any
    collate_fn: Callable[[Any], Any]
    on_error: OnError
    init_fn: Callable[[int], Any] | None = None
    find_gatherer: Callable[[], RowGatherer | None] = no_gatherer


@dataclass(eq=False, slots=True)
class ThreadTask:
    """A ticket as it is sent to the threads.

    Attributes:
        seq: The ticket's number in the epoch.
        epoch: Number of the epoch.
        indices: The index batch that the sampler yielded.
        config: How the batch is made; None once a thread has taken the task.
        hung: Samples of the batch that are to raise an error; see :class:`SampleWatch`.
        is_dropped: Whether the batch is no longer needed.
        sample: The number of the sample in work and its deadline, with a ``sample_timeout``.
    """

    seq: int
    epoch: int
    indices: object
    config: ThreadConfig | None
    hung: Mapping[int, str] | None = None
    is_dropped: bool = False
    sample: tuple[int, int] = (NO_SAMPLE, 0)

    def publish(self, number: int, deadline_ns: int) -> None:
        """Set ``sample``. Called from the threads that load the batch."""
        self.sample = (number, deadline_ns)


class _Dropped(BaseException):
    """Ends the loading of a batch that is no longer needed."""


class _Samples:
    """A dataset that raises _Dropped once its task is dropped."""

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
        """The dataset's own ``__getitems__``, if it has one."""
        return list_loader(self._dataset)


def load(
    task: ThreadTask,
    config: ThreadConfig,
    where: str,
    concurrent_fetcher: ConcurrentFetcher | None = None,
) -> Answer | None:
    """Make a task's batch.

    Args:
        task: The task.
        config: How batches are made.
        where: Where this runs, in words, for the texts of failures.
        concurrent_fetcher: Loads several samples at once; None to load them one after the other.

    Returns:
        The answer; None if the task was dropped meanwhile.
    """
    fetch, timer, pid = config.fetch, Timer(), os.getpid()
    watch = None
    if fetch.sample_timeout_s is not None:
        watch = SampleWatch(fetch.sample_timeout_s, task.publish)
        watch.begin(task.hung)
    maker = BatchMaker(
        fetch,
        config.dataset,
        config.collate_fn,
        config.on_error,
        where=where,
        timer=timer,
        find_gatherer=config.find_gatherer,
        concurrent_fetcher=concurrent_fetcher,
        sample_watch=watch,
        watch_samples=functools.partial(_Samples, task),
    )
    batch, error = None, None
    try:
        batch = maker.make(task.indices)
    except _Dropped:
        return None
    except EmptyBatchError:
        return Empty(maker.take_report())
    except BaseException:  # noqa: BLE001 - returned as the answer
        end_if_forked(pid)
        error = RemoteError.caught(where)
    end_if_forked(pid)
    if error is not None:
        return Failure(error, report=maker.take_report())
    times, nbytes = timer.read(), bytes_of(batch)
    return Batch(batch, maker.take_report(), times, nbytes)
