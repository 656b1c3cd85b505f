"""Positions of samples in an epoch, on which their random number generators depend.

A loader with a seed passes :class:`PositionedIndices` to the engine instead of plain indices. They
travel with the ticket and are unpacked where the samples are loaded. A ticket that is loaded again,
or by another worker, therefore draws the same random numbers.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from shmloader.sampling.index_arrays import as_list


class PositionedIndices(NamedTuple):
    """The indices of a ticket and their position in the global order of the epoch.

    Attributes:
        indices: The indices to load.
        epoch: Number of the loader's epoch.
        first: Position of the first sample in the epoch. Where whole batches of unknown size are
            dealt to ranks, the number of the batch among those of all ranks.
        is_whole: Whether whole batches are dealt.
    """

    indices: Any
    epoch: int
    first: int
    is_whole: bool = False

    def key(self, number: int) -> tuple[int, int]:
        """Return the position of sample ``number``, counted through the ticket's batches."""
        return (self.first, number) if self.is_whole else (self.first + number, 0)


class PositionedStreams(Sampler[PositionedIndices]):
    """torch's endless sampler of an iterable dataset, with the number of the epoch added.

    The samples' positions are counted in the workers' streams.

    Attributes:
        epoch: Number of the epoch that is iterated next.

    Args:
        items: torch's sampler.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.epoch = 0
        self._items = items

    def __len__(self) -> int:
        """Raise TypeError, as torch's sampler does."""
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[PositionedIndices]:
        """Yield endlessly."""
        epoch = self.epoch
        return (PositionedIndices(indices, epoch, 0) for indices in self._items)


def without_position(indices: object) -> object:
    """The indices of a ticket, placed or not, as a sampler gave them."""
    return as_list(indices.indices if isinstance(indices, PositionedIndices) else indices)
