"""Gathers batches of datasets that consist only of arrays, without loading samples.

Arrays, and columns of Arrow tables (:mod:`shmloader.arrow`). Only torch's, numpy's and Arrow's own
classes count, unchanged: a subclass may do anything in ``__getitem__``. Runs where batches are
made: in a worker process, a worker thread, or the main process.

The module is long because each kind of dataset and of index is recognised, checked and gathered by
the same three steps.
"""

import ctypes
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from shmloader.arrow.fields import Field
from shmloader.arrow.finding import find_fields, is_arrow, runs_no_user_code, sources_of
from shmloader.arrow.rows import RowMap
from shmloader.batch.collator import Timer
from shmloader.batch.token_blocks import TokenBlocks
from shmloader.collate import RaggedBatch, takes_fields
from shmloader.memory.flat import (
    BARE,
    DICT,
    LIST,
    FlatLayout,
    FlatPacker,
    field_tensor,
)
from shmloader.memory.rows import DIRECT, GATHERED_DTYPES, RepeatedGather, RowsAt, RowSource
from shmloader.memory.writer import SlotWriter, is_plain
from shmloader.memory_maps import address_of
from shmloader.sampling.indices import IndexArray, as_list
from shmloader.shared.containers import SharedList

_ARRAYS = (np.ndarray, np.memmap, torch.Tensor)
_SEQUENCES = (list, tuple, range)

# The types of a subset's indices that run no code of the user's.
_INDICES = (*_SEQUENCES, np.ndarray, torch.Tensor, SharedList)

# Numbers of dimensions of arrays whose samples may be images or volumes.
_WITH_CHANNELS = (5, 6)

# Calling it takes half the time of an array's max().
_largest = np.maximum.reduce

# The unsigned types by the sizes of indices.
_UNSIGNED = {4: np.uint32, 8: np.uint64}

_Array = np.ndarray[Any, np.dtype[Any]]


def _parts_of(dataset: Any) -> Any:
    """Return the datasets that one of torch's own consists of; None for any other."""
    kind = type(dataset)
    if kind is TensorDataset:
        return dataset.tensors
    if kind is Subset:
        return [dataset.dataset]
    if kind is ConcatDataset:
        return dataset.datasets
    if kind is StackDataset:
        parts = dataset.datasets
        return list(parts.values()) if isinstance(parts, dict) else parts
    return None


def is_plain_data(dataset: Any) -> bool:
    """Whether indexing a dataset runs no code of the user's, and so draws no random numbers.

    This is known of tensors, arrays, lists, tuples and ranges, and of torch's ``TensorDataset``,
    ``Subset``, ``ConcatDataset`` and ``StackDataset`` of these, and of plain columns of Arrow
    tables. Any other dataset may draw them. Reads neither indices nor columns.
    """
    if is_arrow(dataset):
        return runs_no_user_code(dataset)
    parts = _parts_of(dataset)
    if parts is None:
        return type(dataset) in (*_ARRAYS, *_SEQUENCES, TokenBlocks)
    if type(dataset) is Subset and type(dataset.indices) not in (*_ARRAYS, *_INDICES):
        return False
    return _is_unpatched(dataset) and all(map(is_plain_data, parts))


# Columns ----------------------------------------------------------------------------------


def _is_unpatched(dataset: Any) -> bool:
    """Whether the methods that load samples are still torch's own."""
    methods = (getattr(type(dataset), name, None) for name in ("__getitem__", "__getitems__"))
    return "__getitems__" not in vars(dataset) and all(
        getattr(method, "__module__", "torch.").startswith("torch.") for method in methods if method
    )


class Column(NamedTuple):
    """One field of a batch, for all samples.

    Attributes:
        rows: The array.
        mapping: The index of each sample's row; None if sample n is row n.
    """

    rows: RowSource
    mapping: _Array | None = None

    def mapped(self, mapping: _Array) -> "Column":
        """Return the field of a subset, which has the samples of these indices."""
        inner = self.mapping
        return self._replace(mapping=mapping if inner is None else inner[mapping])

    def at(self, indices: "_Array | range") -> RowsAt:
        """Return where the rows of these samples are."""
        at: Any = slice(indices.start, indices.stop) if isinstance(indices, range) else indices
        if self.mapping is None:
            return RowsAt(self.rows.present(), at)
        finder = self.mapping.ctypes.data, *DIRECT[1:]
        return RowsAt(self.rows.present(), self.mapping[at], finder)


