"""The fetcher of datasets that are arrays, and what takes index arrays for all others."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmloader.batch.array_datasets import find_columns, form_of, parts_of
from shmloader.memory.gather import Column, RowGatherer, SlotGatherer
from shmloader.memory.slot_writer import SlotWriter
from shmloader.sampling.indices import IndexArray, as_list
from shmloader.sampling.steps import is_sharded


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

    Args:
        find_gatherer: Gives what gathers the batch that is next; None if nothing can.
        plain: What makes batches the ordinary way.
        note: Told of each batch how many samples were gathered.
        may_shard: Whether what is fetched may be a list of index lists.
    """

    def __init__(
        self,
        find_gatherer: Callable[[], RowGatherer | None],
        plain: Any,
        note: Callable[[int], None],
        *,
        may_shard: bool,
    ) -> None:
        self._find_gatherer = find_gatherer
        self._plain = plain
        self._note = note
        self._may_shard = may_shard

    def fetch(self, indices: Any) -> Any:
        """What the gatherer gives for a batch, or for several; or what the other fetcher gives."""
        if self._may_shard and is_sharded(indices):
            return [self._fetch_one(shard) for shard in indices]
        return self._fetch_one(indices)

    def _fetch_one(self, indices: Any) -> Any:
        gatherer = self._find_gatherer()
        known = None if gatherer is None else _as_known(indices, gatherer.length)
        if gatherer is None or known is None:
            return self._plain.fetch(as_list(indices))
        self._note(len(known))
        return gatherer.gather(known)


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
    """A worker process's fetcher of a dataset that is collated by torch's own ``default_collate``.

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
    gatherer = SlotGatherer(columns, writer)
    return ArrayFetcher(lambda: gatherer, plain, note, may_shard=may_shard)


def _is_stacked_in_order(column: Column) -> bool:
    """Whether torch makes contiguous batches of a column's rows.

    In a worker process it always does; here, rows of four or five dimensions whose channels are
    last stay so.
    """
    rows = column.rows
    if rows.is_contiguous():
        return True
    row = torch.empty_strided(rows.shape[1:], rows.stride()[1:], device="meta")
    batch = torch.stack([row, row])
    return batch.stride() == torch.empty(batch.shape, device="meta").stride()


class ArraysHere:
    """The arrays of a dataset in the main process, where others may be put in their place.

    By the user, between two batches, who then finds them in the next one, as with torch. Any
    threads may ask, at the same time. The indices of a subset are looked at when an epoch begins.

    Args:
        dataset: Of which :func:`may_be_columns` says that it may have some.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._known: tuple[list[Any], list[Any], RowGatherer | None] = [], [], None

    def begin_epoch(self) -> None:
        """Look at all of it anew."""
        self._known = [], [], None

    def find_gatherer(self) -> RowGatherer | None:
        """What gathers of the dataset as it is; None if it is nothing but arrays no more.

        None as well in a mode of torch's, of another default device for one: collate is under it.
        """
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return None
        parts = parts_of(self._dataset)
        known, forms, gatherer = self._known
        is_other = len(parts) != len(known) or any(map(operator.is_not, parts, known))
        if is_other or (gatherer is not None and list(map(form_of, parts)) != forms):
            columns = find_columns(self._dataset)
            gatherer = None
            if columns is not None and all(map(_is_stacked_in_order, columns.fields)):
                gatherer = RowGatherer(columns)
            self._known = parts, [] if gatherer is None else list(map(form_of, parts)), gatherer
        return gatherer
