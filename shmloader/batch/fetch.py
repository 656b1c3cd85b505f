"""The configuration that says how batches are made of a dataset."""

from typing import NamedTuple

from shmloader.batch.concurrent_fetcher import ConcurrentFetcher


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
        snapshot_every: After how many batches of a worker a stateful dataset's state is saved
            again. For a map-style dataset, any number but 0 means after every batch. 0 means never.
        is_persistent: Whether workers persist for further epochs.
        concurrency: How many samples of a batch are loaded at once in a worker; None if the
            worker's own thread loads them one after the other.
        sample_timeout_s: The longest time that a sample may take, in seconds; None for no limit.
        is_threaded: Whether workers are threads, which share the process's random number
            generators.
        told_epoch: The number that workers' copies of the dataset were told by ``set_epoch()``
            before they were made; None if that is not known.
        takes_arrays: Whether indices may be arrays or ranges, and batches may be gathered: the
            dataset seems to consist of arrays, and loading samples runs no code of the user's.
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
    is_threaded: bool = False
    takes_arrays: bool = False
    told_epoch: int | None = None

    @property
    def sets_global_rngs(self) -> bool:
        """Whether samples seed the process's generators: not in threads, nor several at once."""
        return self.concurrency is None and not self.is_threaded

    def make_concurrent_fetcher(self) -> ConcurrentFetcher | None:
        """Return a new fetcher that the caller closes, or None without ``concurrency``."""
        return None if self.concurrency is None else ConcurrentFetcher(self.concurrency)
