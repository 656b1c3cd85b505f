"""Rows of a table: which ones a batch has, and in which chunks of the columns they lie."""

from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]


class Rows:
    """Rows of a column. Finds their chunks once for all columns that lie in chunks alike.

    Attributes:
        array: The rows: int64.
    """

    def __init__(self, array: _Array) -> None:
        self.array = array
        self._found: dict[bytes, _Array] = {}

    def find(self, chunks: Any) -> Any:
        """Return which of a column's chunks (:mod:`shmloader.arrow.buffers`) has each row.

        0 if there is only one chunk.
        """
        if len(chunks.starts) == 1:
            return 0
        if chunks.identity not in self._found:
            found = np.searchsorted(chunks.starts, self.array, side="right") - 1
            self._found[chunks.identity] = found
        return self._found[chunks.identity]


class RowMap:
    """Turns indices of samples into rows of a table.

    Args:
        length: Number of rows.
        maps: What turns indices into rows, one after the other: each is indexed by an array.
    """

    def __init__(self, length: int, maps: tuple[Any, ...] = ()) -> None:
        self._length, self._maps = length, maps

    def mapped(self, mapping: _Array) -> "RowMap":
        """Return the rows of a subset, which has the samples of these indices."""
        return RowMap(self._length, (mapping, *self._maps))

    def rows(self, indices: "_Array | range") -> Rows:
        """Return the row of each sample.

        Raises:
            IndexError: If a mapping leads out of the table.
        """
        rows: Any = indices
        if isinstance(indices, range):
            rows = np.arange(indices.start, indices.stop)
        for mapping in self._maps:
            rows = mapping[rows]
        rows = np.ascontiguousarray(rows, np.int64)
        # As unsigned numbers, negative ones are large.
        if self._maps and rows.view(np.uint64).max() >= self._length:
            raise IndexError(f"samples are mapped to rows beyond the table's {self._length}")
        return Rows(rows)