class Columns(NamedTuple):
    """A dataset that is arrays.

    Attributes:
        container: Container of a batch: ``BARE``, ``LIST`` or ``DICT``.
        keys: The dict's keys, in order; else empty.
        fields: The arrays, or the columns of an Arrow table.
        length: Number of samples.
        row_map: Turns indices into rows of an Arrow table; None for arrays.
    """

    container: int
    keys: tuple[object, ...]
    fields: tuple[Column | Field, ...]
    length: int
    row_map: RowMap | None = None


def may_be_columns(dataset: Any, *, are_collated: bool = True) -> bool:
    """Whether :func:`find_columns` may find columns, judging by the classes only.

    Without ``are_collated``, whether they may have samples that can be read one by one.
    """
    kind = type(dataset)
    if kind is Subset or (kind is StackDataset and are_collated):
        return all(may_be_columns(one, are_collated=are_collated) for one in _parts_of(dataset))
    is_column = kind in (*_ARRAYS, TensorDataset, TokenBlocks)
    return (are_collated and is_column) or is_arrow(dataset)


def find_columns(dataset: Any) -> Columns | None:
    """Return the arrays of a dataset that consists only of arrays; None for any other.

    These are a ``TensorDataset``, an array, a memory map, a tensor, a ``TokenBlocks`` without
    boundaries, a ``StackDataset`` of these, or a ``Subset`` of one of these. None also where
    torch's collate does not make one array of the rows: for texts, tensors that require gradients,
    and arrays of foreign byte order. Columns of an Arrow table are found as well, and may be texts.
    """
    kind = type(dataset)
    if is_arrow(dataset):
        row_map, by_key = find_fields(dataset) or (None, {})
        columns = Columns(DICT, tuple(by_key), tuple(by_key.values()), len(dataset), row_map)
        return columns if by_key else None
    if kind in _ARRAYS or kind is TokenBlocks:
        source = _source_of(dataset)
        return None if source is None else Columns(BARE, (), (Column(source),), len(dataset))
    if kind is ConcatDataset or _parts_of(dataset) is None or not _is_unpatched(dataset):
        return None
    if kind is Subset:
        return _subset(dataset)
    parts = dataset.tensors if kind is TensorDataset else dataset.datasets
    container, keys = (DICT, tuple(parts)) if isinstance(parts, dict) else (LIST, ())
    fields: list[Column | Field] = []
    for part in _parts_of(dataset):
        one = find_columns(part)
        if one is None or one.container != BARE or one.length != len(dataset):
            return None
        fields += one.fields
    return Columns(container, keys, tuple(fields), len(dataset)) if fields else None


def _source_of(rows: Any) -> RowSource | None:
    """Return the rows of an array; None if torch makes something else of a batch of them."""
    dtype = None
    if type(rows) is TokenBlocks:
        if rows.boundaries is not None:  # samples have further fields
            return None
        rows, dtype = rows.rows, torch.int64
    if isinstance(rows, np.ndarray):
        rows = _tensor_of(rows)
    if rows is None or rows.layout is not torch.strided or rows.ndim == 0 or not rows.is_cpu:
        return None
    is_odd = rows.is_nested or rows.is_conj() or rows.is_neg() or rows._is_zerotensor()
    is_known = dtype is not None or rows.dtype in GATHERED_DTYPES
    return None if is_odd or rows.requires_grad or not is_known else RowSource(rows, dtype)


def _tensor_of(array: Any) -> torch.Tensor | None:
    """Return a tensor over an array's memory; None if torch does not make a tensor of each row."""
    is_known = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0
    if not is_known or any(stride < 0 for stride in array.strides):
        return None
    plain = array.view(np.ndarray)
    if array.size and not array.flags.writeable:
        # torch warns of read-only memory. This array over the same memory is only read.
        low, nbytes = address_of(array)
        memory: Any = (ctypes.c_char * nbytes).from_address(low)
        memory.keep = array
        first = array.__array_interface__["data"][0] - low
        plain = np.ndarray(array.shape, array.dtype, memory, first, array.strides)
    try:
        return torch.from_numpy(plain)
    except (TypeError, ValueError):  # torch lacks the dtype, or cannot have these strides
        return None


