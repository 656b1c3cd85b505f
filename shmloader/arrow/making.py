"""Makes the fields of samples of a table's columns. Imports pyarrow."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmloader.arrow.buffers import Lists, Numbers, Texts, UnreadableError, read
from shmloader.arrow.fields import Field, ListField, NumberField, TextField

__all__ = ["Lists", "Numbers", "Texts", "UnreadableError", "field_of"]

#: Returns the dtype that samples have for one of the table and a form; None if there is none.
DTypeOf = Callable[[np.dtype[Any], str | None], Any]


def field_of(
    column: Any,
    form: str | None,
    dtype_of: DTypeOf,
    finish: Callable[[list[str]], list[str]] | None = None,
) -> Field:
    """Return the field of a ``pyarrow.ChunkedArray``.

    Raises:
        UnreadableError: If it cannot be read from its buffers.
    """
    reader = read(column)
    if isinstance(reader, Texts):
        return TextField(reader, finish)
    dtype = dtype_of(reader.values.dtype, form)
    if dtype is None:
        raise UnreadableError(f"samples have no {reader.values.dtype}")
    make = NumberField if isinstance(reader, Numbers) else ListField
    return make(reader, dtype, form)
