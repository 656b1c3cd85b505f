"""Columns of Arrow tables, read from their buffers, a batch of rows at a time.

A column lies in chunks, which have buffers of their own, in memory or in mapped files. One array
spans all addresses from the first of these buffers to the last. So the rows of a batch are gathered
by one call, whichever chunks they are in. Only the bytes of the rows are ever read, so a
reader takes no memory for a column, apart from two integers for each chunk.

Assumes that rows are inside the column, which the callers check: nothing else would. This module
imports pyarrow, and is imported where an Arrow table is there already.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.types as kinds
import torch

_Array = np.ndarray[Any, np.dtype[Any]]


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


class Chunks:
    """The chunks of a column that have rows.

    Attributes:
        items: The chunks, as ``pyarrow`` arrays.
        starts: The first row of each: int64.
    """

    def __init__(self, column: Any) -> None:
        self.items = [chunk for chunk in column.chunks if len(chunk)]
        if not self.items or column.null_count:
            raise UnreadableError("rows that are None, or no rows")
        self.starts = np.cumsum([0, *map(len, self.items[:-1])])

    def find(self, rows: _Array) -> Any:
        """Return which chunk has each row; 0 if there is only one chunk."""
        if len(self.starts) == 1:
            return 0
        return np.searchsorted(self.starts, rows, side="right") - 1


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
    if not is_list(kind):
        raise TypeError(f"a column of lists has lengths, but this one has {kind}")
    if column.null_count:
        is_none = column.is_null().to_numpy()
        is_none = is_none if rows is None else is_none[rows]
        if is_none.any():
            raise ValueError(
                f"{is_none.sum()} of {len(is_none)} lists are None: fill or drop these"
            )
    from pyarrow import compute  # noqa: PLC0415 - the import takes 0.1 s, and is rarely needed

    found: _Array = compute.list_value_length(column).fill_null(0).to_numpy()
    return (found if rows is None else found[rows]).astype(np.int64)


# pyarrow's arrays -------------------------------------------------------------------------


def is_text(kind: Any) -> bool:
    """Whether a type of pyarrow's is that of texts whose bytes lie in one buffer."""
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def is_list(kind: Any) -> bool:
    """Whether a type of pyarrow's is one of lists."""
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def has_size(kind: Any) -> bool:
    """Whether a type of lists fixes their length."""
    return bool(kinds.is_fixed_size_list(kind))


def is_large(kind: Any) -> bool:
    """Whether the offsets of a type of lists or texts have 64 bits."""
    return bool(kinds.is_large_list(kind) or kinds.is_large_string(kind))


def number_dtype(kind: Any) -> np.dtype[Any]:
    """Return numpy's dtype for a type of pyarrow's; bools are bits, and have none here."""
    if not (kinds.is_integer(kind) or kinds.is_floating(kind)):
        raise UnreadableError(f"{kind} is no number")
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def elements_of(array: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the address of an array's first number, and how many there are."""
    if array.null_count:
        raise UnreadableError("numbers that are None")
    return array.buffers()[1].address + array.offset * dtype.itemsize, len(array)


def list_elements_of(array: Any) -> tuple[int, int]:
    """Return the address of the elements that a chunk's offsets count from, and how many."""
    if is_text(array.type):
        _, offsets, data = array.buffers()
        # Where all texts are empty, any address does.
        return (offsets.address, 0) if data is None else (data.address, data.size)
    if not is_list(array.type):
        raise UnreadableError("no lists")
    values = array.values
    dtype = number_dtype(values.type)
    if len(values):
        return elements_of(values, dtype)
    if has_size(array.type):
        raise UnreadableError("lists that have to be empty")
    # All lists are empty: any address does that suits the dtype.
    return array.buffers()[1].address & -dtype.alignment, 0


def offsets_of(array: Any, width: np.dtype[Any]) -> tuple[int, int]:
    """Return the address of a chunk's first offset, and the number of its offsets."""
    return array.buffers()[1].address + array.offset * width.itemsize, len(array) + 1
