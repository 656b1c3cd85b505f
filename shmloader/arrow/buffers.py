"""Columns of Arrow tables, read from their buffers, a batch of rows at a time.

A column lies in chunks, which have buffers of their own, in memory or in mapped files. One array
spans all addresses from the first of these buffers to the last. So the rows of a batch are gathered
by one call, whichever chunks they are in. Only the bytes of the rows are ever read, so a
reader takes no memory for a column, apart from two integers for each chunk.

Assumes that rows are inside the column, which the callers check: nothing else would. This module
imports pyarrow, and is imported where an Arrow table is there already.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.types as kinds
import torch

from shmloader.arrow.rows import Rows
from shmloader.memory.compiled import find_lists

_Array = np.ndarray[Any, np.dtype[Any]]

# The types of texts, whose bytes are read as lists of these.
_BYTES = np.dtype(np.uint8)


class UnreadableError(Exception):
    """A column that is not read from its buffers. Never reaches the user."""


class Span:
    """One array over pieces of memory that hold elements of one dtype.

    Attributes:
        array: The array, which cannot be written to. Between the pieces it must not be read.
        tensor: A tensor over the same memory. It must not be written to.
        firsts: Where each piece begins in the array: int64.

    Args:
        pieces: The address of each piece, and its number of elements.
        dtype: The dtype.
        keep: What keeps the memory alive.
    """

    def __init__(
        self, pieces: Sequence[tuple[int, int]], dtype: np.dtype[Any], keep: object
    ) -> None:
        size = dtype.itemsize
        addresses = np.array([address for address, _ in pieces], np.int64)
        low = int(addresses.min())
        distances = addresses - low
        if low % size or (distances % size).any():
            raise UnreadableError("elements are not aligned")
        nbytes = max(address - low + count * size for address, count in pieces)
        memory: Any = (ctypes.c_char * nbytes).from_address(low)
        memory.keep = keep
        array: _Array = np.ndarray((nbytes // size,), dtype, memory)
        self.tensor = torch.from_numpy(array)
        self.array = array.view()
        self.array.flags.writeable = False
        self.firsts = distances // size


class _Chunks:
    """The chunks of a column that have rows.

    Attributes:
        items: The chunks, as ``pyarrow`` arrays.
        starts: The first row of each: int64.
        identity: Equal for columns that lie in chunks alike.
    """

    def __init__(self, column: Any) -> None:
        self.items = [chunk for chunk in column.chunks if len(chunk)]
        if not self.items or column.null_count:
            raise UnreadableError("rows that are None, or no rows")
        self.starts = np.cumsum([0, *map(len, self.items[:-1])])
        self.identity = hashlib.blake2b(self.starts.tobytes()).digest()


class Numbers:
    """A column of numbers. ``numbers[rows]`` are the values of an array of rows.

    Args:
        column: A ``pyarrow.ChunkedArray`` without None.

    Attributes:
        values: An array in which the numbers lie, in pieces.
        tensor: A tensor over the same memory.
        finder: How the compiled part finds the numbers of rows.
    """

    def __init__(self, column: Any) -> None:
        dtype = _number_dtype(column.type)
        self._chunks = chunks = _Chunks(column)
        span = Span([_elements_of(chunk, dtype) for chunk in chunks.items], dtype, column)
        self.values, self.tensor = span.array, span.tensor
        self._bases = span.firsts - chunks.starts
        self._table = np.concatenate([chunks.starts, -chunks.starts, span.firsts])
        self.finder = self._table.ctypes.data, len(chunks.items), 0, 1, 0

    def find(self, rows: Rows) -> _Array:
        """Return where the numbers of these rows lie in ``values``."""
        chunks = self._chunks
        if len(chunks.items) == 1:
            return rows.array  # the first number is that of row 0
        at: _Array = rows.array + self._bases[rows.find(chunks.starts, chunks.identity)]
        return at

    def __getitem__(self, rows: _Array) -> _Array:
        """Return the numbers of an array of rows."""
        return self.values[self.find(Rows(rows))]


class Lists:
    """A column of lists of numbers.

    Args:
        column: A ``pyarrow.ChunkedArray`` without None, also inside of lists. Lists may have any
            length, or one that their type fixes.

    Attributes:
        values: An array in which the elements of all lists lie, in pieces.
        tensor: A tensor over the same memory.
        finder: How the compiled part finds the lists of rows, apart from their length.
    """

    def __init__(self, column: Any) -> None:
        kind = column.type
        self._chunks = chunks = _Chunks(column)
        pieces = [_list_elements_of(chunk) for chunk in chunks.items]
        dtype = _BYTES if _is_text(kind) else _number_dtype(kind.value_type)
        span = Span(pieces, dtype, column)
        self.values, self.tensor, self._firsts = span.array, span.tensor, span.firsts
        #: Elements of each list, if their type fixes it; else None.
        self._size: int | None = kind.list_size if _has_size(kind) else None
        if self._size is None:
            width = np.dtype(np.int64 if _is_large(kind) else np.int32)
            places = [_offsets_of(chunk, width) for chunk in chunks.items]
            offsets = Span(places, width, column)
            array = offsets.array
            #: Where each list begins and ends, by the place of its offset.
            self._bounds: _Array = np.ndarray(
                (len(array) - 1, 2), width, array.data, strides=array.strides * 2
            )
            self._bases = offsets.firsts - chunks.starts
            where = array.ctypes.data, width.itemsize
        else:
            skipped = np.array([chunk.offset for chunk in chunks.items], np.int64)
            self._bases = skipped - chunks.starts
            where = 0, self._size
        # What the compiled part reads: the chunks, and the offsets.
        self._table = np.concatenate([chunks.starts, self._bases, self._firsts])
        self._offsets = where
        self.finder = self._table.ctypes.data, len(chunks.items), *where

    def find(self, rows: Rows) -> tuple[_Array, _Array, int | None]:
        """Find the lists of these rows.

        Returns:
            Where they begin in ``values``, int64; their lengths; and the length if all have one,
            else None.
        """
        if self._size is None and find_lists is not None:
            found: _Array = np.empty((2, len(rows.array)), np.int64)
            length = find_lists(rows.array, self._table, *self._offsets, found)
            return found[0], found[1], None if length < 0 else length
        chunk = rows.find(self._chunks.starts, self._chunks.identity)
        at = rows.array + self._bases[chunk]
        if self._size is not None:
            begins = at * self._size + self._firsts[chunk]
            return begins, np.full(len(at), self._size), self._size
        bounds = self._bounds[at]
        begins, lengths = bounds[:, 0] + self._firsts[chunk], bounds[:, 1] - bounds[:, 0]
        is_one = lengths.size and (lengths == lengths[0]).all()
        return begins, lengths, int(lengths[0]) if is_one else None


class Texts(Lists):
    """A column of texts."""

    def texts(self, rows: Rows) -> list[str]:
        """Return the texts of these rows."""
        starts, lengths, _ = self.find(rows)
        return [
            self.values[start : start + length].tobytes().decode()
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]


def lengths_of(column: Any, rows: _Array | None) -> _Array:
    """Return the length of each list of a column, from its offsets alone: int64.

    Args:
        column: A ``pyarrow.ChunkedArray`` of lists.
        rows: The rows whose lengths are returned; None for all.

    Raises:
        TypeError: If the column has no lists.
        ValueError: If one of these rows has None in place of a list.
    """
    kind = column.type
    if not _is_list(kind):
        raise TypeError(f"a column of lists has lengths, but this one has {kind}")
    if column.null_count:
        is_none = column.is_null().to_numpy()
        is_none = is_none if rows is None else is_none[rows]
        if is_none.any():
            raise ValueError(
                f"{is_none.sum()} of {len(is_none)} lists are None: fill or drop these"
            )
    if _has_size(kind):
        return np.full(len(column if rows is None else rows), kind.list_size, np.int64)
    width = np.dtype(np.int64 if _is_large(kind) else np.int32)
    lengths: _Array = np.empty(len(column), np.int64)
    start = 0
    for chunk in filter(len, column.chunks):
        offsets = Span([_offsets_of(chunk, width)], width, chunk).array
        np.subtract(offsets[1:], offsets[:-1], out=lengths[start : start + len(chunk)])
        start += len(chunk)
    return lengths if rows is None else lengths[rows]


# pyarrow's arrays -------------------------------------------------------------------------


def _is_text(kind: Any) -> bool:
    """Whether a type of pyarrow's is that of texts whose bytes lie in one buffer."""
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _has_size(kind: Any) -> bool:
    return bool(kinds.is_fixed_size_list(kind))


