"""Gathers batches of datasets that consist only of arrays, without loading samples.

Only torch's and numpy's own classes count, unchanged: a subclass may do anything in
``__getitem__``. Runs where batches are made: in a worker process, a worker thread, or the main
process.
"""

import ctypes
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from shmloader.batch.timer import Timer
from shmloader.memory.layout import BARE, DICT, LIST
from shmloader.memory.packer import Column, Columns, RowGatherer
from shmloader.memory.segment import address_of
from shmloader.memory.writer import SlotWriter
from shmloader.sampling.indices import IndexArray, as_list
from shmloader.sampling.steps import is_sharded
from shmloader.shared.arrays import SharedArray
from shmloader.shared.containers import SharedList

_ARRAYS = (np.ndarray, np.memmap, SharedArray, torch.Tensor)
_SEQUENCES = (list, tuple, range)
_DATASETS = (TensorDataset, StackDataset, Subset)

# The dtypes of which torch.index_select gathers rows, and those that stand for others, by size.
_DTYPES = {
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}

_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Indices of a subset that are converted as a whole.
_INDICES = (*_SEQUENCES, np.ndarray, torch.Tensor, SharedList)


def is_plain_data(dataset: Any) -> bool:
    """Whether indexing a dataset runs no code of the user's, and so draws no random numbers.

    This is known of tensors, arrays, lists, tuples and ranges, and of torch's ``TensorDataset``,
    ``Subset``, ``ConcatDataset`` and ``StackDataset`` of these. Any other dataset may draw them.
    """
    kind = type(dataset)
    if kind is Subset:
        # Indices of another type, such as a subclass of Tensor, may run the user's code, too.
        is_plain = type(dataset.indices) in (*_ARRAYS, *_SEQUENCES, SharedList)
        return is_plain and is_plain_data(dataset.dataset)
    parts = _parts_of(dataset)
    if parts is not None:
        return all(map(is_plain_data, parts))
    return kind in _ARRAYS or kind in _SEQUENCES


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


_PLAIN_SAMPLES = (torch.Tensor, np.ndarray, bool, int, float, str, bytes)


def are_plain(samples: Sequence[Any]) -> bool:
    """Whether torch's ``default_collate`` runs no code of the user's for these samples.

    This is known of tensors, arrays, numbers and texts, and of tuples, lists and dicts of these, if
    all samples are alike.
    """
    kinds = set(map(type, samples))
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    if kind in _PLAIN_SAMPLES or kind.__module__ == "numpy":
        return True
    if kind not in (tuple, list, dict):
        return False
    parts = [sample.values() for sample in samples] if kind is dict else samples
    return len(set(map(len, parts))) == 1 and all(map(are_plain, zip(*parts, strict=True)))


def find_columns(dataset: Any) -> Columns | None:
    """Return the arrays of a dataset that consists only of arrays; None for any other.

    Args:
        dataset: A ``TensorDataset``, an array, a memory map, a tensor, a ``StackDataset`` of these,
            or a ``Subset`` of one of these; anything else has no columns.

    Returns:
        The columns. Also None where torch's collate does not make one array of the rows: for texts,
        for tensors that require gradients, and for arrays of foreign byte order.
    """
    kind = type(dataset)
    if kind in _ARRAYS:
        column = _column_of(dataset)
        return None if column is None else Columns(BARE, (), (column,), len(dataset))
    if kind not in _DATASETS or not _is_unpatched(dataset):
        return None
    if kind is Subset:
        return _subset(dataset)
    if kind is StackDataset:
        return _side_by_side(dataset.datasets, len(dataset))
    return _side_by_side(dataset.tensors, len(dataset))


def _sources_of(dataset: Any) -> list[Any]:
    """Return the objects that a dataset reads from at present, to notice when one is replaced."""
    parts = _parts_of(dataset)
    if parts is None:
        return [dataset]
    sources = [source for part in parts for source in _sources_of(part)]
    return [dataset.indices, *sources] if type(dataset) is Subset else sources


