"""Stacks samples into the slot: the worker's half of :mod:`shmloader.memory.flat`.

Where a batch turns out to be irregular, :meth:`FlatPacker.pack` returns None. The batch is then
collated by torch, whose errors are the ones that the user sees, and pickled.

A large batch is not in the caches any more when the main process, or a GPU, reads it. Writing it
through the caches only has costs: each line is read before it is overwritten, and the samples are
evicted. Streaming stores (:mod:`_streaming`, a few lines of C) halve that traffic. They are
slower where the batch would have stayed in the cache.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.faults import FAULTS
from shmloader.memory.arena import Slot, align
from shmloader.memory.flat import (
    BARE,
    COPY_OUT_BYTES,
    DICT,
    LIST,
    FlatLayout,
    Group,
    group_tensor,
)
from shmloader.memory.slot_writer import SlotWriter

_copy_rows: Callable[[int, list[int], int], None] | None
try:
    from shmloader.memory._streaming import copy_rows as _copy_rows
except ImportError:  # installed without a compiler
    _copy_rows = None

#: Fields of at least this many bytes are written with streaming stores. Between the size of a
#: core's own cache (2 MiB on servers) and 16 MiB, it varies which kind of store is faster.
STREAM_BYTES = 8 << 20

# With shorter rows, checking each tensor costs more than streaming saves.
_ROW_BYTES = 16 << 10

_Tensor = torch.Tensor

# Two keys of these types are equal only if they are the same; 1, True and 1.0 are equal.
_KEY_TYPES = frozenset({str, int})

#: The most packings that a packer keeps, and for which it keeps views of each slot.
MOST_PACKINGS = 64

_ONLY_TENSORS = {torch.Tensor}

# The kind of array that numpy makes of a list of scalars, by their torch dtype.
_SCALAR_KINDS = {
    torch.float64: "f",
    torch.float32: "f",
    torch.int64: "i",
    torch.int32: "i",
    torch.int16: "i",
    torch.int8: "i",
    torch.uint8: "i",
    torch.bool: "b",
}

# torch's dtype of a field of Python numbers, by the dtype of the array that a converter returns.
_TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.bool_): torch.bool,
}

# A field: its dtype, and its shape in a sample, which is None for numbers.
_Spec = tuple[torch.dtype, tuple[int, ...] | None]


def _convert_ints(column: Sequence[object]) -> "np.ndarray[Any, Any]":
    # numpy agrees with torch.tensor where the result is int64 or bool, and is four times as fast.
    array = np.array(column)
    return array if array.dtype.kind in "ib" else torch.tensor(column).numpy()


def _convert_floats(column: Sequence[object]) -> "np.ndarray[Any, Any]":
    array = np.array(column)
    if array.dtype == np.float64:
        return array
    return torch.tensor(column, dtype=torch.float64).numpy()


_CONVERTERS: dict[type, Callable[[Sequence[object]], "np.ndarray[Any, Any]"]] = {
    int: _convert_ints,
    bool: _convert_ints,
    float: _convert_floats,
}


class _Target(NamedTuple):
    """A group in a slot, as a tensor and as an array. Never leaves this module."""

    tensor: torch.Tensor
    array: "np.ndarray[Any, Any] | None"
    kind: str | None


def _make_targets(slot: Slot, layout: FlatLayout) -> list[_Target]:
    targets = []
    for group in layout.groups:
        tensor = group_tensor(slot, group, len(group.positions))
        kind = _SCALAR_KINDS.get(tensor.dtype) if tensor.ndim == 1 else None
        targets.append(_Target(tensor, tensor.numpy() if kind else None, kind))
    return targets


def _fill_group(group: Group, target: _Target, sources: list[Any]) -> bool:
    """Write the fields of a group; return False if they differ from those of the first sample."""
    tensor, array, kind = target
    is_single = len(group.positions) == 1
    if is_single:
        source = sources[group.positions[0]]
    else:
        source = list(chain.from_iterable(map(sources.__getitem__, group.positions)))
    if type(source) is np.ndarray:
        assert array is not None
        array[:] = source
        return True
    if set(map(type, source)) != _ONLY_TENSORS:
        return False  # a subclass determines the type of the batch
    if array is not None:
        # Takes three quarters of the time of torch.stack, which makes a view of each scalar first.
        # A sample that is not a scalar becomes a list, which is an error.
        numbers = np.array(list(map(torch.Tensor.tolist, source)))
        if numbers.dtype.kind != kind or (kind == "f" and any(t.requires_grad for t in source)):
            return False
        array[:] = numbers
    elif is_single and tensor.numel():
        stack_into(source, tensor)
    else:
        # Many small tensors: torch.stack is faster without an output, even with the extra copy.
        stacked = torch.stack(source, 0)
        if stacked.dtype != tensor.dtype or stacked.requires_grad:
            return False
        tensor.copy_(stacked)
    return True


class _NotFlatError(Exception):
    """These samples cannot be packed."""


@dataclass(slots=True)
class Packing:
    """How batches of one kind are packed; used for as long as the kind stays the same.

    Attributes:
        signature: Identifies the kind: container, keys, batch size and fields.
        layout: The layout of such a batch.
        end: Bytes from the slot's start to the end of the batch.
    """

    signature: tuple[object, ...]
    layout: FlatLayout
    end: int


class FlatPacker:
    """Stacks samples into the slot of the current task. A worker has one for each loader."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        # Keyed by the offset at which the batch begins, since a slot may hold several batches.
        self._packings: dict[int, Packing] = {}

    def pack(self, samples: object) -> FlatLayout | None:
        """Append a batch to what the slot holds, if it can be packed.

        Args:
            samples: The samples, as the dataset returned them.

        Returns:
            The layout; the same object for as long as batches are alike. None if the samples are
            not flat, or not alike; the slot then holds what it held before.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        if type(samples) is not list or not samples:
            return None
        fields: list[_Spec] = []
        sources: list[Any] = []
        try:
            container, keys, columns = _split(samples)
            for column in columns:
                _read_column(column, fields, sources)
        except _NotFlatError:
            return None
        signature = (container, keys, len(samples), fields)
        writer = self._writer
        start = writer.used_bytes
        packing = self._packings.get(start)
        if packing is None or packing.signature != signature:
            if len(self._packings) > MOST_PACKINGS:
                self._packings.clear()
            packing = make_packing(container, keys, len(samples), fields, start)
            self._packings[start] = packing
        writer.allocate(packing.end - start)
        try:
            targets = targets_in(writer.slot, self, start, packing, _make_targets)
            for group, target in zip(packing.layout.groups, targets, strict=True):
                if not _fill_group(group, target, sources):
                    break
                if FAULTS is not None:
                    FAULTS.reach("worker.write")
            else:
                return packing.layout
        except (RuntimeError, TypeError, ValueError):
            pass
        writer.rewind(start)
        return None


def targets_in(
    slot: Slot,
    owner: object,
    start: int,
    packing: Packing,
    make: Callable[[Slot, FlatLayout], list[Any]],
) -> list[Any]:
    """Return ``make(slot, packing.layout)``, kept with the slot for the next batch of the kind.

    Args:
        slot: The slot to write to.
        owner: The caller; views that another owner has kept with the slot are dropped.
        start: Where in the slot the batch begins.
        packing: The packing of the batch.
        make: Makes views of the slot.
    """
    kept_by, kept = slot.views
    if kept_by is not owner or len(kept) > MOST_PACKINGS:
        kept = {}
        slot.views = (owner, kept)
    targets: list[Any]
    made_for, targets = kept.get(start, (None, []))
    if made_for is not packing:
        targets = make(slot, packing.layout)
        kept[start] = (packing, targets)
    return targets


def _split(samples: list[Any]) -> tuple[int, tuple[object, ...], Sequence[Sequence[Any]]]:
    """Turn samples into container, keys and columns, one column for each field.

    Raises:
        _NotFlatError: If they are of another kind, or not alike.
    """
    first = samples[0]
    kind = type(first)
    if kind is dict:
        keys = tuple(first)
        if not _KEY_TYPES.issuperset(map(type, keys)):
            raise _NotFlatError
        rows = [_row(sample, keys) for sample in samples]
        columns = list(zip(*rows, strict=True))
        container = DICT
    elif kind is tuple or kind is list:
        keys = ()
        if {*map(type, samples)} != {kind} or {*map(len, samples)} != {len(first)}:
            raise _NotFlatError
        columns = list(zip(*samples, strict=True))
        container = LIST
    else:
        return BARE, (), (samples,)
    if not columns:
        raise _NotFlatError
    return container, keys, columns


def _row(sample: object, keys: tuple[object, ...]) -> Iterable[Any]:
    """Return a dict's values in the order of ``keys``; its other keys are left out."""
    if type(sample) is not dict:
        raise _NotFlatError
    if tuple(sample) == keys:
        return sample.values()
    try:
        return [sample[key] for key in keys]
    except KeyError:
        raise _NotFlatError from None


