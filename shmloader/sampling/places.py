"""Where in an epoch a ticket's samples stand: what their random streams depend on.

A loader with a seed hands :class:`Placed` to the engine where others hand on indices; it crosses
with the ticket, and is taken off where the samples are loaded. A ticket that is loaded again, or
elsewhere, so brings the same streams along.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from shmloader.sampling.index_arrays import as_list


class Placed(NamedTuple):
    """What a ticket loads, and where that stands in the global order of its epoch.

    Attributes:
        indices: What is loaded.
        epoch: Number of the loader's epoch.
        first: Position of the first sample; or, where whole batches are dealt, whose sizes nobody
            knows, the number of the batch, of those of all ranks.
        is_whole: Whether whole batches are dealt.
    """

    indices: Any
    epoch: int
    first: int
    is_whole: bool = False

    def key(self, number: int) -> tuple[int, int]:
        """Where sample ``number`` of the ticket stands; it runs on through a step's batches."""
        return (self.first, number) if self.is_whole else (self.first + number, 0)


class PlacedStreams(Sampler[Placed]):
    """What torch has for an iterable dataset in a sampler's place, with the epoch's number.

    The samples have their positions in their workers' streams, and these count themselves.

    Attributes:
        epoch: Number of the epoch that is iterated next.

    Args:
        items: torch's.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.epoch = 0
        self._items = items

    def __len__(self) -> int:
        """As torch's, which has none."""
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Placed]:
        """As many as one likes."""
        epoch = self.epoch
        return (Placed(indices, epoch, 0) for indices in self._items)


def without_place(indices: object) -> object:
    """The indices of a ticket, placed or not, as a sampler gave them."""
    return as_list(indices.indices if isinstance(indices, Placed) else indices)
