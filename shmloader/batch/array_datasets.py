"""Which datasets are nothing but arrays: their batches are gathered, never taken apart.

Only what torch itself has, as torch has it: a subclass may do anything in ``__getitem__``.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset

from shmloader.memory.bulk import address_of
from shmloader.memory.flat import BARE, DICT, LIST
from shmloader.memory.gather import Column, Columns
from shmloader.shared.arrays import SharedArray
from shmloader.shared.containers import SharedList

_ARRAYS = (np.ndarray, np.memmap, SharedArray)
_DATASETS = (TensorDataset, StackDataset, Subset)

# Indices of a subset that are looked at as a whole.
_INDICES = (list, tuple, range, np.ndarray, torch.Tensor, SharedList)


def find_columns(dataset: Any) -> Columns | None:
    """The arrays of a dataset.

    Args:
        dataset: A ``TensorDataset``, an array, a memory map, a tensor, a ``StackDataset`` of such,
            or a ``Subset`` of one of these; of these very classes, unchanged.

    Returns:
        None for any other, and where torch's collate makes something else of its rows than an
        array of all: of texts, of tensors that require gradients, of foreign byte order.
    """
    kind = type(dataset)
    if kind in _ARRAYS or kind is torch.Tensor:
        column = _column_of(dataset)
        return None if column is None else Columns(BARE, (), (column,), len(dataset))
    if kind not in _DATASETS or not _is_as_torch_made_it(dataset):
        return None
    if kind is Subset:
        return _subset(dataset)
    if kind is StackDataset:
        return _side_by_side(dataset.datasets, len(dataset))
    return _side_by_side(dataset.tensors, len(dataset))


def parts_of(dataset: Any) -> list[Any]:
    """What a dataset hands out from at present: it shows where something else is in its place."""
    kind = type(dataset)
    if kind is TensorDataset:
        return list(dataset.tensors)
    if kind is Subset:
        return [dataset.indices, *parts_of(dataset.dataset)]
    if kind is StackDataset:
        parts = dataset.datasets
        each = parts.values() if type(parts) is dict else parts
        return [inner for part in each for inner in parts_of(part)]
    return [dataset]


def form_of(part: Any) -> Any:
    """What may become another in an array that stays: where its rows are, and what they are."""
    if isinstance(part, torch.Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype, part.requires_grad
    if isinstance(part, np.ndarray):
        return part.__array_interface__["data"], part.shape, part.strides, part.dtype
    return None


def _side_by_side(parts: Any, length: int) -> Columns | None:
    """The fields of a tuple, or of a dict; None if a part is not one field by itself."""
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
    """Whether :func:`find_columns` is likely to find some: a look at the classes alone."""
    kind = type(dataset)
    if kind is Subset:
        return may_be_columns(dataset.dataset)
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(may_be_columns, parts.values() if type(parts) is dict else parts))
    return kind in _ARRAYS or kind in {torch.Tensor, TensorDataset}


def _is_as_torch_made_it(dataset: Any) -> bool:
    """Whether nobody has put methods of his own in the place of torch's."""
    kind = type(dataset)
    methods = [getattr(kind, "__getitem__", None), getattr(kind, "__getitems__", None)]
    are_torchs = all(
        getattr(method, "__module__", "torch.").startswith("torch.") for method in methods if method
    )
    return are_torchs and "__getitems__" not in vars(dataset)


def _column_of(rows: Any) -> Column | None:
    """Rows of one array; None if a batch of them is not just these."""
    if isinstance(rows, np.ndarray):
        rows = _tensor_of(rows)
    if rows is None or rows.layout is not torch.strided or rows.ndim == 0 or not rows.is_cpu:
        return None
    is_odd = rows.is_nested or rows.is_quantized or rows.is_conj() or rows.is_neg()
    if is_odd or rows.requires_grad or rows._is_zerotensor():
        return None
    return Column(rows, rows.dtype)


def _tensor_of(array: Any) -> torch.Tensor | None:
    """A tensor over an array, if torch makes a tensor of each of its rows."""
    is_known = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0
    if not is_known or any(stride < 0 for stride in array.strides):
        return None
    if array.ndim == 1 and array.dtype == np.uint64:
        return None  # torch makes no tensor of such scalars
    try:
        return _tensor_over(array)
    except (TypeError, ValueError):  # a dtype that torch does not have, or strides
        return None


def _tensor_over(array: Any) -> torch.Tensor:
    """A tensor over an array's memory, which nobody writes to: torch need not warn of that."""
    if array.flags.writeable or not array.size:
        return torch.from_numpy(array.view(np.ndarray))
    low, nbytes = address_of(array)
    memory: Any = (ctypes.c_char * nbytes).from_address(low)
    memory.keep = array  # as long as there is a view
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
    """A subset's indices as an array, each from 0 up to the length; None if one is not so."""
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
