"""Draws from users' samplers, and finds the position of an epoch that continues.

A sampler is drawn from its beginning, and the batches before the position are discarded: they were
delivered before. A checksum of the last of them shows whether the sampler yields the same again.
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

    Raises:
        RuntimeError: If ``iter()`` of the sampler raises StopIteration, which would silently end
            the epoch.
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
    return itertools.chain(first, rest) if first else only_next(restart())


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


class LastDrawn:
    """Knows a checksum of the last item that the user is done with.

    Args:
        progress: The epoch's progress.
        saved: The state that the epoch continues from; None for a new epoch.
    """

    __slots__ = ("_before", "_items", "_progress")

    def __init__(self, progress: Progress, saved: dict[str, Any] | None) -> None:
        self._progress = progress
        self._before = None if saved is None else saved.get("last_checksum")
        # The items from the last one before the position on, by the position after them.
        self._items: dict[int, Any] = {}

    def add(self, position: int, item: Any) -> None:
        """Add an item that was drawn, and the position once it is done."""
        items, done = self._items, self._progress.position
        items[position] = item
        while (first := next(iter(items))) < done:
            del items[first]

    def checksum(self) -> int | None:
        """Return the checksum; None if it is not known."""
        position = self._progress.position
        if position in self._items:
            return _checksum(self._items[position])
        return self._before if position == self._progress.start else None


def check_same(last: object, saved: dict[str, Any], position: int, kind: str) -> None:
    """Check that a sampler yields what it yielded in the run whose state was loaded.

    Args:
        last: The last of what was delivered before, as it is drawn now.
        saved: The state, which has its checksum, or None if that was not known.
        position: The position after it.
        kind: What yields it, for the message.

    Raises:
        ValueError: If it differs.
    """
    expected = saved.get("last_checksum")
    if expected is not None and _checksum(last) not in (None, expected):
        raise ValueError(
            f"the state does not fit this loader: the {kind} of this loader yields another "
            f"batch {position - 1} than that of the run whose state this is. Its order must be "
            "the same whenever it is iterated for the same epoch: seed it, or give it a "
            "generator=, a set_epoch(), or state_dict() and load_state_dict()"
        )


def _checksum(indices: object) -> int | None:
    """Return a checksum of numbers and strings; None for other objects, whose text may differ."""
    try:
        return zlib.crc32(json.dumps(as_list(indices)).encode())
    except (TypeError, ValueError):
        return None
