"""The base class of samplers whose epochs are numbered, and their random numbers.

**Guarantees.** What such a sampler yields in an epoch depends only on its arguments and the epoch's
number. The process's own random number generators (``random``, ``numpy.random``, torch's) are not
used, so ranks whose generators differ still agree, and an epoch can be repeated.

**Assumes.** An epoch begins when its first index is drawn. ``iter()`` alone does not count: torch's
loader with workers calls it twice before the first epoch, and draws from the second iterator.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from torch.utils.data import Sampler

from shmloader.sampling.arguments import whole_number

_Drawn_co = TypeVar("_Drawn_co", covariant=True)

# Seeds and epochs are 64-bit words of Philox's key and counter.
_WORD_VALUES = 2**64

# The key's second word, so that a user's own Philox with the same seed yields other numbers.
_OURS = int.from_bytes(b"sampling", "big")


def random_numbers(seed: int, epoch: int, part: int = 0) -> np.random.Generator:
    """Return a generator for one epoch, independent of that of any other epoch.

    Args:
        seed: The user's seed, from 0 to 2**64 - 1.
        epoch: Number of the epoch, in the same range.
        part: Number of a part or rank that has its own random numbers, in the same range.

    Returns:
        numpy's generator over Philox 4x64. Seed, epoch and part are separate words of its key and
        counter. (With a sum such as ``seed + epoch``, epoch 1 of seed 0 would be epoch 0 of seed
        1.) Philox's words are the same in all releases of numpy; what its methods make of them may
        change.
    """
    key = np.array([seed, _OURS], dtype=np.uint64)
    counter = np.array([0, 0, part, epoch], dtype=np.uint64)  # the low words count what is drawn
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class EpochSampler(Sampler[_Drawn_co], ABC):
    """A sampler whose epochs are numbered.

    Attributes:
        seed: The argument.
        epoch: Number of the next epoch: 0 at first, and one more with each epoch that is begun.

    Args:
        seed: Seed of the sampler's random numbers, an int from 0 to 2**64 - 1.

    Raises:
        TypeError: If the seed is not an int.
        ValueError: If it is out of that range.
    """

    def __init__(self, seed: int) -> None:
        self.seed = whole_number(seed, "seed", minimum=0, below=_WORD_VALUES)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as with torch's ``DistributedSampler``.

        Later epochs count on from there. An epoch that has begun is not changed.

        Args:
            epoch: Number of the next epoch, an int from 0 to 2**64 - 1.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is out of that range.
        """
        self.epoch = whole_number(epoch, "epoch", minimum=0, below=_WORD_VALUES)

    def __iter__(self) -> Iterator[_Drawn_co]:
        """Yield the items of the next epoch. Its number is read when the first item is drawn."""
        epoch = self.epoch
        self.epoch = epoch + 1
        yield from self._draw(epoch)

    @abstractmethod
    def _draw(self, epoch: int) -> Iterable[_Drawn_co]:
        """Yield the items of this epoch."""
