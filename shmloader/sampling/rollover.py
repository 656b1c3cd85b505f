"""Batches that no epoch's end makes short: what is left over comes first in the next epoch."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from shmloader.sampling.progress import is_all


class _Epoch:
    """How far an epoch was drawn, and what it leaves."""

    def __init__(self) -> None:
        self.drawn = 0
        self.rest: list[Any] = []
        self.is_over = False


class RolloverBatchSampler(BatchSampler):
    """torch's batch sampler, but for the last batch.

    What an epoch leaves over is taken over by :meth:`settle`, once the epoch is known to have been
    complete: until then each iteration begins with what the last complete one has left.

    Args:
        sampler: Gives the indices.
        batch_size: Length of each batch.
    """

    def __init__(self, sampler: Sampler[Any] | Iterable[Any], batch_size: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.rest: list[Any] = []
        self._epoch: _Epoch | None = None
        self._drawing: Iterator[list[Any]] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        """Everything but a running epoch, which stays with this: a copy begins its own."""
        return {**self.__dict__, "_epoch": None, "_drawing": iter(())}

    def __iter__(self) -> Iterator[list[Any]]:
        """Full batches alone."""
        self._epoch = _Epoch()
        self._drawing = self._draw(self._epoch)
        return self._drawing

    def _draw(self, epoch: _Epoch) -> Iterator[list[Any]]:
        batch = list(self.rest)
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                epoch.drawn += 1
                yield batch
                batch = []
        epoch.rest, epoch.is_over = batch, True

    def __len__(self) -> int:
        """Batches of the epoch that runs, or of the next one if none does."""
        return (len(self.sampler) + len(self.rest)) // self.batch_size  # type: ignore[arg-type]

    def begin_with(self, rest: Iterable[Any]) -> None:
        """Have the next epoch begin with this; what others have left counts no more."""
        self.rest, self._epoch = list(rest), None

    def settle(self, position: int) -> None:
        """Take over what an epoch has left, if it was complete.

        Args:
            position: Batches of it that the user is done with.
        """
        epoch = self._epoch
        if epoch is None or position < epoch.drawn:
            return
        if not epoch.is_over and is_all(position, self):
            next(self._drawing, None)  # in-process, nobody has asked for the end
        if epoch.is_over:
            self.rest, self._epoch = epoch.rest, None
