"""Rollover: samples that one epoch leaves over come first in the next one.

An epoch begins with the samples that the last *complete* epoch left over. An epoch is complete when
the sampler was drawn to its end and the user is done with all batches. It is not enough that all
batches are drawn, since workers run ahead. So if the user leaves an epoch early, the next one
begins with the same samples again.
"""

import functools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, Sampler

from shmloader.sampling.progress import Progress
from shmloader.sampling.steps import Cut, DrawnSteps, Steps, iterate


class CarryOver:
    """The samples that the next epoch begins with. Used on the user's thread.

    Attributes:
        samples: The samples.
    """

    def __init__(self, samples: Iterable[Any] = ()) -> None:
        self.samples: list[Any] = list(samples)
        self._steps: Steps | None = None
        self._size = 1

    def begin(self, steps: Steps, size: int) -> None:
        """Begin an epoch.

        Args:
            steps: The epoch's steps, which begin with the samples as they are now.
            size: How many items of the steps each batch has that the epoch's progress counts.
        """
        self._steps, self._size = steps, size

    def replace(self, samples: Iterable[Any]) -> None:
        """Make the next epoch begin with these samples, whatever the running one leaves over."""
        self.samples, self._steps = list(samples), None

    def commit(self, progress: Progress, batches: Sized) -> None:
        """Take over what the running epoch leaves over, if the user is done with all its batches.

        Args:
            progress: The epoch's progress. With ``on_error="skip"``, the last batches may not be
                delivered, and then only the epoch's end counts.
            batches: An object whose length, if it has one, is the number of batches in the epoch.
        """
        steps = self._steps
        is_done = steps is not None and progress.position * self._size >= steps.position
        if steps is None or not (progress.is_ended or is_done):
            return
        if progress.is_ended or _is_all(progress.position, batches):
            next(steps, None)  # without workers, the end has not been drawn yet
        if steps.is_over:
            self.replace(steps.left_over)

    def copy(self) -> "CarryOver":
        """Return a copy without the running epoch, which stays with the original."""
        return CarryOver(self.samples)


def _is_all(count: int, batches: Sized) -> bool:
    try:
        return count >= len(batches)
    except (TypeError, NotImplementedError):  # the length is not known, or not yet
        return False


class RolloverBatchSampler(BatchSampler):
    """torch's batch sampler without short batches: samples left over come first in the next epoch.

    Attributes:
        carry_over: The samples that the next epoch begins with.

    Args:
        sampler: Yields the indices.
        batch_size: Length of each batch.
        drop_last: False for the behaviour of torch's batch sampler: a short last batch, and nothing
            is carried over. Frameworks need every sample for predictions, so they replace a
            loader's batch sampler by one that is made with ``drop_last=False``.
    """

    def __init__(
        self,
        sampler: Sampler[Any] | Iterable[Any],
        batch_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.carry_over = CarryOver()

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        return {**self.__dict__, "carry_over": self.carry_over.copy()}

    def __iter__(self) -> Iterator[list[Any]]:
        """Return an iterator of full batches. The loader carries over what is left over."""
        if not self.drop_last:
            return super().__iter__()
        draw = functools.partial(iterate, self.sampler)
        return DrawnSteps(draw, Cut(self.batch_size), "rollover", self.carry_over.samples)

    def __len__(self) -> int:
        """Return the number of batches of the running epoch, or of the next one."""
        if not self.drop_last:
            return super().__len__()
        count = len(self.sampler)  # type: ignore[arg-type]
        return (count + len(self.carry_over.samples)) // self.batch_size


def carries_over(batch_sampler: object) -> TypeGuard[RolloverBatchSampler]:
    """Whether a batch sampler carries samples over to the next epoch."""
    return isinstance(batch_sampler, RolloverBatchSampler) and batch_sampler.drop_last
