"""Epochs of a sampler: which one it is, and its random numbers.

**Guarantees.** What a sampler gives in an epoch is a function of its arguments and the epoch's
number. The process's own random streams (``random``, ``numpy.random``, torch's) are neither read
nor moved, so ranks that have drawn differently until then still agree, and an epoch can be had
again.

**Assumes.** An epoch begins when its first index is drawn. ``iter()`` alone does not count: torch's
loader with workers calls it twice before the first epoch, and draws from the second.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from torch.utils.data import Sampler

from shmloader.sampling.checks import whole_number

_Drawn_co = TypeVar("_Drawn_co", covariant=True)

#: Seeds and epochs are words of Philox's key and counter.
_WORD_VALUES = 2**64

#: The key's second word: a user's own Philox with the same seed gives other numbers.
_OURS = int.from_bytes(b"sampling", "big")


def random_numbers(seed: int, epoch: int, part: int = 0) -> np.random.Generator:
    """Make the random numbers of one epoch, independent of those of any other.

    Args:
        seed: The user's, from 0 to 2**64 - 1.
        epoch: The epoch's number, in the same range.
        part: Part or rank that has numbers of its own, in the same range.

    Returns:
        numpy's generator over Philox 4x64. Seed, epoch and part stand in key and counter as they
        are, where a sum such as ``seed + epoch`` would give epoch 1 of seed 0 to epoch 0 of seed 1.
        The words stay the same with every release of numpy; what its methods make of them may not.
    """
    key = np.array([seed, _OURS], dtype=np.uint64)
    counter = np.array([0, 0, part, epoch], dtype=np.uint64)  # the low words count what is drawn
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class EpochSampler(Sampler[_Drawn_co], ABC):
    """A sampler whose epochs are numbered.

    Attributes:
        seed: As given.
        epoch: Number of the next epoch: 0 at first, one more with each epoch that is begun.

    Args:
        seed: Seed of its random numbers, an int from 0 to 2**64 - 1.

    Raises:
        TypeError: If the seed is no int.
        ValueError: If it is out of that range.
    """

    def __init__(self, seed: int) -> None:
        self.seed = whole_number(seed, "seed", minimum=0, below=_WORD_VALUES)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Name the next epoch, as with torch's ``DistributedSampler``; the following ones count on.

        An epoch that has begun goes on as it is.

        Args:
            epoch: Its number, an int from 0 to 2**64 - 1.

        Raises:
            TypeError: If it is no int.
            ValueError: If it is out of that range.
        """
        self.epoch = whole_number(epoch, "epoch", minimum=0, below=_WORD_VALUES)

    def __iter__(self) -> Iterator[_Drawn_co]:
        """Give the next epoch; which one is settled when its first index is drawn."""
        epoch = self.epoch
        self.epoch = epoch + 1
        yield from self._draw(epoch)

    @abstractmethod
    def _draw(self, epoch: int) -> Iterable[_Drawn_co]:
        """What there is to be given in that epoch, in order."""
