"""The order of a loader without a seed: what its samplers yield, drawn as torch draws it.

Each epoch is drawn by a :class:`~shmloader.sampling.resumable_sampler.ResumableSampler`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from shmloader.sampling.indices import PositionedStreams, array_batches
from shmloader.sampling.progress import Progress
from shmloader.sampling.resumable_sampler import DrawnEpoch, ResumableSampler
from shmloader.sampling.rng import GLOBAL_GENERATORS, global_rng_state
from shmloader.sampling.rollover import CarryOver, RolloverBatchSampler, carries_over
from shmloader.sampling.sampler_checkpoint import (
    SamplerCheckpoint,
    describe,
    set_epoch_of,
    size_of_batches,
)


class SamplerOrder:
    """The index batches of torch's samplers or the user's, or of an iterable dataset.

    Args:
        index_sampler: The sampler, the batch sampler, or torch's endless sampler for an iterable
            dataset.
        is_iterable: Whether the dataset is iterable. The workers then keep the position.
        seed: The seed of an iterable dataset's samples; None if there is none.

    Attributes:
        index_sampler: The sampler, which torch's iterators iterate.
        carry_over: The samples that the next epoch begins with; None if epochs carry nothing over.
    """

    def __init__(
        self,
        index_sampler: Any,
        *,
        is_iterable: bool = False,
        seed: int | None = None,
    ) -> None:
        self.index_sampler = index_sampler
        is_rollover = isinstance(index_sampler, RolloverBatchSampler)
        self.carry_over: CarryOver | None = index_sampler.carry_over if is_rollover else None
        self._is_iterable = is_iterable
        self._seed = seed
        self._progress = Progress()
        self._state: dict[str, Any] | None = None
        self._drawn: DrawnEpoch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but a running epoch: a copy begins its own."""
        carried = self.carry_over
        return {
            **self.__dict__,
            "carry_over": None if carried is None else carried.copy(),
            "_progress": Progress(),
            "_state": None,
            "_drawn": None,
        }

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the sampler's length."""
        return len(self.index_sampler)

    def count_batches(self) -> int | None:
        """Return the number of batches of an epoch; None unless the samplers are torch's own.

        The length of a user's sampler may take long to compute, or draw random numbers.
        """
        sampler = self.index_sampler
        if type(sampler) in {BatchSampler, RolloverBatchSampler}:
            sampler = sampler.sampler
        if type(sampler) in {SequentialSampler, RandomSampler}:
            with contextlib.suppress(Exception):  # a dataset without a length
                return len(self.index_sampler)
        return None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers that count epochs."""
        set_epoch_of(self.index_sampler, epoch)

    def named_epoch(self) -> None:
        """Return None: if other code sets a sampler's epoch, the sampler draws it by itself."""

    def begin(self, epoch: int, progress: Progress, state: dict[str, Any] | None = None) -> None:
        """Set the epoch that is drawn next; see :meth:`SeededOrder.begin`."""
        self._progress, self._state, self._drawn = progress, state, None
        if isinstance(self.index_sampler, PositionedStreams):
            self.index_sampler.epoch = epoch

    def draw(
        self, drawing: Iterator[Any], generator: torch.Generator | None, *, as_arrays: bool
    ) -> Iterator[Any]:
        """Return an iterator of the epoch's index batches that were not delivered yet.

        Args:
            drawing: An iterator of the index sampler.
            generator: The loader's generator.
            as_arrays: Whether the batches of torch's samplers may be ranges or arrays.
        """
        checkpoint = self.checkpoint(generator)
        if self._is_iterable:
            # The base seed of a resumed epoch was drawn when the epoch first began. torch has drawn
            # another one for these workers, so set the generators back.
            checkpoint.restore_generators(self._state or {})
            return drawing
        if as_arrays:
            drawing = array_batches(self.index_sampler, drawing) or drawing
        indices = ResumableSampler(
            self.index_sampler,
            drawing,
            self._progress,
            checkpoint,
            self.carry_over,
            self._state,
        )
        self._drawn = indices.epoch
        return indices

    def checkpoint(self, generator: torch.Generator | None = None) -> SamplerCheckpoint:
        """Return an object that takes and restores checkpoints of the next epoch."""
        return SamplerCheckpoint(self.index_sampler, self.carry_over, generator)

    def dump(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """Return the checkpoint of the newest epoch, as plain values."""
        if self._drawn is None:
            return {**self.checkpoint(generator).dump(is_begun=False), "is_begun": True}
        return self._drawn.dump()

    def dump_next(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Return the checkpoint of the next epoch, as plain values.

        It has the states of those global generators from which that epoch may be drawn: its order,
        the base seed of its workers, and an iterable dataset's order in this process.
        """
        checkpoint = self.checkpoint(generator)
        state = checkpoint.dump(is_begun=False)
        names = GLOBAL_GENERATORS if self._is_iterable else checkpoint.global_generators
        if not names and (generator is None or checkpoint.draws_seed):
            names = ("torch",)
        if self._seed is None and names:
            state["global_generators"] = global_rng_state(names)
        return state

    def commit(self, position: int) -> None:
        """Carry over what the newest epoch leaves over, if the user is done with the epoch.

        Args:
            position: Number of batches that the user is done with.
        """
        if self._progress.is_ended:
            self._drawn = None
        if self.carry_over is not None:
            self.carry_over.commit(position, self.index_sampler)

    def facts(self) -> dict[str, Any]:
        """Return the properties that a state and this loader must have in common."""
        sampler, last_batch = self.index_sampler, "keep"
        if isinstance(sampler, PositionedStreams):
            sampler = sampler.items
        if type(sampler) is BatchSampler:
            last_batch = "discard" if sampler.drop_last else "keep"
        elif carries_over(sampler):
            last_batch = "rollover"
        return {
            "global_batch": size_of_batches(sampler),
            "order": None if self._is_iterable else describe(sampler),
            "last_batch": last_batch,
            "seed": self._seed,
        }

    def dump_progress(self, *, in_order: bool) -> dict[str, Any]:  # noqa: ARG002 - no ranks
        """Return how far the newest epoch has come, as plain values."""
        return self._progress.dump()

    def load_progress(self, state: dict[str, Any]) -> Progress:
        """Return the progress that :meth:`dump_progress` has saved."""
        return Progress.load(state)

    def check_progress(self, state: dict[str, Any]) -> None:
        """Do nothing: the end of the epoch is known only when the sampler is drawn."""
