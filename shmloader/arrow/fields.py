"""Fields of a batch, gathered from columns of Arrow tables.

A field is a column, and what samples have of it. It makes a batch in two ways: the samples' values
in one tensor, as ``default_collate`` does (``at``), or one by one (``items``).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shmloader.arrow.rows import Rows
from shmloader.collate import Ragged
from shmloader.memory.writer import STREAM_BYTES, copy_rows

if TYPE_CHECKING:
    from shmloader.arrow.buffers import Lists, Numbers, Texts

_Array = np.ndarray[Any, np.dtype[Any]]

# What makes a sample's value of an array, whose memory must not be written to, by form.
_VALUES: dict[str | None, Callable[[_Array], Any]] = {
    "torch": lambda array: torch.from_numpy(array.copy()),
    "numpy": np.ndarray.copy,
    None: np.ndarray.tolist,
}


class ArrowRows(NamedTuple):
    """The values of a batch, all of one shape, where they lie in memory.

    Attributes:
        source: An array whose first dimension is all places where a value may begin.
        at: The places of the batch's values: int64.
        dtype: The dtype that they get.
    """

    source: _Array
    at: _Array
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self.source.shape[1:])

    def copy(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values in ``out``, or else in a new tensor."""
        source, at = self.source, self.at
        if out is None:
            out = torch.empty((len(at), *self.shape), dtype=self.dtype, device="cpu")
        target = out.numpy()
        if target.dtype == source.dtype:
            if out.nbytes >= STREAM_BYTES:
                addresses = at * source.itemsize + source.__array_interface__["data"][0]
                if copy_rows(addresses.tolist(), out):
                    return out
            target[...] = source[at]
        else:
            with np.errstate(over="ignore"):  # in torch, what is too large for a float is infinite
                target[...] = source[at]
        return out


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

    def at(self, rows: Rows) -> ArrowRows | list[str] | None:
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

    def at(self, rows: Rows) -> ArrowRows:
        """Return where the numbers lie."""
        return ArrowRows(self._column.values, self._column.find(rows), self._torch_dtype)

    def items(self, rows: Rows) -> Any:
        """Return one tensor, array or list."""
        numbers = self.at(rows).copy()
        if self._form is None:
            return numbers.tolist()
        return numbers if self._form == "torch" else numbers.numpy()


class ListField(Field):
    """A field of lists of numbers."""

    _column: "Lists"

    def at(self, rows: Rows) -> ArrowRows | None:
        """Return where the lists lie, if all have one length. Lists of Python's are transposed."""
        starts, lengths = self._column.find(rows)
        length = int(lengths[0])
        if self._form is None or length == 0 or (lengths != length).any():
            return None
        values = self._column.values
        shape = (len(values) - length + 1, length)
        source: _Array = np.ndarray(shape, values.dtype, values.data, strides=values.strides * 2)
        return ArrowRows(source, starts, self._torch_dtype)

    def items(self, rows: Rows) -> Ragged | list[Any]:
        """Return the lists, as slices of the column."""
        starts, lengths = self._column.find(rows)
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