def _read_column(column: Sequence[Any], fields: list[_Spec], sources: list[Any]) -> None:
    """Append a field's dtype and shape, and its values: the samples' tensors or one array.

    Raises:
        _NotFlatError: If these samples cannot be packed.
    """
    first = column[0]
    kind = type(first)
    if kind is torch.Tensor:
        if (
            first.layout is not torch.strided
            or not first.is_cpu
            or first.is_nested
            or first.requires_grad
            or first.is_quantized
            or first._is_zerotensor()
        ):
            raise _NotFlatError
        fields.append((first.dtype, first.shape))
        sources.append(column)
        return
    convert = _CONVERTERS.get(kind)
    try:
        if convert is not None:
            numbers = convert(column)
            fields.append((_TORCH_DTYPES[numbers.dtype], None))
            sources.append(numbers)
            return
        if kind is np.ndarray and first.dtype.kind in "biufc":
            tensors = list(map(torch.as_tensor, column))
            fields.append((tensors[0].dtype, tensors[0].shape))
            sources.append(tensors)
            return
    except Exception:  # noqa: BLE001 - torch's collate raises the error that the user sees
        raise _NotFlatError from None
    raise _NotFlatError


def make_packing(
    container: int, keys: tuple[object, ...], batch: int, fields: list[_Spec], start: int
) -> Packing:
    """Lay out the fields from ``start`` on, with small ones of the same kind side by side."""
    alike: dict[Any, list[int]] = {}
    for position, spec in enumerate(fields):
        dtype, shape = spec
        small = shape is not None and (batch * math.prod(shape) * dtype.itemsize <= COPY_OUT_BYTES)
        alike.setdefault(spec if small else (position, spec), []).append(position)
    groups = []
    end = start
    for positions in alike.values():
        dtype, shape = fields[positions[0]]
        full = (batch, *(shape or ()))
        groups.append(Group(end, dtype, full, tuple(positions)))
        end = align(end + len(positions) * math.prod(full) * dtype.itemsize)
    layout = FlatLayout(container, keys, tuple(groups))
    return Packing((container, keys, batch, fields), layout, end)


