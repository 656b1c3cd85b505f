"""Finds the columns of datasets in Arrow tables. Imports neither pyarrow nor ``datasets``."""

from typing import Any

from shmloader.arrow import hugging_face
from shmloader.arrow.fields import Field
from shmloader.arrow.rows import RowMap
from shmloader.arrow.table import ArrowTable


def is_arrow(dataset: object) -> bool:
    """Whether a dataset is an :class:`ArrowTable` or a ``datasets.Dataset``, and no subclass."""
    kind = type(dataset)
    # By the name first, which takes no call: this is asked for each epoch of each dataset.
    is_named = kind.__module__ == "datasets.arrow_dataset"
    return kind is ArrowTable or (is_named and hugging_face.is_hugging_face(dataset))


def find_fields(dataset: Any) -> tuple[RowMap, dict[str, Field]] | None:
    """Return the rows of a dataset's samples, and their fields by key, in order.

    None if a field cannot be read.
    """
    if type(dataset) is ArrowTable:
        return RowMap(len(dataset)), dataset.fields
    return hugging_face.find_fields(dataset)


def runs_no_user_code(dataset: Any) -> bool:
    """Whether loading a sample of this dataset in Arrow runs no code of the user's."""
    return type(dataset) is ArrowTable or hugging_face.runs_no_user_code(dataset)


def sources_of(dataset: Any) -> list[Any]:
    """Return the objects that a dataset reads from at present, to notice when one is replaced."""
    return [dataset] if type(dataset) is ArrowTable else [*vars(dataset).values()]
