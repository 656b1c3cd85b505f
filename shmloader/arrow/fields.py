"""Fields of a batch, gathered from columns of Arrow tables.

A field is a column, and what samples have of it. It makes a batch in two ways: the samples' values
in one tensor, as ``default_collate`` does (``at``), or one by one (``items``).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmloader.arrow.rows import Rows
from shmloader.collate import Ragged
from shmloader.memory.rows import RowsAt, RowSource

if TYPE_CHECKING:
    from shmloader.arrow.buffers import Lists, Numbers, Texts

_Array = np.ndarray[Any, np.dtype[Any]]

# What makes a sample's value of an array, whose memory must not be written to, by form.
_VALUES: dict[str | None, Callable[[_Array], Any]] = {
    "torch": lambda array: torch.from_numpy(array.copy()),
    "numpy": np.ndarray.copy,
    None: np.ndarray.tolist,
}


class Field:
    """One field of the samples of a dataset in Arrow tables. Threads may share it.

    Args:
        column: The reader of the column.
        dtype: Dtype of the numbers in samples.
        form: What samples have: tensors ("torch"), arrays and numpy's numbers ("numpy"), or lists
            and Python's numbers (None).
    """

    def __init__(self, column: Any, dtype: Any = None, form: str | None = None) -> None:
        self._column, self._dtype, self._form = column, np.dtype(dtype), form
        self._torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        # The column's numbers, or its lists of one length. Made for the first batch.
        self._source: RowSource | None = None

    def at(self, rows: Rows) -> RowsAt | list[str] | None:
        """Return what ``default_collate`` makes of the values of these rows.

        None if that is not one tensor, or not one list of texts.
        """
        raise NotImplementedError

    def items(self, rows: Rows) -> Any:
        """Return the values of these rows, as a field of a ``RaggedBatch``."""
        raise NotImplementedError


class NumberField(Field):
    """A field of numbers."""

    _column: "Numbers"

    def at(self, rows: Rows) -> RowsAt | None:
        """Return where the numbers lie. Of NumPy's own of uint64, torch makes no tensor."""
        if self._form == "numpy" and self._dtype == np.uint64:
            return None
        return self._find(rows)

    def _find(self, rows: Rows) -> RowsAt:
        source = self._source
        if source is None:
            self._source = source = RowSource(self._column.tensor, self._torch_dtype)
        return RowsAt(source, self._column.find(rows), (0, *self._column.finder))

    def items(self, rows: Rows) -> Any:
        """Return one tensor, array or list."""
        source, at, _ = self._find(rows)
        numbers = source.copy(at)
        if self._form is None:
            return numbers.tolist()
        return numbers if self._form == "torch" else numbers.numpy()


class ListField(Field):
    """A field of lists of numbers."""

    _column: "Lists"

    def at(self, rows: Rows) -> RowsAt | None:
        """Return where the lists lie, if all have one length. Lists of Python's are transposed."""
        starts, _, length = self._column.find(rows)
        if self._form is None or not length:
            return None
        source = self._source
        if source is None or source.shape != (length,):
            # As if a list of this length began at each element: only those that do are read.
            shape = (len(self._column.tensor) - length + 1, length)
            lists = self._column.tensor.as_strided(shape, (1, 1))
            self._source = source = RowSource(lists, self._torch_dtype)
        return RowsAt(source, starts, (0, *self._column.finder, length))

    def items(self, rows: Rows) -> Ragged | list[Any]:
        """Return the lists, as slices of the column."""
        starts, lengths, _ = self._column.find(rows)
        lists = Ragged(self._column.values, starts, lengths, self._dtype, _VALUES[self._form])
        # torch makes float32 of lists of floats, whose numbers are float64.
        is_exact = self._form is not None or self._dtype.kind != "f"
        return lists if is_exact else list(lists)


class TextField(Field):
    """A field of texts.

    Args:
        column: The reader of the column.
        finish: Makes of a batch's texts what samples have; None if these have the texts themselves.
    """

    def __init__(
        self, column: "Texts", finish: Callable[[list[str]], list[str]] | None = None
    ) -> None:
        super().__init__(column)
        self._finish = finish

    def at(self, rows: Rows) -> list[str]:
        """Return the texts."""
        texts: list[str] = self._column.texts(rows)
        return texts if self._finish is None else self._finish(texts)

    items = at


class ObjectField(Field):
    """A field of any other values, which pyarrow makes Python's objects one by one."""

    def at(self, rows: Rows) -> None:
        """Return None: the values are collated as objects."""

    def items(self, rows: Rows) -> list[Any]:
        """Return the objects."""
        return [self._column[row].as_py() for row in rows.array.tolist()]
