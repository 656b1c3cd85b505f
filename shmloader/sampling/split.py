"""A contiguous part of the indices."""

from collections.abc import Iterator

import numpy as np

from shmloader.sampling.checks import flag, whole_number
from shmloader.sampling.epochs import EpochSampler, random_numbers


class SplitSampler(EpochSampler[int]):
    """One of several contiguous parts of ``range(length)``, shuffled or in order.

    The parts of all ``part_index`` together have each index once. Their sizes differ by at most
    one: the first ``length % num_parts`` parts are longer. Each of them reads a region of its own,
    where ``DistributedSampler`` spreads each rank over everything.

    Random numbers are of numpy's Philox, keyed by (seed, epoch, part_index).

    Attributes:
        length, num_parts, part_index, even_size, repeat, shuffle, seed: As given.
        epoch: Number of the next epoch.

    Args:
        length: Number of samples in the whole set, from 0.
        num_parts: Number of parts, from 1.
        part_index: Which of them this one is, from 0.
        even_size: Whether a shorter part is brought to the size of the longest by an index of the
            whole set, at random, another one in each epoch. So ranks give equally many; an index
            may then be in two parts, or twice in one.
        repeat: How many times an epoch goes through the part, from 1. Each time gives all of it
            before the next begins.
        shuffle: Whether each time through has a random order of its own; else indices ascend, with
            what ``even_size`` added at the end.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is no int, or ``even_size`` or ``shuffle`` no bool.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        even_size: bool = False,
        repeat: int = 1,
        shuffle: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.length = whole_number(length, "length", minimum=0)
        self.num_parts = whole_number(num_parts, "num_parts", minimum=1)
        self.part_index = whole_number(part_index, "part_index", minimum=0)
        if self.part_index >= self.num_parts:
            raise ValueError(
                f"part_index option should be below num_parts={self.num_parts}, "
                f"but got part_index={self.part_index}"
            )
        self.even_size = flag(even_size, "even_size")
        self.repeat = whole_number(repeat, "repeat", minimum=1)
        self.shuffle = flag(shuffle, "shuffle")
        size, longer_count = divmod(self.length, self.num_parts)
        begin = self.part_index * size + min(self.part_index, longer_count)
        self._own = range(begin, begin + size + (self.part_index < longer_count))
        is_short = longer_count > 0 and self.part_index >= longer_count
        self._added_count = int(self.even_size and is_short)

    def __len__(self) -> int:
        """Indices of an epoch, those of all ``repeat`` times."""
        return (len(self._own) + self._added_count) * self.repeat

    def _draw(self, epoch: int) -> Iterator[int]:
        random = random_numbers(self.seed, epoch, self.part_index)
        added = random.integers(self.length, size=self._added_count)
        part = np.concatenate([np.arange(self._own.start, self._own.stop), added])
        for _ in range(self.repeat):
            yield from (random.permutation(part) if self.shuffle else part).tolist()
