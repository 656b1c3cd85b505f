"""The samplers that a loader with a seed has in place of torch's: the order that it delivers.

The loader does not draw from them. They are for frameworks that read, wrap or iterate the samplers
of a loader; iterating them does not affect the loader.
"""

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from shmloader.sampling.epoch_counter import EpochCounter
from shmloader.sampling.steps import order_of

# Indices that SeededRandomSampler computes at a time.
_BLOCK = 8192


class SeededSampler(Sampler[int]):
    """The base class: a sampler whose epochs are numbered as those of its loader.

    Attributes:
        epochs: Numbers the epochs of the loader.
        seed: The loader's seed.
    """

    epochs: EpochCounter
    seed: int

    @property
    def epoch(self) -> int:
        """Number of the epoch that is iterated next.

        It is ``loader.epoch``, or the number that ``set_epoch`` has named since the loader's newest
        epoch began.
        """
        return self.epochs.of_samplers

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is iterated next, here and by the loader.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is negative.
        """
        self.epochs.name(epoch)


class SeededRandomSampler(SeededSampler, RandomSampler):
    """The order of a loader with ``shuffle=True``.

    Args:
        data_source: The dataset; its length may grow.
        seed: The loader's seed.
        epochs: Numbers the epochs of the loader.
    """

    def __init__(self, data_source: Sized, seed: int, epochs: EpochCounter) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epochs = epochs

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the epoch."""
        length = len(self.data_source)
        order = order_of(length, self.seed, self.epoch, shuffle=True)
        for start in range(0, length, _BLOCK):
            yield from order.at(np.arange(start, min(start + _BLOCK, length))).tolist()


class SeededSequentialSampler(SeededSampler, SequentialSampler):
    """The order of a loader without ``shuffle``: the same in all epochs.

    Args:
        data_source: The dataset; its length may grow.
        seed: The loader's seed, on which the samples' random numbers depend.
        epochs: Numbers the epochs of the loader.
    """

    def __init__(self, data_source: Sized, seed: int, epochs: EpochCounter) -> None:
        super().__init__(data_source)
        self.seed = seed
        self.epochs = epochs
