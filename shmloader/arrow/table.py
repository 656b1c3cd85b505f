"""A map-style dataset over Arrow and Parquet files, by pyarrow alone."""

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from shmloader.arrow.fields import Field, ObjectField
from shmloader.arrow.hugging_face import dtype_of
from shmloader.collate import RaggedBatch

_FORMS = ("numpy", "torch", None)


class ArrowTable(Dataset[dict[str, Any]]):
    """A map-style dataset over the rows of Arrow, Feather or Parquet files.

    A sample is a dict of the columns' values. Arrow files are mapped into memory: rows are read
    when they are needed, and processes share them. Compressed Feather files and Parquet files are
    decoded into the memory of each process that opens them. Forked workers share the memory of
    their parent; others open the files themselves. So convert large Parquet files to Arrow files
    once.

    A loader makes batches from the table's buffers, without samples, if all columns are numbers,
    lists of numbers, or texts, without None. Values of other columns become Python's objects.

    Args:
        source: A path, several paths of files with the same columns, whose rows follow each other,
            or a ``pyarrow.Table``. Files that end in ``.parquet`` or ``.pq`` are Parquet; all
            others are Arrow, as files or as streams.
        columns: Names of the columns that samples have, in their order; None for all.
        format: "numpy" or "torch": numbers and lists of numbers are arrays or tensors, with the
            dtype that the table has. None: they are Python's.

    Attributes:
        table: The ``pyarrow.Table``, with the chosen columns.
        fields: The fields of samples by name, in order, for loaders.

    Raises:
        ImportError: If pyarrow is not installed.
        TypeError: If the source is another one, or columns are no names.
        ValueError: If there is no file, no such format, no column, or a column twice.
        KeyError: If the files have no column of a name; names those that there are.
    """

    def __init__(
        self,
        source: Any,
        columns: Sequence[str] | None = None,
        format: str | None = "numpy",  # noqa: A002 - as datasets calls it
    ) -> None:
        if format not in _FORMS:
            raise ValueError(f'format is "numpy", "torch" or None, but it is {format!r}')
        if columns is not None:
            columns = _checked_columns(columns)
        self._columns, self._format = columns, format
        if isinstance(source, str | os.PathLike):
            source = [source]
        if isinstance(source, list | tuple):
            source = [os.path.abspath(path) for path in source]  # noqa: PTH100 - of any class
            if not source:
                raise ValueError("ArrowTable needs the path of at least one file")
        from shmloader.arrow import columns as reading  # noqa: PLC0415 - import pyarrow
        from shmloader.arrow import files  # noqa: PLC0415
        from shmloader.arrow.buffers import UnreadableError  # noqa: PLC0415

        self.table = table = files.open_table(source, columns)
        # What is pickled: the paths, or the table with the columns that were chosen.
        self._source = source if isinstance(source, list) else table
        self.fields: dict[str, Field] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            try:
                self.fields[name] = reading.field_of(column, format, _dtype_of)
            except UnreadableError:
                self.fields[name] = ObjectField(column)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the paths, and not the rows; a ``pyarrow.Table`` without paths as it is."""
        return type(self), (self._source, self._columns, self._format)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample: a dict of the columns' values."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples of these indices, which may be negative as in lists.

        Raises:
            IndexError: If there is no row of an index.
        """
        length = len(self)
        rows = np.array([operator.index(index) for index in indices], np.int64)
        outside = (rows < -length) | (rows >= length)
        if outside.any():
            raise IndexError(f"there is no row {rows[outside][0]}: the table has {length}")
        if not len(rows):
            return []
        rows[rows < 0] += length
        return list(RaggedBatch({key: one.items(rows) for key, one in self.fields.items()}))


def _checked_columns(columns: Sequence[str]) -> list[str]:
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns should be a list of names, but got columns={columns!r}")
    names = list(columns)
    if not names or len({*names}) < len(names):
        raise ValueError(f"columns should be different names, at least one, but got {names}")
    return names


def _dtype_of(dtype: np.dtype[Any], form: str | None) -> Any:
    """Return the dtype of numbers in samples, by that of the table's and the format."""
    return dtype_of(dtype, None) if form is None else dtype
