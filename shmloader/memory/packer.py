"""Writes flat batches into the slot: the worker's half of :mod:`shmloader.memory.layout`.

Samples are stacked, and rows of datasets that are arrays are gathered, without loading samples.
Where samples turn out to be irregular, :meth:`FlatPacker.pack` returns None. The batch is then
collated by torch, whose errors are the ones that the user sees, and pickled.

A large batch is not in the caches any more when the main process, or a GPU, reads it. Writing it
through the caches only has costs: each line is read before it is overwritten, and the samples are
evicted. Streaming stores (:mod:`_streaming`, a few lines of C) halve that traffic. They are
slower where the batch would have stayed in the cache.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.faults import FAULTS
from shmloader.memory.arena import align
from shmloader.memory.layout import BARE, DICT, LIST, Field, FlatLayout, contain, field_tensor
from shmloader.memory.writer import SlotWriter

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
_Array = np.ndarray[Any, np.dtype[Any]]

# The dtype of a field, and its shape in a sample.
_Kind = tuple[torch.dtype, tuple[int, ...]]

# Two keys of these types are equal only if they are the same; 1, True and 1.0 are equal.
_KEY_TYPES = frozenset({str, int})

# The kinds of array that numpy makes of a list of Python numbers where torch makes a tensor of the
# same dtype, by the type of the first number.
_NUMBER_KINDS = {int: "ib", bool: "ib", float: "f"}

# torch's dtype of a field of Python numbers.
_TORCH_DTYPES = {
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.bool_): torch.bool,
}

# Errors that mean that samples are not flat, or not alike.
_IRREGULAR = (RuntimeError, TypeError, ValueError, KeyError, OverflowError)


class FlatPacker:
    """Stacks samples into the slot of the current task. A worker has one for each loader."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        # What identifies the last batch's layout, the layout, and the end of its bytes.
        self._last: tuple[Any, FlatLayout, int] | None = None

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
        start = self._writer.used_bytes
        kinds: list[_Kind] = []
        sources: list[Any] = []
        try:
            container, keys, columns = _split(samples)
            for column in columns:
                kind, source = _read_column(column)
                kinds.append(kind)
                sources.append(source)
            layout = self.reserve(container, keys, len(samples), kinds)
            slot = self._writer.slot
            for field, source in zip(layout.fields, sources, strict=True):
                if type(source) is np.ndarray:
                    np.ndarray(source.shape, source.dtype, slot.memory, field.offset)[:] = source
                else:
                    stack_into(source, field_tensor(slot, field))
                if FAULTS is not None:
                    FAULTS.reach("worker.write")
        except _IRREGULAR:
            self._writer.rewind(start)
            return None
        return layout

    def reserve(
        self, container: int, keys: tuple[object, ...], batch: int, kinds: list[_Kind]
    ) -> FlatLayout:
        """Lay fields out after what the slot holds.

        Args:
            container: The batch's container.
            keys: The dict's keys.
            batch: The number of samples.
            kinds: The dtype of each field, and its shape in a sample.

        Raises:
            SharedMemoryError: If they do not fit the slot.
        """
        start = self._writer.used_bytes
        identity = (start, container, keys, batch, kinds)
        if self._last is None or self._last[0] != identity:
            fields, end = [], start
            for dtype, shape in kinds:
                fields.append(Field(end, dtype, (batch, *shape)))
                end = align(end + batch * math.prod(shape) * dtype.itemsize)
            self._last = identity, FlatLayout(container, keys, tuple(fields)), end
        self._writer.allocate(self._last[2] - start)
        return self._last[1]


def _split(samples: list[Any]) -> tuple[int, tuple[object, ...], list[Any]]:
    """Turn samples into container, keys and columns, one column for each field.

    Raises:
        KeyError, ValueError: If they are of another kind, or not alike.
    """
    kind = type(samples[0])
    if kind is not dict and kind is not tuple and kind is not list:
        return BARE, (), [samples]
    if {*map(type, samples)} != {kind} or not samples[0]:
        raise ValueError
    if kind is not dict:
        return LIST, (), list(zip(*samples, strict=True))
    keys = tuple(samples[0])
    if not _KEY_TYPES.issuperset(map(type, keys)):
        raise ValueError
    return DICT, keys, [[sample[key] for sample in samples] for key in keys]


def _read_column(column: Sequence[Any]) -> tuple[_Kind, Any]:
    """Return a field's kind and its values: the samples' tensors, or one array of numbers.

    Raises:
        Exception: One of ``_IRREGULAR`` if these samples cannot be packed.
    """
    first = column[0]
    kind = type(first)
    if kind is np.ndarray and first.dtype.kind in "biufc":
        column = list(map(torch.as_tensor, column))
        first = column[0]
    if type(first) is _Tensor:
        is_plain = first.layout is torch.strided and first.is_cpu and not first.is_nested
        is_odd = first.requires_grad or first.is_quantized or first._is_zerotensor()
        # A subclass would determine the type of the batch.
        if is_plain and not is_odd and {*map(type, column)} == {_Tensor}:
            return (first.dtype, first.shape), column
    elif kind in _NUMBER_KINDS:
        numbers = np.array(column)  # four times as fast as torch.tensor
        if numbers.ndim == 1 and numbers.dtype.kind in _NUMBER_KINDS[kind]:
            return (_TORCH_DTYPES[numbers.dtype], ()), numbers
    raise ValueError


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


