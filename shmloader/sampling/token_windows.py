"""One epoch of a :class:`~shmloader.sampling.TokenBatches`: its windows, each planned by itself.

A window is a run of the seeded order. Its batches depend on the lengths, the options, the seed, the
epoch and the window's number. Their order also depends on how many batches come before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shmloader.sampling.balancing import CostFunction, Costs, order_by_cost, padded
from shmloader.sampling.indices import Permutation
from shmloader.sampling.packing import (
    Budget,
    Numbers,
    Packing,
    best_fit_decreasing,
    cut_by_longest,
)
from shmloader.sampling.sample_lengths import SampleLengths
from shmloader.sampling.samplers import random_numbers


class Window(NamedTuple):
    """The batches of a window.

    Attributes:
        numbers: Numbers of the window's samples.
        lengths: Their lengths, of shape (m, k).
        packing: Rows of these, in batches.
    """

    numbers: Numbers
    lengths: Numbers
    packing: Packing

    def batches(self) -> list[list[int]]:
        """Return the batches as lists of numbers."""
        flat = self.numbers[self.packing.order].tolist()
        ends = self.packing.ends.tolist()
        return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class Packer:
    """How the samples of a window become batches.

    Attributes:
        budget: The most that a batch may have of each measure.
        is_padded: Whether a batch takes its longest sample times its count, else the sum.
        multiple_of: What the longest sample of a padded batch is rounded up to.
        cost: Cost of samples, whose similar batches come together; None for any order.
    """

    budget: Budget
    is_padded: bool
    multiple_of: int
    cost: CostFunction | None

    def pack(self, numbers: Numbers, lengths: Numbers) -> Window:
        """Return batches of samples of these numbers and lengths."""
        if self.is_padded:
            packing = cut_by_longest(self._rounded(lengths), self.budget)
        else:
            packing = best_fit_decreasing(lengths, self.budget)
        return Window(numbers, lengths, packing)

    def as_loaded(self, window: Window) -> Numbers:
        """Return the lengths as they are in the batches, with padding."""
        lengths = window.lengths
        return padded(window.packing, self._rounded(lengths)) if self.is_padded else lengths

    def costs(self, window: Window, cost: CostFunction) -> Costs:
        """Return the cost of each batch: the sum over its samples, at least one a batch."""
        if not len(window.packing.ends):
            return np.zeros(0)
        costs = cost(self.as_loaded(window))[window.packing.order]
        return np.add.reduceat(costs, window.packing.starts)

    def _rounded(self, lengths: Numbers) -> Numbers:
        return -(-lengths // self.multiple_of) * self.multiple_of


class EpochWindows:
    """The windows of one epoch. Used on the user's thread.

    Args:
        source: The samples' lengths.
        packer: Makes batches.
        size: Samples in a window; the last samples, too few for one, are spread over all windows.
        key: Seed and epoch, if windows are runs of a shuffled order, and batches are shuffled; None
            for the order of the numbers.
    """

    def __init__(
        self, source: SampleLengths, packer: Packer, size: int, key: tuple[int, int] | None
    ) -> None:
        self._source, self._packer, self._key = source, packer, key
        count = source.number_count
        self._order = None if key is None else Permutation(count, *key)
        self._window_count = max(1, count // size) if count else 0

    def count_batches(self) -> int:
        """Pack all windows, and return the number of their batches."""
        return sum(len(self._pack(number).packing.ends) for number in range(self._window_count))

    def __iter__(self) -> Iterator[Window]:
        """Plan one window after the other, with its batches in the order of the epoch."""
        first, cost, random = 0, self._packer.cost, None
        for number in range(self._window_count):
            window = self._pack(number)
            packing = window.packing
            if self._key is not None:
                random = random_numbers(*self._key, number + 1)
            if cost is not None:
                order = order_by_cost(self._packer.costs(window, cost), first, random)
            elif random is not None:
                order = random.permutation(len(packing.ends))
            else:  # by the first sample of each
                numbers = np.minimum.reduceat(packing.order, packing.starts)
                order = np.argsort(numbers, kind="stable")
            yield window._replace(packing=packing.arranged(order))
            first += len(packing.ends)

    def _pack(self, number: int) -> Window:
        """Return a window, with its batches in the order in which they were packed."""
        count = self._source.number_count
        begin, end = (count * each // self._window_count for each in (number, number + 1))
        positions = np.arange(begin, end)
        order = positions if self._order is None else self._order.at(positions)
        return self._packer.pack(*self._source.take(order))
