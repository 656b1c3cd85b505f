"""Batches that are there already: how fast would training be, if loading took no time?"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from shmloader.sampling.checks import whole_number

_T = TypeVar("_T")


class CachedBatches(Generic[_T]):
    """The first batches of a loader, again and again, for ever.

    Train on it for a while: the speed is that which a loader that takes no time would give, and
    what a faster one could gain at most. An endless loop wants an end of its own:
    ``for step, batch in zip(range(1_000), CachedBatches(loader, 8))``.

    The same objects are given each time: who changes a batch in place finds it changed.

    Args:
        loader: Any iterable of batches; of a ``DataLoader``, one epoch is begun and left, and its
            workers end, unless they are persistent.
        n: How many batches to keep; fewer, if there are no more.

    Raises:
        TypeError: If ``n`` is no whole number.
        ValueError: If it is not positive, or there is no batch at all.
    """

    def __init__(self, loader: Iterable[_T], n: int) -> None:
        self._batches = list(itertools.islice(loader, whole_number(n, "n", minimum=1)))
        if not self._batches:
            raise ValueError("there is no batch to be given again: the loader is empty")

    def __iter__(self) -> Iterator[_T]:
        """From the first batch on, without an end."""
        return itertools.cycle(self._batches)
