"""How many tokens a record has."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from shmloader.grammar import described_type

#: Returns the number of tokens of a record.
Length = Callable[[Any], int]

# The fields that have the tokens of a record; the first one that it has counts.
_FIELDS = ("input_ids", "tokens")


def token_count(record: Any) -> int:
    """Return the number of items of a record, or of its field "input_ids" or "tokens".

    Raises:
        TypeError: If it has neither.
    """
    tokens = record
    if isinstance(record, Mapping):
        field = next((name for name in _FIELDS if name in record), None)
        if field is None:
            raise TypeError(
                f"a record has no field 'input_ids' or 'tokens', only {sorted(map(str, record))}: "
                "give length=, a function that returns the number of tokens of a record"
            )
        tokens = record[field]
    if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
        raise TypeError(
            f"the tokens of a record should be a sequence, but are {described_type(tokens)}: give "
            "length=, a function that returns the number of tokens of a record"
        )
    return len(tokens)


def length_of(record: Any, length: Length | None = None) -> int:
    """Return the length of a record, by a function or else by :func:`token_count`.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is negative.
    """
    found = (length or token_count)(record)
    try:
        count = operator.index(found)
    except TypeError:
        raise TypeError(f"length should return an int, but returned {found!r}") from None
    if count < 0:
        raise ValueError(f"length should return at least 0, but returned {count}")
    return count