def _form_of(part: Any) -> Any:
    """Return what may change in an array that is not replaced: its memory, shape and type."""
    if isinstance(part, torch.Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype, part.requires_grad
    if isinstance(part, np.ndarray):
        return part.__array_interface__["data"], part.shape, part.strides, part.dtype
    return None


def _side_by_side(parts: Any, length: int) -> Columns | None:
    """Return the columns of a tuple or dict of arrays; None if a part is not one array."""
    is_dict = type(parts) is dict
    keys: tuple[object, ...] = tuple(parts) if is_dict else ()
    fields: list[Column] = []
    for part in parts.values() if is_dict else parts:
        one = find_columns(part)
        if one is None or one.container != BARE or one.length != length:
            return None
        fields += one.fields
    return Columns(DICT if is_dict else LIST, keys, tuple(fields), length) if fields else None


def may_be_columns(dataset: Any) -> bool:
    """Whether :func:`find_columns` may find columns, judging by the classes only."""
    kind = type(dataset)
    if kind in (Subset, StackDataset):
        return all(map(may_be_columns, _parts_of(dataset)))
    return kind in _ARRAYS or kind is TensorDataset


def _is_unpatched(dataset: Any) -> bool:
    """Whether the methods that load samples are still torch's own."""
    kind = type(dataset)
    methods = [getattr(kind, "__getitem__", None), getattr(kind, "__getitems__", None)]
    are_torchs = all(
        getattr(method, "__module__", "torch.").startswith("torch.") for method in methods if method
    )
    return are_torchs and "__getitems__" not in vars(dataset)


def _column_of(rows: Any) -> Column | None:
    """Return the rows of an array; None if torch makes something else of a batch of them."""
    if isinstance(rows, np.ndarray):
        rows = _tensor_of(rows)
    if rows is None or rows.layout is not torch.strided or rows.ndim == 0 or not rows.is_cpu:
        return None
    is_odd = rows.is_nested or rows.is_quantized or rows.is_conj() or rows.is_neg()
    if is_odd or rows.requires_grad or rows._is_zerotensor():
        return None
    stand_in = rows.dtype if rows.dtype in _DTYPES else _STAND_INS[rows.element_size()]
    return Column(rows.view(stand_in), rows.dtype)


def _tensor_of(array: Any) -> torch.Tensor | None:
    """Return a tensor over an array; None if torch does not make a tensor of each row."""
    is_known = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0
    if not is_known or any(stride < 0 for stride in array.strides):
        return None
    if array.ndim == 1 and array.dtype == np.uint64:
        return None  # torch makes no tensor of such scalars
    try:
        return _tensor_over(array)
    except (TypeError, ValueError):  # torch lacks the dtype, or cannot have these strides
        return None


def _tensor_over(array: Any) -> torch.Tensor:
    """Return a tensor over an array's memory.

    torch warns of read-only memory. The tensor is only read, so the warning is avoided.
    """
    if array.flags.writeable or not array.size:
        return torch.from_numpy(array.view(np.ndarray))
    low, nbytes = address_of(array)
    memory: Any = (ctypes.c_char * nbytes).from_address(low)
    memory.keep = array  # keeps the array alive while there is a view of the memory
    first = array.__array_interface__["data"][0] - low
    return torch.from_numpy(np.ndarray(array.shape, array.dtype, memory, first, array.strides))


def _subset(subset: Any) -> Columns | None:
    inner = find_columns(subset.dataset)
    if inner is None or type(subset.indices) not in _INDICES:
        return None
    mapping = _mapping_of(subset.indices, inner.length)
    if mapping is None:
        return None
    fields = tuple(
        column._replace(mapping=mapping if column.mapping is None else column.mapping[mapping])
        for column in inner.fields
    )
    return Columns(inner.container, inner.keys, fields, len(mapping))


def _mapping_of(indices: Sequence[Any], length: int) -> Any:
    """Return a subset's indices as an array; None unless all are indices of ``length`` rows."""
    if isinstance(indices, list | tuple | SharedList) and set(map(type, indices)) - {int}:
        return None
    try:
        mapping = np.asarray(list(indices) if isinstance(indices, SharedList) else indices)
    except (TypeError, ValueError, OverflowError):
        return None
    if mapping.ndim != 1 or (mapping.size and mapping.dtype.kind != "i"):
        return None
    mapping = mapping.astype(np.intp)
    mapping[mapping < 0] += length
    if mapping.size and not (mapping.min() >= 0 and mapping.max() < length):
        return None
    return mapping


def no_gatherer() -> None:
    """Return None, since the batches of this dataset cannot be gathered."""


class ArrayFetcher:
    """Gathers batches of arrays, and leaves other batches to another fetcher.

    It gathers a batch if all its indices are integers from 0 up to the length. With any other
    index, such as a negative one, the other fetcher gives the same result as torch.

    Args:
        find_gatherer: Returns the gatherer of the next batch; None if it cannot be gathered.
        plain: The other fetcher, which loads sample by sample.
        timer: Counts the samples of gathered batches.
        may_shard: Whether the indices may be a list of index lists, one for each shard.
    """

    def __init__(
        self,
        find_gatherer: Callable[[], RowGatherer | None],
        plain: Any,
        timer: Timer,
        *,
        may_shard: bool,
    ) -> None:
        self._find_gatherer = find_gatherer
        self._plain = plain
        self._timer = timer
        self._may_shard = may_shard

    def fetch(self, indices: Any) -> Any:
        """Return the batch of these indices, or a list of the shards' batches."""
        gatherer = self._find_gatherer()
        if gatherer is None:
            return self._plain.fetch(as_list(indices))
        if self._may_shard and is_sharded(indices):
            return [self._fetch_one(gatherer, shard) for shard in indices]
        return self._fetch_one(gatherer, indices)

    def _fetch_one(self, gatherer: RowGatherer, indices: Any) -> Any:
        valid = _valid_indices(indices, gatherer.length)
        if valid is None:
            return self._plain.fetch(as_list(indices))
        self._timer.sample_count += len(valid)
        return gatherer.gather(valid)


def _valid_indices(indices: Any, length: int) -> Any:
    """Return the indices as an array or range; None unless all are from 0 up to ``length``."""
    kind = type(indices)
    if kind is range:
        is_valid = len(indices) > 0 and indices.start >= 0 and indices.stop <= length
        return indices if is_valid and indices.step == 1 else None
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


def gatherer_to_slots(dataset: Any, writer: SlotWriter) -> Callable[[], RowGatherer | None]:
    """Return a function that returns the gatherer of a dataset's batches in a worker process.

    Args:
        dataset: The worker's dataset, after ``worker_init_fn``. Its samples are collated by torch's
            own ``default_collate``.
        writer: Writer of the slot, into which batches are gathered.
    """
    columns = find_columns(dataset)
    if columns is None:
        return no_gatherer
    gatherer = RowGatherer(columns, writer)
    return lambda: gatherer


def _is_stacked_in_order(column: Column) -> bool:
    """Whether torch makes contiguous batches of a column's rows in this process.

    In a worker process it always does. In the main process, rows of four or five dimensions in
    channels-last order keep that order.
    """
    rows = column.rows
    if rows.is_contiguous():
        return True
    row = torch.empty_strided(rows.shape[1:], rows.stride()[1:], device="meta")
    batch = torch.stack([row, row])
    return batch.stride() == torch.empty(batch.shape, device="meta").stride()


class ArraysHere:
    """The arrays of a dataset in the main process, where the user may replace them.

    A replacement shows in the next batch, as with torch. The indices of a subset are read when an
    epoch begins. Several threads may use this object at the same time.

    Args:
        dataset: The dataset. :meth:`find_gatherer` is called only if :func:`may_be_columns` is
            true of it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._known: tuple[list[Any], list[Any], RowGatherer | None] = [], [], None

    def begin_epoch(self) -> None:
        """Forget what was found in the dataset."""
        self._known = [], [], None

    def find_gatherer(self) -> RowGatherer | None:
        """Return a gatherer for the dataset's present arrays; None if it is not only arrays.

        Also returns None under any mode of torch's, since it may affect collate, as another default
        device does.
        """
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return None
        parts = _sources_of(self._dataset)
        known, forms, gatherer = self._known
        is_other = len(parts) != len(known) or any(map(operator.is_not, parts, known))
        if is_other or (gatherer is not None and list(map(_form_of, parts)) != forms):
            columns = find_columns(self._dataset)
            gatherer = None
            if columns is not None and all(map(_is_stacked_in_order, columns.fields)):
                gatherer = RowGatherer(columns)
            self._known = parts, [] if gatherer is None else list(map(_form_of, parts)), gatherer
        return gatherer