def _are_alike(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Whether stacking only copies bytes."""
    return all(
        type(tensor) is _Tensor
        and tensor.dtype == out.dtype
        and tensor.shape == out.shape[1:]
        and tensor.is_contiguous()
        and tensor.is_cpu
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        for tensor in tensors
    )


# Datasets that are arrays -----------------------------------------------------------------


class Column(NamedTuple):
    """One field of a batch, for all samples.

    Attributes:
        rows: The array, as a tensor. Its first dimension is the rows; its strides are arbitrary. A
            dtype that ``torch.index_select`` does not support is viewed as integers of its size.
        dtype: Dtype of the field in a batch.
        mapping: The index of each sample's row; None if sample n is row n.
    """

    rows: torch.Tensor
    dtype: torch.dtype
    mapping: _Array | None = None


class Columns(NamedTuple):
    """A dataset that is arrays.

    Attributes:
        container: Container of a batch; see :mod:`shmloader.memory.layout`.
        keys: The dict's keys, in order; else empty.
        fields: The arrays.
        length: Number of samples.
    """

    container: int
    keys: tuple[object, ...]
    fields: tuple[Column, ...]
    length: int


class RowGatherer:
    """Gathers batches of one dataset. Without a writer, several threads may use it at once.

    The result is what torch's ``default_collate`` makes of the rows one by one.

    Args:
        columns: The dataset.
        writer: In a worker process, the writer of its slots, where batches are gathered; None to
            gather into new tensors.
    """

    def __init__(self, columns: Columns, writer: SlotWriter | None = None) -> None:
        self._columns, self._writer = columns, writer
        self._packer = None if writer is None else FlatPacker(writer)
        self._kinds = [(one.dtype, tuple(one.rows.shape[1:])) for one in columns.fields]
        self._layout = FlatLayout(columns.container, columns.keys, ())

    @property
    def length(self) -> int:
        """Number of samples."""
        return self._columns.length

    def gather(self, indices: "_Array | range") -> Any:
        """Return a batch; with a writer, its layout.

        Args:
            indices: Indices of its samples, at least one, each from 0 to the length less 1.

        Raises:
            SharedMemoryError: If the batch does not fit the slot.
        """
        rows, columns = _as_run(indices), self._columns
        if self._packer is None or self._writer is None:
            return contain(self._layout, [_take_new(one, rows) for one in columns.fields])
        container, keys, fields, _ = columns
        layout = self._packer.reserve(container, keys, len(indices), list(self._kinds))
        for column, field in zip(fields, layout.fields, strict=True):
            viewed = field._replace(dtype=column.rows.dtype)
            _take(column, rows, field_tensor(self._writer.slot, viewed))
            if FAULTS is not None:
                FAULTS.reach("worker.write")
        return layout


def _as_run(indices: "_Array | range") -> "_Array | range":
    """Return the indices as a range if they are consecutive."""
    if type(indices) is range:
        return indices
    first, count = int(indices[0]), len(indices)
    if int(indices[-1]) - first == count - 1 and (np.diff(indices) == 1).all():
        return range(first, first + count)
    return indices


def _take_new(column: Column, rows: "_Array | range") -> torch.Tensor:
    """Return the rows of these samples in a new tensor."""
    if column.dtype is column.rows.dtype:
        return _take(column, rows, None)
    out = torch.empty((len(rows), *column.rows.shape[1:]), dtype=column.dtype, device="cpu")
    _take(column, rows, out.view(column.rows.dtype))
    return out


def _take(column: Column, rows: "_Array | range", out: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of these samples, in ``out`` or else in a new tensor."""
    source, _, mapping = column
    if mapping is not None:
        at: Any = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        rows = _as_run(mapping[at])
    if isinstance(rows, range):
        part = source[rows.start : rows.stop]
        if out is None:
            return part.clone(memory_format=torch.contiguous_format)
        return out.copy_(part)
    if out is not None and _copy_rows is not None and out.nbytes >= STREAM_BYTES:
        row_bytes = out.nbytes // len(rows)
        if row_bytes >= _ROW_BYTES and source.is_contiguous():
            # In 64 bits, since addresses are computed.
            sources = rows.astype(np.int64) * row_bytes + source.data_ptr()
            _copy_rows(out.data_ptr(), sources.tolist(), row_bytes)
            return out
    # torch warns about a read-only array, such as indices that came in a message.
    index = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
    return torch.index_select(source, 0, index, out=out)
