"""The lengths of a dataset's lists, without loading a sample."""

from typing import Any

import numpy as np

from shmloader.arrow.hugging_face import is_hugging_face, mapping_of
from shmloader.arrow.table import ArrowTable
from shmloader.grammar import described_type

_Array = np.ndarray[Any, np.dtype[Any]]


def lengths(dataset: Any, column: str) -> _Array:
    """Return the length of each sample's list in a column, from the column's offsets alone.

    Made for ``shmloader.sampling.TokenBatches``. Reads 4 or 8 bytes a row, and no list.

    Args:
        dataset: A ``datasets.Dataset``, whose mapping of indices is followed, or an
            :class:`ArrowTable`.
        column: The name of a column of lists.

    Returns:
        An int64 array with a length for each index of the dataset.

    Raises:
        TypeError: If the dataset is another one, or the column has no lists.
        KeyError: If there is no such column; names those that there are.
        ValueError: If the column has None in place of a list.
    """
    if isinstance(dataset, ArrowTable):
        table, mapping = dataset.table, None
    elif is_hugging_face(dataset):
        table, mapping = dataset.data, mapping_of(dataset)
    else:
        raise TypeError(
            "lengths() reads a datasets.Dataset or an ArrowTable, but the dataset is "
            f"{described_type(dataset)}"
        )
    from shmloader.arrow import buffers  # noqa: PLC0415 - imports pyarrow

    if column not in table.column_names:
        raise KeyError(f"there is no column {column!r}: the columns are {table.column_names}")
    return buffers.lengths_of(table.column(column), mapping)
