"""Draws from users' samplers, and finds the position of an epoch that continues.

A sampler is drawn from its beginning, and the batches before the position are discarded: they were
delivered before.
"""

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmloader.sampling.indices import as_list
from shmloader.sampling.progress import Progress


def only_next(items: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that calls only ``next()`` of a user's iterator, as torch does.

    An iterator may begin again when ``iter()`` is called on it, as that of Lightning's wrapper of
    batch samplers does for predictions. Loops, ``list()`` and the functions of ``itertools`` call
    ``iter()``.
    """
    return map(next, itertools.repeat(items))


def iterate(sampler: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of a user's sampler.

    If ``iter()`` of the sampler raises StopIteration, that becomes a RuntimeError, as in a
    generator. Otherwise it would silently end the epoch.

    Raises:
        RuntimeError: If ``iter()`` of the sampler raises StopIteration.
        BaseException: Any other exception of ``iter()``, unchanged.
    """
    try:
        return iter(sampler)
    except StopIteration as error:
        raise RuntimeError("iter() of the sampler raised StopIteration") from error


def restart_if_exhausted(
    items: Iterator[Any], restart: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    """Return ``items``, a sampler's first iterator, or a new iterator if ``items`` is exhausted.

    A sampler that reads its state when it is iterated, such as torchdata's
    StatefulDistributedSampler, may have been saved at the end of an epoch. Then its first iterator
    yields nothing, and the next one yields the whole epoch.

    Args:
        items: The first iterator. One item is drawn from it now.
        restart: Function that returns a new iterator of the sampler.
    """
    rest = only_next(items)
    first = list(itertools.islice(rest, 1))
    return itertools.chain(first, rest) if first else restart()


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


def pass_over(batches: Iterator[Any], position: int, source: str) -> Any:
    """Draw and discard the batches before a position, and return the last one of them.

    Args:
        batches: Iterator of the batches.
        position: Number of the batch that comes next.
        source: Kind of the object that yields the batches, for the error message.

    Raises:
        ValueError: If there are fewer batches.
    """
    passed, last = 0, None
    for batch in itertools.islice(batches, position):
        passed, last = passed + 1, batch
    if passed < position:
        raise too_few(position, passed, source)
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


class LastDrawn:
    """Knows a checksum of the last item that the user is done with.

    Args:
        progress: The epoch's progress.
        before: The checksum at the position where the epoch begins or continues.
    """

    __slots__ = ("_before", "_begun_at", "_items", "_progress")

    def __init__(self, progress: Progress, before: int | None) -> None:
        self._progress, self._begun_at, self._before = progress, progress.position, before
        # The items from the last one before the position on, with their numbers.
        self._items: list[tuple[int, Any]] = []

    def add(self, number: int, item: Any) -> None:
        """Add an item that was drawn."""
        items, last = self._items, self._progress.position - 1
        items.append((number, item))
        while items[0][0] < last:
            del items[0]

    def checksum(self) -> int | None:
        """Return the checksum; None if it is not known."""
        position = self._progress.position
        for number, item in self._items:
            if number == position - 1:
                return _checksum(item)
        return self._before if position == self._begun_at else None


def _checksum(indices: object) -> int | None:
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
    if expected is not None and _checksum(last) not in (None, expected):
        raise ValueError(
            f"the state does not fit this loader: the {kind} of this loader yields another "
            f"batch {number} than that of the run whose state this is. Its order must be "
            "the same whenever it is iterated for the same epoch: seed it, or give it a "
            "generator=, a set_epoch(), or state_dict() and load_state_dict()"
        )
