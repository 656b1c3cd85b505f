"""A worker's fetcher for datasets that are arrays, and what takes index arrays for all others."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmloader.memory.flat import FlatLayout
from shmloader.memory.gather import RowGatherer
from shmloader.memory.slot_writer import SlotWriter
from shmloader.sampling.index_arrays import IndexArray, as_list
from shmloader.sampling.plan import is_sharded
from shmloader.workers.array_datasets import find_columns


class AnyIndexFetcher:
    """A fetcher that is given lists, whatever the plan gives.

    Attributes:
        plain: The fetcher.
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def fetch(self, indices: Any) -> Any:
        """The batch."""
        return self.plain.fetch(as_list(indices))


class ArrayFetcher:
    """Has batches gathered; leaves to another fetcher what is no list of whole numbers, all there.

    So an index that is not there, or is counted from the end, comes to what torch makes of it.
    """

    def __init__(
        self, gatherer: RowGatherer, plain: Any, note: Callable[[int], None], *, may_shard: bool
    ) -> None:
        self._gatherer = gatherer
        self._plain = plain
        self._note = note
        self._may_shard = may_shard

    def fetch(self, indices: Any) -> Any:
        """The layout of a batch in the slot, or of several; or what the other fetcher gives."""
        if self._may_shard and is_sharded(indices):
            return [self._fetch_one(shard) for shard in indices]
        return self._fetch_one(indices)

    def _fetch_one(self, indices: Any) -> FlatLayout | Any:
        known = _as_known(indices, self._gatherer.length)
        if known is None:
            return self._plain.fetch(as_list(indices))
        self._note(len(known))
        return self._gatherer.gather(known)


def _as_known(indices: Any, length: int) -> Any:
    """The indices as an array or range, if all are there; else None."""
    kind = type(indices)
    if kind is range:
        is_there = len(indices) > 0 and indices.start >= 0 and indices.stop <= length
        return indices if is_there and indices.step == 1 else None
    if kind is IndexArray:
        array = indices.array
    elif kind is list and set(map(type, indices)) == {int}:
        try:
            array = np.array(indices, dtype=np.intp)
        except OverflowError:
            return None
    else:
        return None
    if not len(array) or array.min() < 0 or array.max() >= length:
        return None
    return array


def fetcher_of_arrays(
    dataset: Any,
    writer: SlotWriter,
    plain: Any,
    note: Callable[[int], None],
    *,
    may_shard: bool,
) -> Any:
    """The fetcher of a dataset that is collated by torch's own ``default_collate``.

    Args:
        dataset: The worker's, after ``worker_init_fn``.
        writer: Of the slot.
        plain: What makes batches of it the ordinary way.
        note: Told of each batch how many samples were gathered.
        may_shard: Whether what is fetched may be a list of index lists.
    """
    columns = find_columns(dataset)
    if columns is None:
        return AnyIndexFetcher(plain)
    return ArrayFetcher(RowGatherer(columns, writer), plain, note, may_shard=may_shard)
