"""Fields of numbers, lists of numbers and texts, gathered from the buffers of Arrow columns.

This module imports pyarrow, and is imported where an Arrow table is there already.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmloader.arrow.buffers import (
    Chunks,
    Span,
    UnreadableError,
    elements_of,
    has_size,
    is_large,
    is_list,
    is_text,
    list_elements_of,
    number_dtype,
    offsets_of,
)
from shmloader.arrow.fields import Field
from shmloader.collate import Ragged
from shmloader.memory.compiled import find_lists
from shmloader.memory.rows import RowsAt, RowSource

_Array = np.ndarray[Any, np.dtype[Any]]

#: Returns the dtype that samples have for one of the table and a form; None if there is none.
DTypeOf = Callable[[np.dtype[Any], str | None], Any]

# The types of texts, whose bytes are read as lists of these.
_BYTES = np.dtype(np.uint8)

# What makes a sample's value of an array, whose memory must not be written to, by form.
_VALUES: dict[str | None, Callable[[_Array], Any]] = {
    "torch": lambda array: torch.from_numpy(array.copy()),
    "numpy": np.ndarray.copy,
    None: np.ndarray.tolist,
}


class _BufferField(Field):
    """A field that is read from its column's buffers.

    Args:
        column: A ``pyarrow.ChunkedArray`` without None, also inside of lists.
        form: What samples have: tensors ("torch"), arrays and numpy's numbers ("numpy"), or lists
            and Python's numbers (None).
        dtype_of: Says the dtype of the numbers in samples; None for that of the column.

    Attributes:
        values: An array in which the column's numbers lie, in pieces.
    """

    def __init__(
        self, column: Any, form: str | None = None, dtype_of: DTypeOf | None = None
    ) -> None:
        self._chunks, self._form = Chunks(column), form
        span = self._read(column)
        dtype = span.array.dtype if dtype_of is None else dtype_of(span.array.dtype, form)
        if dtype is None:
            raise UnreadableError(f"samples have no {span.array.dtype}")
        self.values, self._dtype = span.array, np.dtype(dtype)
        self._source = RowSource(span.tensor, torch.from_numpy(np.empty(0, dtype)).dtype)

    def _read(self, column: Any) -> Span:
        """Find the buffers. Returns the array in which the numbers lie."""
        raise NotImplementedError


class NumberField(_BufferField):
    """A field of numbers. ``field[rows]`` are the values of an array of rows."""

    def _read(self, column: Any) -> Span:
        dtype, chunks = number_dtype(column.type), self._chunks
        span = Span([elements_of(chunk, dtype) for chunk in chunks.items], dtype, column)
        self._bases = span.firsts - chunks.starts
        # How the compiled part finds the numbers of rows.
        self._table = np.concatenate([chunks.starts, -chunks.starts, span.firsts])
        self._finder = 0, self._table.ctypes.data, len(chunks.items), 0, 1, 0
        return span

    def _find(self, rows: _Array) -> _Array:
        """Return where the numbers of these rows lie in ``values``."""
        at: _Array = rows + self._bases[self._chunks.find(rows)]
        return at

    def __getitem__(self, rows: _Array) -> _Array:
        """Return the numbers of an array of rows."""
        return self.values[self._find(rows)]

    def at(self, rows: _Array) -> RowsAt | None:
        """Return where the numbers lie. Of NumPy's own of uint64, torch makes no tensor."""
        if self._form == "numpy" and self._dtype == np.uint64:
            return None
        return RowsAt(self._source, self._find(rows), self._finder)

    def items(self, rows: _Array) -> Any:
        """Return one tensor, array or list."""
        numbers = self._source.copy(self._find(rows))
        if self._form is None:
            return numbers.tolist()
        return numbers if self._form == "torch" else numbers.numpy()


