"""Draws an epoch from a position on: what was delivered before is not delivered again.

An order with random access begins at the position. Any other is drawn from its beginning, and what
comes before the position is discarded.
"""

import itertools
from collections.abc import Iterator
from typing import Any


def too_few(position: int, count: int, source: str) -> ValueError:
    """Return the error for a state whose position is beyond the epoch's end.

    Args:
        position: Number of batches after which the state was saved.
        count: Number of batches that this loader's epoch has.
        source: What yields them, such as "sampler".
    """
    return ValueError(
        f"the state does not fit this loader: it was saved after {position} batches of an epoch, "
        f"and the {source} of this loader yields only {count}. Give the sampler, dataset and "
        "batch_size with which it was saved"
    )


def pass_over(batches: Iterator[Any], count: int, position: int, source: str) -> Any:
    """Draw batches that were delivered before, and discard them.

    Args:
        batches: Yields them.
        count: How many come before the position.
        position: Number of the batch that comes next.
        source: What yields the batches, in words.

    Returns:
        The last one; None if ``count`` is 0.

    Raises:
        ValueError: If there are fewer.
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
        batches: Yields the batches from ``position`` on.
        position: Number of the first of them.
        ahead: Numbers of those to leave out.
    """
    if not ahead:
        return batches
    numbers = itertools.count(position)
    return filter(lambda _: next(numbers) not in ahead, batches)