def _subset(subset: Any) -> Columns | None:
    inner = find_columns(subset.dataset)
    mapping = None if inner is None else _mapping_of(subset.indices, inner.length)
    if inner is None or mapping is None:
        return None
    if inner.row_map is not None:
        return inner._replace(length=len(mapping), row_map=inner.row_map.mapped(mapping))
    columns: Any = inner.fields
    fields = tuple(column.mapped(mapping) for column in columns)
    return Columns(inner.container, inner.keys, fields, len(mapping))


def _mapping_of(indices: Any, length: int) -> Any:
    """Return a subset's indices as an array; None unless all are indices of ``length`` rows."""
    if type(indices) not in _INDICES:
        return None
    if isinstance(indices, list | tuple | SharedList):
        indices = list(indices)
        if set(map(type, indices)) - {int}:
            return None
    try:
        mapping = np.asarray(indices)
    except (TypeError, ValueError, OverflowError):
        return None
    if mapping.ndim != 1 or (mapping.size and mapping.dtype.kind != "i"):
        return None
    mapping = mapping.astype(np.intp)
    mapping[mapping < 0] += length
    return mapping if ((mapping >= 0) & (mapping < length)).all() else None


# Gathering --------------------------------------------------------------------------------


class Arrays:
    """The arrays of a dataset, of which batches are gathered.

    A batch is what torch's ``default_collate`` makes of the rows one by one. If the user replaces
    an array, the next batch has the new one, as with torch. The indices of a subset are read when
    an epoch begins. Without a writer, several threads may use this object at the same time.

    Args:
        dataset: The dataset. Its samples are collated by torch's own ``default_collate``.
        writer: In a worker process, the writer of its slots, where batches are gathered; None to
            gather into new tensors.
    """

    def __init__(self, dataset: Any, writer: SlotWriter | None = None) -> None:
        self._dataset, self._writer = dataset, writer
        self._packer = None if writer is None else FlatPacker(writer)
        # The last batch that was gathered: its columns, layout and end, and how it is repeated.
        self._last: tuple[Columns, FlatLayout, int, RepeatedGather] | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget what was found in the dataset."""
        self._known: tuple[list[Any], Columns | None] = [], None

    def find(self) -> Columns | None:
        """Return the dataset's present arrays; None if it is not only arrays.

        Also None under any mode of torch's, since it may affect collate, as a default device does.
        """
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return None
        sources = _sources_of(self._dataset)
        known, columns = self._known
        if len(sources) != len(known) or any(map(operator.is_not, sources, known)):
            columns = find_columns(self._dataset)
            # Of images in channels-last order torch makes batches in that order, except in workers.
            if columns is not None and self._writer is None:
                rows = [one.rows.tensor for one in columns.fields if isinstance(one, Column)]
                if any(one.ndim in _WITH_CHANNELS and not one.is_contiguous() for one in rows):
                    columns = None
            self._known = sources, columns
        return columns

    def gather(self, columns: Columns, indices: "_Array | range") -> Any:
        """Return a batch of what :meth:`find` returned; with a writer, its layout.

        ``indices`` are at least one, each from 0 to the length less 1. None if ``default_collate``
        makes other than one tensor, or one list of texts, of a field of these samples.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        container, keys, fields, _, row_map = columns
        at: Any = indices if row_map is None else row_map.rows(indices)
        again = self._repeat(columns, at)
        if again is not None:
            return again
        found: list[Any] = [field.at(at) for field in fields]
        if None in found:
            return None
        if self._packer is None or self._writer is None or list in map(type, found):
            # A batch with texts is pickled, but its tensors lie in the slot already.
            copies = [_copied(one, self._writer) for one in found]
            return FlatLayout(container, keys, ()).contain(copies)
        kinds = [(one.source.dtype, one.source.shape) for one in found]
        is_first = not self._writer.used_bytes
        layout = self._packer.reserve(container, keys, len(indices), kinds)
        slot = self._writer.slot
        for (source, rows, _), field in zip(found, layout.fields, strict=True):
            if not source.write(rows, slot.address + field.offset):
                source.copy(rows, field_tensor(slot, field))
        if is_first and (row_map is not None or not isinstance(indices, range)):
            offsets = [field.offset for field in layout.fields]
            repeated = RepeatedGather(found, offsets, columns)
            self._last = columns, layout, self._writer.used_bytes, repeated
        return layout

    def _repeat(self, columns: Columns, at: "_Array | range") -> FlatLayout | None:
        """Gather a batch that has the layout of the last one; return None if it has another."""
        if self._last is None or self._writer is None or self._writer.used_bytes:
            return None
        known, layout, nbytes, repeated = self._last
        if known is not columns or len(at) != repeated.count or isinstance(at, range):
            return None
        writer = self._writer
        writer.allocate(nbytes)
        if not repeated.write(at, writer.slot.address):
            writer.rewind()
            return None
        return layout