class ListField(_BufferField):
    """A field of lists of numbers, of any length, or of one that their type fixes."""

    def _read(self, column: Any) -> Span:
        kind, chunks = column.type, self._chunks
        pieces = [list_elements_of(chunk) for chunk in chunks.items]
        span = Span(pieces, _BYTES if is_text(kind) else number_dtype(kind.value_type), column)
        self._tensor, self._firsts = span.tensor, span.firsts
        #: Elements of each list, if their type fixes it; else None.
        self._size: int | None = kind.list_size if has_size(kind) else None
        if self._size is None:
            width = np.dtype(np.int64 if is_large(kind) else np.int32)
            offsets = Span([offsets_of(chunk, width) for chunk in chunks.items], width, column)
            array = offsets.array
            #: Where each list begins and ends, by the place of its offset.
            self._bounds: _Array = np.ndarray(
                (len(array) - 1, 2), width, array.data, strides=array.strides * 2
            )
            self._bases = offsets.firsts - chunks.starts
            self._offsets = array.ctypes.data, width.itemsize
        else:
            skipped = np.array([chunk.offset for chunk in chunks.items], np.int64)
            self._bases = skipped - chunks.starts
            self._offsets = 0, self._size
        # What the compiled part reads: the chunks, and the offsets.
        self._table = np.concatenate([chunks.starts, self._bases, self._firsts])
        self._finder = 0, self._table.ctypes.data, len(chunks.items), *self._offsets
        return span

    def find(self, rows: _Array) -> tuple[_Array, _Array, int | None]:
        """Find the lists of these rows.

        Returns:
            Where they begin in ``values``, int64; their lengths; and the length if all have one,
            else None.
        """
        if self._size is None and find_lists is not None:
            found: _Array = np.empty((2, len(rows)), np.int64)
            length = find_lists(rows, self._table, *self._offsets, found)
            return found[0], found[1], None if length < 0 else length
        chunk = self._chunks.find(rows)
        at = rows + self._bases[chunk]
        if self._size is not None:
            begins = at * self._size + self._firsts[chunk]
            return begins, np.full(len(at), self._size), self._size
        bounds = self._bounds[at]
        begins, lengths = bounds[:, 0] + self._firsts[chunk], bounds[:, 1] - bounds[:, 0]
        is_one = lengths.size and (lengths == lengths[0]).all()
        return begins, lengths, int(lengths[0]) if is_one else None

    def at(self, rows: _Array) -> RowsAt | list[str] | None:
        """Return where the lists lie, if all have one length. Lists of Python's are transposed."""
        starts, _, length = self.find(rows)
        if self._form is None or not length:
            return None
        source = self._source
        if source.shape != (length,):
            # As if a list of this length began at each element: only those that do are read.
            lists = self._tensor.as_strided((len(self._tensor) - length + 1, length), (1, 1))
            self._source = source = RowSource(lists, source.dtype)
        return RowsAt(source, starts, (*self._finder, length))

    def items(self, rows: _Array) -> Any:
        """Return the lists, as slices of the column."""
        starts, lengths, _ = self.find(rows)
        lists = Ragged(self.values, starts, lengths, self._dtype, _VALUES[self._form])
        # torch makes float32 of lists of floats, whose numbers are float64.
        is_exact = self._form is not None or self._dtype.kind != "f"
        return lists if is_exact else list(lists)


class TextField(ListField):
    """A field of texts."""

    def at(self, rows: _Array) -> list[str]:
        """Return the texts."""
        starts, lengths, _ = self.find(rows)
        return [
            self.values[start : start + length].tobytes().decode()
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]

    items = at


def field_of(column: Any, form: str | None, dtype_of: DTypeOf) -> Field:
    """Return the field of a ``pyarrow.ChunkedArray``.

    Raises:
        UnreadableError: If it is none of numbers, lists of numbers or texts, or has None, or
            samples have no such numbers.
    """
    if is_text(column.type):
        return TextField(column)
    return (ListField if is_list(column.type) else NumberField)(column, form, dtype_of)
