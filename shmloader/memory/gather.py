"""Gathers rows of arrays into batches, for datasets that are arrays.

A worker process gathers straight into the slot, the main process into new tensors. The result is
what torch's ``default_collate`` makes of the rows one by one. A run of consecutive indices is one
copy; in a large batch, long rows are copied with stores that bypass the caches.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.faults import FAULTS
from shmloader.memory.arena import Slot
from shmloader.memory.flat import FlatLayout, contain, group_tensor
from shmloader.memory.packer import (
    MOST_PACKINGS,
    Packing,
    make_packing,
    stream_rows,
    targets_in,
)
from shmloader.memory.slot_writer import SlotWriter

_Array = np.ndarray[Any, np.dtype[Any]]


class Column(NamedTuple):
    """One field of a batch, for all samples.

    Attributes:
        rows: The array, as a tensor. Its first dimension is the rows; its strides are arbitrary.
        dtype: Dtype of the field in a batch.
        mapping: The index of each sample's row; None if sample n is row n.
    """

    rows: torch.Tensor
    dtype: torch.dtype
    mapping: _Array | None = None


class Columns(NamedTuple):
    """A dataset that is arrays.

    Attributes:
        container: Container of a batch; see :mod:`shmloader.memory.flat`.
        keys: The dict's keys, in order; else empty.
        fields: The arrays.
        length: Number of samples.
    """

    container: int
    keys: tuple[object, ...]
    fields: tuple[Column, ...]
    length: int


class _Source(NamedTuple):
    """A column, prepared for gathering.

    Attributes:
        tensor: The column's rows, viewed as integers of the same size if there is such a dtype.
        array: The rows as an array if numpy can take rows without copying them all; else None.
        mapping: The column's mapping.
        row_bytes: Length of a row in bytes.
    """

    tensor: torch.Tensor
    array: _Array | None
    mapping: _Array | None
    row_bytes: int


# Dtypes, by size in bytes, that replace all others, which numpy or index_select may not support.
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The dtypes that index_select supports.
_COMMON = {
    *_STAND_INS.values(),
    *(torch.int8, torch.bool, torch.complex64, torch.complex128),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def _make_source(column: Column) -> _Source:
    rows = column.rows
    rows = rows.view(_STAND_INS.get(rows.element_size(), rows.dtype))
    row_bytes = rows[:1].numel() * rows.element_size()
    array = _array_over(rows) if rows.is_contiguous() and row_bytes else None
    return _Source(rows, array, column.mapping, row_bytes)


class _Memory:
    """Describes a tensor's memory to numpy."""

    __slots__ = ("__array_interface__",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": f"|V{tensor.element_size()}",
        }


def _array_over(tensor: torch.Tensor) -> _Array:
    """Return an array over a contiguous tensor's memory, without keeping that memory alive.

    Not ``tensor.numpy()``: the user's tensor could not be resized after that.
    """
    return np.asarray(_Memory(tensor))


class RowGatherer:
    """Gathers batches of one dataset into new tensors. Several threads may use it at once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._sources = [_make_source(column) for column in columns.fields]

    @property
    def length(self) -> int:
        """Number of samples."""
        return self._columns.length

    def gather(self, indices: "_Array | range") -> Any:
        """Return a batch.

        Args:
            indices: Indices of its samples, at least one, each from 0 to the length less 1.
        """
        run = _as_run(indices)
        fields = []
        for column, source in zip(self._columns.fields, self._sources, strict=True):
            rows = _rows_of(source, run, indices)
            if column.dtype not in _COMMON:
                shape = (len(indices), *column.rows.shape[1:])
                field = torch.empty(shape, dtype=column.dtype, device="cpu")
                _copy(source, field.view(source.tensor.dtype), rows)
            elif type(rows) is range:
                part = column.rows[rows.start : rows.stop]
                field = part.clone(memory_format=torch.contiguous_format)
            else:
                field = torch.index_select(column.rows, 0, _as_tensor(rows))
            fields.append(field)
        return contain(self._columns.container, self._columns.keys, fields)


class SlotGatherer(RowGatherer):
    """Gathers into the slot of the current task. A worker has one for each loader it serves."""

    def __init__(self, columns: Columns, writer: SlotWriter) -> None:
        super().__init__(columns)
        self._writer = writer
        self._specs = [(column.dtype, tuple(column.rows.shape[1:])) for column in columns.fields]
        # Keyed by the offset in the slot at which the batch begins, and its number of samples.
        self._packings: dict[tuple[int, int], Packing] = {}

    def gather(self, indices: "_Array | range") -> FlatLayout:
        """Append a batch to what the slot holds.

        Args:
            indices: Indices of its samples, at least one, each from 0 to the length less 1.

        Returns:
            Its layout; the same object for as long as batches are alike.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        start, batch = self._writer.used_bytes, len(indices)
        packing = self._packings.get((start, batch))
        if packing is None:
            if len(self._packings) > MOST_PACKINGS:
                self._packings.clear()
            columns = self._columns
            packing = make_packing(columns.container, columns.keys, batch, list(self._specs), start)
            self._packings[start, batch] = packing
        self._writer.allocate(packing.end - start)
        run = _as_run(indices)
        if run is None:
            indices = np.asarray(indices, dtype=np.intp)
        targets = targets_in(self._writer.slot, self, start, packing, self._make_targets)
        for source, target in zip(self._sources, targets, strict=True):
            _copy(source, target, _rows_of(source, run, indices))
            if FAULTS is not None:
                FAULTS.reach("worker.write")
        return packing.layout

    def _make_targets(self, slot: Slot, layout: FlatLayout) -> list[torch.Tensor]:
        """Return a tensor over each field in the slot."""
        targets: list[Any] = [None] * len(self._sources)
        for group in layout.groups:
            fields = group_tensor(slot, group, len(group.positions), by_field=True)
            for position, field in zip(group.positions, fields, strict=True):
                targets[position] = field.view(self._sources[position].tensor.dtype)
        return targets


def _as_run(indices: "_Array | range") -> range | None:
    """Return the indices as a range if they are consecutive, else None."""
    if type(indices) is range:
        return indices
    first, count = int(indices[0]), len(indices)
    if int(indices[-1]) - first != count - 1:
        return None
    is_run = bool((np.diff(indices) == 1).all())
    return range(first, first + count) if is_run else None


def _rows_of(source: _Source, run: range | None, indices: Any) -> "_Array | range":
    """Return the indices of these samples' rows in a column; a range if they are consecutive."""
    if source.mapping is None:
        return indices if run is None else run
    mapped = source.mapping[indices if run is None else slice(run.start, run.stop)]
    run = _as_run(mapped)
    return mapped if run is None else run


def _as_tensor(rows: _Array) -> torch.Tensor:
    """Return indices as a tensor.

    torch warns about a read-only array, so such an array is copied. Indices that came in a message
    are read-only, and so are those of a shared array.
    """
    # np.require does the same, at 0.4 µs for each field of a batch.
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


def _copy(source: _Source, target: torch.Tensor, rows: "_Array | range") -> None:
    """Copy rows into a tensor of a slot or of a new batch."""
    if type(rows) is range:
        target.copy_(source.tensor[rows.start : rows.stop])
        return
    rows = np.asarray(rows, dtype=np.intp)
    if source.array is None:
        torch.index_select(source.tensor, 0, _as_tensor(rows), out=target)
    elif not stream_rows(source.tensor.data_ptr(), rows, source.row_bytes, target.data_ptr()):
        # The indices are known to be valid, and "clip" is the fastest mode.
        np.take(source.array, rows, 0, _array_over(target), "clip")