def _copied(found: RowsAt | list[str], writer: SlotWriter | None) -> Any:
    """Return a field of a batch: a list of texts, or the tensor of rows."""
    if isinstance(found, list):
        return found
    source, at, _ = found
    if writer is None:
        return source.copy(at)
    return source.copy(at, writer.empty((len(at), *source.shape), source.dtype))


def samples_of(columns: Columns, indices: "_Array | range") -> RaggedBatch:
    """Return the samples of these indices, of a dataset in Arrow tables, by fields."""
    assert columns.row_map is not None
    rows, keys, fields = columns.row_map.rows(indices), columns.keys, columns.fields
    found: list[Any] = [field.items(rows) for field in fields if isinstance(field, Field)]
    return RaggedBatch(dict(zip(map(str, keys), found, strict=True)))


def _sources_of(dataset: Any) -> list[Any]:
    """Return the objects that a dataset reads from at present, to notice when one is replaced."""
    if is_arrow(dataset):
        return sources_of(dataset)
    parts = _parts_of(dataset)
    if parts is None:
        return [dataset]
    sources = [source for part in parts for source in _sources_of(part)]
    return [dataset.indices, *sources] if type(dataset) is Subset else sources


class ArrayFetcher:
    """Gathers batches of arrays, and leaves other batches to another fetcher.

    It gathers a batch if all its indices are integers from 0 up to the length. With any other
    index, such as a negative one, the other fetcher gives the same result as torch. For a collate
    function other than torch's own, it reads the samples of an Arrow table from their buffers.
    """

    def __init__(
        self,
        arrays: Arrays,
        plain: Any,
        timer: Timer,
        collate_fn: Any = default_collate,
    ) -> None:
        self._arrays, self._plain, self._timer = arrays, plain, timer
        self._packs = is_plain(collate_fn)
        self._takes_fields = takes_fields(collate_fn)

    def fetch(self, indices: Any) -> Any:
        """Return the batch of these indices."""
        columns = self._arrays.find()
        valid = None if columns is None else _valid_indices(indices, columns.length)
        if columns is not None and valid is not None:
            if not self._packs and columns.row_map is not None:
                samples = samples_of(columns, valid)
                known = samples if self._takes_fields else list(samples)
                return self._plain.collate(known, as_list(indices))
            batch = self._arrays.gather(columns, valid) if self._packs else None
            if batch is not None:
                self._timer.sample_count += len(valid)
                return batch
        return self._plain.fetch(as_list(indices))


def _valid_indices(indices: Sequence[Any], length: int) -> Any:
    """Return the indices as an array or range; None unless all are from 0 up to ``length``."""
    kind = type(indices)
    if isinstance(indices, range):
        is_run = len(indices) > 0 and indices.step == 1
        return indices if is_run and indices.start >= 0 and indices.stop <= length else None
    array = indices.array if isinstance(indices, IndexArray) else None
    if kind is list and set(map(type, indices)) == {int}:
        try:
            array = np.array(indices, dtype=np.intp)
        except OverflowError:
            return None
    if array is None or not len(array):
        return None
    # As unsigned numbers, negative ones are large.
    return array if _largest(array.view(_UNSIGNED[array.itemsize])) < length else None
