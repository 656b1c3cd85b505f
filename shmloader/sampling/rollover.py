"""A batch sampler without short batches: the samples left over come first in the next epoch."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from shmloader.sampling.carry_over import CarryOver


class RolloverEpoch(Iterator[list[Any]]):
    """The batches of one epoch, and what it leaves over.

    Attributes:
        drawn: Number of batches drawn so far.
        is_over: Whether all batches were drawn.
        rest: Samples that did not fill a batch, once the epoch is over.

    Args:
        indices: Yields the indices.
        first: Indices that come first.
        batch_size: Length of each batch.
    """

    def __init__(self, indices: Iterable[Any], first: list[Any], batch_size: int) -> None:
        self.drawn = 0
        self.is_over = False
        self.rest: list[Any] = []
        self._drawing = self._draw(indices, first, batch_size)

    def __next__(self) -> list[Any]:
        """Return the next batch.

        Raises:
            StopIteration: If the indices left do not fill a batch.
        """
        return next(self._drawing)

    def _draw(
        self, indices: Iterable[Any], first: list[Any], batch_size: int
    ) -> Iterator[list[Any]]:
        batch = list(first)
        for index in indices:
            batch.append(index)
            if len(batch) == batch_size:
                self.drawn += 1
                yield batch
                batch = []
        self.is_over, self.rest = True, batch


class RolloverBatchSampler(BatchSampler):
    """torch's batch sampler, except for the last batch.

    Each iteration begins with what the last complete epoch of the loader left over.

    Attributes:
        carry_over: The samples that the next epoch begins with.

    Args:
        sampler: Yields the indices.
        batch_size: Length of each batch.
    """

    def __init__(self, sampler: Sampler[Any] | Iterable[Any], batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.carry_over = CarryOver()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {**self.__dict__, "carry_over": self.carry_over.copy()}

    def __iter__(self) -> RolloverEpoch:
        """Return an iterator of full batches only.

        It takes nothing over: that is done by the loader, which has its own iterator.
        """
        return RolloverEpoch(self.sampler, self.carry_over.rest, self.batch_size)

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one."""
        count = len(self.sampler)  # type: ignore[arg-type]
        return (count + len(self.carry_over.rest)) // self.batch_size