def _is_large(kind: Any) -> bool:
    return bool(kinds.is_large_list(kind) or kinds.is_large_string(kind))


def _number_dtype(kind: Any) -> np.dtype[Any]:
    """Return numpy's dtype for a type of pyarrow's; bools are bits, and have none here."""
    if not (kinds.is_integer(kind) or kinds.is_floating(kind)):
        raise UnreadableError(f"{kind} is no number")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def _elements_of(array: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the address of an array's first number, and how many there are."""
    if array.null_count:
        raise UnreadableError("numbers that are None")
    return array.buffers()[1].address + array.offset * dtype.itemsize, len(array)


def _list_elements_of(array: Any) -> tuple[int, int]:
    """Return the address of the elements that a chunk's offsets count from, and how many."""
    if _is_text(array.type):
        _, offsets, data = array.buffers()
        # Where all texts are empty, any address does.
        return (offsets.address, 0) if data is None else (data.address, data.size)
    if not _is_list(array.type):
        raise UnreadableError("no lists")
    values = array.values
    dtype = _number_dtype(values.type)
    if len(values):
        return _elements_of(values, dtype)
    if _has_size(array.type):
        raise UnreadableError("lists that have to be empty")
    # All lists are empty: any address does that suits the dtype.
    return array.buffers()[1].address & -dtype.alignment, 0


def _offsets_of(array: Any, width: np.dtype[Any]) -> tuple[int, int]:
    """Return the address of a chunk's first offset, and the number of its offsets."""
    return array.buffers()[1].address + array.offset * width.itemsize, len(array) + 1


def read(column: Any) -> Numbers | Lists | Texts:
    """Return the reader of a column of numbers, of lists of numbers, or of texts.

    Raises:
        UnreadableError: If it is none of these, or has None.
    """
    if _is_text(column.type):
        return Texts(column)
    return Lists(column) if _is_list(column.type) else Numbers(column)
