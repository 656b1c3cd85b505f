"""Parquet shards, read by pyarrow, which is an extra.

No index is needed: the files themselves say how many rows each part of them has.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shmloader.sampling.arguments import whole_number
from shmloader.streams.formats import IndexedFormat, between, reading, unreadable

_Record = dict[str, Any]

# So many rows are decoded at a time. Of 1,024 tokens each they fit the cache of a core.
_BATCH_ROWS = 256


class ParquetFormat(IndexedFormat):
    """The format of Parquet shards.

    A record is a dict of columns. Numbers, texts and bytes are Python's, and null is None. A list
    of numbers is an array of shape (length,) of the column's dtype. All else is what
    ``to_pylist()`` makes. Row groups without a record that is needed are not read.

    Args:
        columns: The columns that are read; None for all.
        batch_rows: So many rows are decoded at a time, and are in memory.
    """

    def __init__(self, columns: Sequence[str] | None = None, batch_rows: int = _BATCH_ROWS) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns should be a list of names, but is {columns!r}")
        if columns is not None and not columns:
            raise ValueError("columns should have a name, or be None for all columns, but is empty")
        self._columns = None if columns is None else list(columns)
        self._batch_rows = whole_number(batch_rows, "batch_rows", minimum=1)

    def __repr__(self) -> str:
        return f"ParquetFormat(columns={self._columns}, batch_rows={self._batch_rows})"

    def count(self, path: str) -> int:
        """Return the number of rows, from the metadata of the file."""
        with reading(path), _open(path) as file:
            return int(file.metadata.num_rows)

    def read(self, path: str, numbers: Sequence[int]) -> Iterator[_Record]:
        """Yield the rows of ascending numbers.

        Raises:
            ShardError: If the file cannot be read, or lacks a column.
        """
        with reading(path), _open(path) as file:
            names = file.schema_arrow.names
            for name in self._columns or ():
                if name not in names:
                    raise unreadable(path, f"it has no column {name!r}, but {names}")
            columns, end = names if self._columns is None else self._columns, 0
            for group in range(file.num_row_groups):
                first, end = end, end + file.metadata.row_group(group).num_rows
                if not between(numbers, first, end):
                    continue
                # Without threads: the workers of a loader run beside each other.
                for batch in file.iter_batches(
                    self._batch_rows, row_groups=[group], columns=columns, use_threads=False
                ):
                    if here := between(numbers, first, first + len(batch)):
                        is_whole = len(here) == len(batch)
                        rows = batch if is_whole else batch.take(np.array(here) - first)
                        yield from _rows(rows.select(columns))
                    first += len(batch)
                    if first > numbers[-1]:
                        return


def _open(path: str) -> Any:
    """Open a file as a ``pyarrow.parquet.ParquetFile``."""
    try:
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(f"reading {path} takes pyarrow: pip install pyarrow") from error
    return ParquetFile(path)


def _rows(batch: Any) -> Iterator[_Record]:
    """Yield the rows of a ``pyarrow.RecordBatch``."""
    names = batch.schema.names
    for row in zip(*map(_values, batch.columns), strict=True):
        yield dict(zip(names, row, strict=True))


def _values(column: Any) -> Iterable[Any]:
    """Yield the value of each row of a ``pyarrow.Array``.

    Each list of numbers becomes an array of its own, so that a record that is kept keeps no other.
    """
    import pyarrow.types as kinds  # noqa: PLC0415 - an extra

    kind = column.type
    if (
        not (kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))
        or not (kinds.is_integer(kind.value_type) or kinds.is_floating(kind.value_type))
        or column.values.null_count
    ):
        rows: list[Any] = column.to_pylist()
        return rows
    # Copied when its record is made, so that it is in the processor's cache when it is used.
    arrays = column.to_numpy(zero_copy_only=False)
    return (None if array is None else array.copy() for array in arrays)


#: The format of Parquet shards.
open_parquet = ParquetFormat()
