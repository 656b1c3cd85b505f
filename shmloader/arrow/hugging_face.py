"""Finds the columns of a ``datasets.Dataset`` that can be read from their buffers.

Read are columns of numbers and of lists of numbers in the formats "torch", "numpy" and None, and of
texts without a format, all without None. Samples are exactly what ``datasets`` makes of them: with
a format, integers become int64, and floats float32. All else is left to ``datasets``, such as texts
with a format, which lose zeros at their ends.

Public are the table (``Dataset.data``), the features and the format. The mapping of indices that
``shuffle``, ``select`` and others make has no public name: it is the table ``Dataset._indices``. A
dataset without that attribute is left to ``datasets``, as are subclasses and patched methods.
"""

import sys
from typing import Any

import numpy as np

from shmloader.arrow.fields import Field
from shmloader.arrow.rows import RowMap

# The features whose values are what the table has, without decoding.
_PLAIN = {"Value", "ClassLabel"}
_LISTS = {"List", "LargeList", "Sequence"}
_FORMS = (None, "torch", "numpy")


def is_hugging_face(dataset: object) -> bool:
    """Whether an object is a ``datasets.Dataset``, of exactly this class. Imports nothing."""
    module = sys.modules.get("datasets")
    return module is not None and type(dataset) is getattr(module, "Dataset", None)


def mapping_of(dataset: Any) -> Any:
    """Return the row of each sample as an array of integers; None if sample n is row n."""
    indices = dataset._indices
    return None if indices is None else indices.column(0).to_numpy()


def find_fields(dataset: Any) -> tuple[RowMap, dict[str, Field]] | None:
    """Return the rows of a dataset's samples, and their fields by key, in order.

    None if a field cannot be read.
    """
    from shmloader.arrow import columns  # noqa: PLC0415 - imports pyarrow
    from shmloader.arrow.buffers import UnreadableError, is_text  # noqa: PLC0415

    form, table, features = dataset.format, dataset.data, dataset.features
    if not _is_known(dataset, form) or not hasattr(dataset, "_indices"):
        return None
    names, formatted = table.column_names, form["columns"]
    forms = {name: form["type"] for name in names if name in formatted}
    if form["output_all_columns"]:
        forms |= dict.fromkeys(name for name in names if name not in formatted)
    fields: dict[str, Field] = {}
    try:
        indices = dataset._indices
        maps = () if indices is None else (columns.NumberField(indices.column(0)),)
        for name, one in forms.items():
            column = table.column(name)
            if not _is_plain(features[name]) or (one is not None and is_text(column.type)):
                return None
            fields[name] = columns.field_of(column, one, dtype_of)
    except UnreadableError:
        return None
    return (RowMap(table.num_rows, maps), fields) if fields else None


def runs_no_user_code(dataset: Any) -> bool:
    """Whether samples are what ``datasets`` makes of plain columns. Reads no column."""
    return _is_known(dataset, dataset.format) and all(map(_is_plain, dataset.features.values()))


def _is_known(dataset: Any, form: Any) -> bool:
    methods = [getattr(dataset, name) for name in ("__getitem__", "__getitems__")]
    is_patched = any(not method.__module__.startswith("datasets.") for method in methods)
    return form["type"] in _FORMS and not form["format_kwargs"] and not is_patched


def dtype_of(dtype: np.dtype[Any], form: str | None) -> Any:
    """Return the dtype of a number in samples, by its own and the format; None: not supported."""
    if dtype == np.uint64:
        return None
    return np.int64 if dtype.kind in "iu" else np.float64 if form is None else np.float32


def _is_plain(feature: Any) -> bool:
    kind = type(feature)
    if not kind.__module__.startswith("datasets."):
        return False
    return kind.__name__ in _PLAIN or (kind.__name__ in _LISTS and _is_plain(feature.feature))
