"""``shmloader.CachedBatches``: what a training loop would gain from a faster loader."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from shmloader.sampling.arguments import whole_number

_T = TypeVar("_T")


class CachedBatches(Generic[_T]):
    """Yields the first batches of a loader again and again, endlessly.

    Train on it for a while to see the most that a faster loader could gain. Your loop has to end by
    itself: ``for step, batch in zip(range(1_000), CachedBatches(loader, 8))``.

    The same objects are yielded each time, so a change made in place stays.

    Args:
        loader: Any iterable of batches. With a ``DataLoader``, the constructor begins an epoch and
            leaves it early, and the workers end unless they are persistent.
        n: Number of batches to keep; if the loader has fewer, all of them are kept.

    Raises:
        TypeError: If ``n`` is not a whole number.
        ValueError: If ``n`` is not positive, or the loader yields no batch.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self, loader: Iterable[_T], n: int) -> None:
        self._batches = list(itertools.islice(loader, whole_number(n, "n", minimum=1)))
        if not self._batches:
            raise ValueError("there is no batch to repeat: the loader is empty")

    def __iter__(self) -> Iterator[_T]:
        """Yield the batches from the first on, endlessly."""
        return itertools.cycle(self._batches)
