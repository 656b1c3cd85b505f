"""A batch sampler without short batches: the samples left over come first in the next epoch."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from shmloader.sampling.carry_over import CarryOver


class _Epoch:
    """How many batches of an epoch were drawn, and what it leaves over."""

    def __init__(self) -> None:
        self.drawn = 0
        self.rest: list[Any] = []
        self.is_over = False


class RolloverBatchSampler(BatchSampler):
    """torch's batch sampler, except for the last batch.

    Each iteration begins with what the last complete epoch left over. An epoch is complete when
    the loader says so (``carry_over.commit``).

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

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield full batches only."""
        epoch = _Epoch()
        drawing = self._draw(epoch)
        self.carry_over.begin(epoch, drawing)
        return drawing

    def _draw(self, epoch: _Epoch) -> Iterator[list[Any]]:
        batch = list(self.carry_over.rest)
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                epoch.drawn += 1
                yield batch
                batch = []
        epoch.rest, epoch.is_over = batch, True

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one."""
        count = len(self.sampler)  # type: ignore[arg-type]
        return (count + len(self.carry_over.rest)) // self.batch_size
