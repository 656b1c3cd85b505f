"""Draws an epoch from a position on: batches that were delivered before are not delivered again.

An order with random access begins at the position. Any other order is drawn from its beginning, and
the batches before the position are discarded.
"""

import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any

from shmloader.sampling.indices import as_list


def too_few(position: int, count: int, source: str) -> ValueError:
    """Return the error for a state whose position is beyond the epoch's end.

    Args:
        position: Number of batches after which the state was saved.
        count: Number of batches that this loader's epoch has.
        source: Kind of the object that yields the batches, such as "sampler".
    """
    return ValueError(
        f"the state does not fit this loader: it was saved after {position} batches of an epoch, "
        f"and the {source} of this loader yields only {count}. Give the sampler, dataset and "
        "batch_size with which it was saved"
    )


def pass_over(batches: Iterator[Any], count: int, position: int, source: str) -> Any:
    """Draw batches that were delivered before, and discard them.

    Args:
        batches: Iterator of the batches.
        count: Number of batches to draw, up to the position.
        position: Number of the batch that comes next.
        source: Kind of the object that yields the batches, for the error message.

    Returns:
        The last batch drawn; None if ``count`` is 0.

    Raises:
        ValueError: If there are fewer than ``count`` batches.
    """
    passed, last = 0, None
    for batch in itertools.islice(batches, count):
        passed, last = passed + 1, batch
    if passed < count:
        raise too_few(position, position - count + passed, source)
    return last


def without_done(batches: Iterator[Any], position: int, ahead: frozenset[int]) -> Iterator[Any]:
    """Return an iterator without the batches that were delivered ahead of their turn.

    Args:
        batches: Iterator of the batches from ``position`` on.
        position: Number of the first of these batches.
        ahead: Numbers of the batches to leave out.
    """
    if not ahead:
        return batches
    numbers = itertools.count(position)
    return filter(lambda _: next(numbers) not in ahead, batches)


def checksum(indices: object) -> int | None:
    """Return a checksum of numbers and strings; None for other objects, whose text may differ."""
    try:
        return zlib.crc32(json.dumps(as_list(indices)).encode())
    except (TypeError, ValueError):
        return None


def check_same(last: object, expected: int | None, number: int, kind: str) -> None:
    """Check that a sampler yields what it yielded in the run whose state was loaded.

    Args:
        last: The last of what was delivered before, as it is drawn now.
        expected: Its checksum in the state; None if it was not known.
        number: Number of its batch.
        kind: What yields it, for the message.

    Raises:
        ValueError: If it differs.
    """
    actual = checksum(last)
    if expected is not None and actual is not None and expected != actual:
        raise ValueError(
            f"the state does not fit this loader: the {kind} of this loader yields another "
            f"batch {number} than that of the run whose state this is. Its order must be "
            "the same whenever it is iterated for the same epoch: seed it, or give it a "
            "generator=, a set_epoch(), or state_dict() and load_state_dict()"
        )
