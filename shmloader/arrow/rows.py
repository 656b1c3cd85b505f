"""Rows of a table: which ones a batch has."""

from typing import Any

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]


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

    def rows(self, indices: "_Array | range") -> _Array:
        """Return the row of each sample: int64.

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
        return rows  # type: ignore[no-any-return]