def stack_into(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Do ``torch.stack(tensors, 0, out=out)``, bypassing the caches where that is faster.

    Args:
        tensors: Tensors of any dtypes and shapes.
        out: A contiguous tensor of the result's shape.

    Raises:
        RuntimeError: As torch.stack does.
    """
    nbytes = out.numel() * out.element_size()
    if nbytes >= STREAM_BYTES and _copy_rows is not None and _are_alike(tensors, out):
        row_bytes = nbytes // len(tensors)
        rows = list(map(_Tensor.data_ptr, tensors))
        if row_bytes >= _ROW_BYTES and 0 not in rows:
            _copy_rows(out.data_ptr(), rows, row_bytes)
            return
    torch.stack(tensors, 0, out=out)  # type: ignore[arg-type]


def stream_rows(
    first: int, indices: "np.ndarray[Any, np.dtype[np.intp]]", row_bytes: int, out: int
) -> bool:
    """Gather rows, bypassing the caches, if there are enough bytes for that to be faster.

    Args:
        first: Address of row 0. The other rows follow without a gap.
        indices: Indices of the rows.
        row_bytes: Length of a row in bytes.
        out: Address to copy them to.

    Returns:
        Whether the rows were gathered.
    """
    if _copy_rows is None or row_bytes < _ROW_BYTES or row_bytes * len(indices) < STREAM_BYTES:
        return False
    _copy_rows(out, (indices * row_bytes + first).tolist(), row_bytes)
    return True


def _are_alike(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Whether stacking only copies bytes."""
    return (
        {type(tensor) for tensor in tensors} == {_Tensor}
        and {tensor.dtype for tensor in tensors} == {out.dtype}
        and {tensor.shape for tensor in tensors} == {out.shape[1:]}
        and all(map(_Tensor.is_contiguous, tensors))
        and all(tensor.is_cpu for tensor in tensors)
        and not any(tensor.requires_grad for tensor in tensors)
        and not any(map(_Tensor.is_conj, tensors))
        and not any(map(_Tensor.is_neg, tensors))
    )
