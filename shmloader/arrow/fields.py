"""Fields of a batch of a dataset in Arrow tables, as loaders see them. Imports no pyarrow."""

import abc
from typing import Any

import numpy as np

from shmloader.memory.rows import RowsAt

_Array = np.ndarray[Any, np.dtype[Any]]


class Field(abc.ABC):
    """A column, and what the samples of a dataset have of it. Threads may share it.

    It makes a batch in two ways: the samples' values in one tensor, as ``default_collate`` does
    (``at``), or one by one (``items``).
    """

    @abc.abstractmethod
    def at(self, rows: _Array) -> RowsAt | list[str] | None:
        """Return what ``default_collate`` makes of the values of these rows.

        None if that is not one tensor, or not one list of texts.
        """

    @abc.abstractmethod
    def items(self, rows: _Array) -> Any:
        """Return the values of these rows, as a field of a ``RaggedBatch``."""


class ObjectField(Field):
    """A field of values that pyarrow makes Python's objects one by one, from a chunked array."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def at(self, rows: _Array) -> None:
        """Return None: the values are collated as objects."""

    def items(self, rows: _Array) -> list[Any]:
        """Return the objects."""
        return [self._column[row].as_py() for row in rows.tolist()]
