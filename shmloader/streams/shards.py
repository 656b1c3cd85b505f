"""A stream of the records of shards."""

import collections
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from shmloader.errors import ShardError
from shmloader.sampling.arguments import flag, whole_number
from shmloader.streams.cache import ShardCache
from shmloader.streams.files import is_compressed, local_path
from shmloader.streams.fingerprints import names_digest
from shmloader.streams.formats import Format, as_format
from shmloader.streams.records import ShardRecords
from shmloader.streams.stages import Run, permutation
from shmloader.streams.stream import Stream

# So many readers there are at most, if their number is not given.
_MOST_READERS = 64


class Shards(Stream):
    """Records of shards, read from end to end, in an order that depends only on the arguments.

    An epoch has a fixed number of *readers*. Each has a share of the shards, in an order that the
    seed and the epoch decide, and reads one after the other. The readers take turns to deliver a
    batch. So the order of all batches is the same with any number of workers and ranks, and a run
    can resume with other numbers.

    .. code-block:: python

        from shmloader import DataLoader
        from shmloader.streams import Shards


        def open_shard(path):  # or open_tar, open_jsonl, open_parquet
            return (f"record {number} of {path}" for number in range(100))


        stream = Shards(["a", "b", "c", "d"], open_shard, seed=3, readers=4)
        loader = DataLoader(stream.shuffle(50).batch(8), batch_size=None)

    Args:
        paths: Paths or addresses of the shards. Their order and names decide the order of records.
        open: The format: :data:`open_tar`, :data:`open_jsonl`, :data:`open_parquet`, an object with
            the methods of :class:`Format`, or a function of a path that returns records.
        seed: Decides the order of shards, and that of records in shuffles.
        shuffle_shards: Whether each epoch has another order of shards; otherwise it is as given.
        readers: Number of readers: more than workers of all ranks together, and at most as many as
            shards. None for as many as shards, and at most 64. States and orders depend on it, so
            it stays the same for a run.
        cache: Keeps remote shards on a disk of this machine; by default a ``ShardCache()`` if a
            path is an address.
        store: A store of torch.distributed by which the ranks tell one another where readers are;
            by default that of the default group.

    Raises:
        ValueError: If there are no shards, or fewer than readers.
        TypeError: If an argument has a wrong type, such as a string in place of the list.
    """

    __module__ = "shmloader.streams"

    def __init__(
        self,
        paths: "Iterable[str | os.PathLike[str]]",
        open: "Format | Callable[[str], Iterable[Any]]",  # noqa: A002 - what it does
        *,
        seed: int,
        shuffle_shards: bool = True,
        readers: int | None = None,
        cache: Any = None,
        store: Any = None,
    ) -> None:
        if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
            raise TypeError(f"paths should be a list of paths and addresses, but is {paths!r}")
        found = list(map(_text_of, paths))
        if not found:
            raise ValueError("there are no shards: the list of paths is empty")
        if readers is None:
            readers = min(_MOST_READERS, len(found))
        readers = whole_number(readers, "readers", minimum=1)
        if len(found) < readers:
            raise ValueError(
                f"there are {len(found)} shards for {readers} readers, and each reader needs one: "
                f"leave out readers, give readers={len(found)} or fewer, or give more shards"
            )
        if len(set(found)) < len(found):
            ((path, _),) = collections.Counter(found).most_common(1)
            raise ValueError(f"{path!r} is given twice, and a shard should be given once")
        if not (cache is None or hasattr(cache, "prefetch")):
            raise TypeError(f"cache should be a ShardCache, but is {cache!r}")
        form, seed = as_format(open), whole_number(seed, "seed", minimum=0)
        is_shuffled = flag(shuffle_shards, "shuffle_shards")
        cache = ShardCache() if cache is None else cache
        seeks = form.seeks and not any(map(is_compressed, found))
        super().__init__(found, readers, seed, store, seeks)
        self._form, self._is_shuffled, self._cache = form, is_shuffled, cache

    def _open(self, run: Run) -> ShardRecords:
        """Return the stage that reads the shards of a reader."""
        order = self._order(run.epoch + run.turn)[run.reader :: self.readers]
        return ShardRecords(run, self.paths, order, self._form, self._cache)

    def shards(self, epoch: int, reader: int) -> list[str]:
        """Return the shards of a reader in the first pass of an epoch."""
        return [self.paths[each] for each in self._order(epoch)[reader :: self.readers]]

    def _order(self, epoch: int) -> Sequence[int]:
        """Return the numbers of the shards in the order of an epoch."""
        count = len(self.paths)
        return _shuffled(count, self.seed, epoch) if self._is_shuffled else range(count)

    def _source_counts(self, epoch: int) -> list[int]:
        """Return how many records each reader has in an epoch.

        Raises:
            TypeError: If that is not known before they are read.
        """
        counts = [self._shard_counts[each] for each in self._order(epoch)]
        return [sum(counts[reader :: self.readers]) for reader in range(self.readers)]

    @cached_property
    def _shard_counts(self) -> list[int]:
        if not self._form.seeks:
            raise TypeError(
                f"the length of a stream of {self._form!r} is not known without reading"
            )
        local = [path for path in map(local_path, self.paths) if path is not None]
        if len(local) < len(self.paths):
            raise TypeError("the length of a stream of remote shards is not known without reading")
        try:
            return list(map(self._form.count, local))
        except (ShardError, OSError) as error:
            raise TypeError(f"the length of the stream is not known: {error}") from error

    @cached_property
    def _names(self) -> str:
        return names_digest(self.paths)

    def _source_facts(self) -> str:
        """Return what the order of the records depends on, as a text."""
        kind = "shuffled" if self._is_shuffled else "in order"
        return (
            f"{len(self.paths)} shards ({self._names}) {kind} with seed={self.seed} on "
            f"{self.readers} readers"
        )


def _text_of(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a shard should be a path or an address, but is {path!r}")
    return str(path)


@lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> Sequence[int]:
    return permutation(count, seed, epoch)
