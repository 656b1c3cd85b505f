"""Samplers of one rank's share: of what another sampler yields, and of a weighted draw."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shmloader.interruptions import probe
from shmloader.sampling.arguments import (
    choice,
    divides_for_ranks,
    flag,
    non_negatives,
    resolve_ranks,
    whole_number,
)
from shmloader.sampling.hooks import seekable, set_epoch_of
from shmloader.sampling.rng import RngState
from shmloader.sampling.samplers import EpochSampler, random_numbers
from shmloader.sampling.steps import Cut, DrawnSteps, iterate


class ShardedSampler(EpochSampler[Any]):
    """One rank's share of a sampler's indices, or of a batch sampler's batches.

    Every rank draws all items that the sampler yields, and keeps its share. Each ``batch_size *
    world_size`` items are cut into slices of ``batch_size``, and rank r keeps slice r. While the
    sampler draws, the global random number generators (of ``random``, ``numpy.random`` and torch)
    depend only on ``seed`` and the epoch. Afterwards the process's own states are restored. If the
    sampler has a generator of its own, its seed must be the same on all ranks.

    Each iteration is an epoch, which begins when its first item is drawn. Epochs are numbered from
    0.

    Attributes:
        sampler, batch_size, last_batch, seed: The arguments; ``last_batch`` is "discard" also if
            that of a :class:`TokenBatches` is.
        rank, world_size: The arguments, or what was found instead.
        epoch: Number of the next epoch.

    Args:
        sampler: A sampler or a batch sampler of all samples, iterated once per epoch. If it has
            ``set_epoch``, that is called with the epoch.
        batch_size: Length of a slice, at least 1. With a sampler, give the batch size of the loader
            that uses it. The ranks' batches, one after the other, are then a batch of one large
            loader. With a batch sampler, give 1, so that its batches stay whole.
        rank: Rank of this process, from 0. If ``rank`` and ``world_size`` are None, they are those
            of the default group of ``torch.distributed`` if it is initialised now. Otherwise they
            come from the environment variables ``RANK`` and ``WORLD_SIZE``, or from a Slurm job
            step. Without these, there is a single process.
        world_size: Number of ranks, at least 1.
        last_batch: What happens to items that do not fill the last global step. "pad" fills it up
            from the epoch's start, so that all ranks have the same number. Batches of
            :class:`TokenBatches` are divided or left out instead, as its ``last_batch`` says.
            "discard" leaves them out. "keep" deals them to the first ranks.
        seed: Seed of the random number generators, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is not an int, or ``sampler`` not iterable.
        ValueError: If a number is out of range, only one of ``rank`` and ``world_size`` is known,
            or ``last_batch`` has another value. If ``sampler`` yields only one rank's share
            already.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_size: int = 1,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        last_batch: Literal["pad", "discard", "keep"] = "pad",
        seed: int = 0,
    ) -> None:
        share = whole_number(batch_size, "batch_size", minimum=1)
        self.last_batch = choice(last_batch, "last_batch", ("pad", "discard", "keep"))
        super().__init__(seed)
        _check_sampler(sampler)
        self.sampler = sampler
        self.rank, self.world_size = resolve_ranks(rank, world_size)
        self.batch_size = share
        self._cut = Cut(share, self.rank, self.world_size)
        # Batches that are planned, of which a rank can begin anywhere.
        self._planned: Any = seekable(sampler) if share == 1 else None
        if self._planned is not None and last_batch == "pad":
            self.last_batch = "discard" if self._planned.last_batch == "discard" else "pad"

    def __len__(self) -> int:
        """Return the number of items of this rank in an epoch.

        Raises:
            TypeError: If the sampler has no length.
        """
        return self._cut.own_count(len(self.sampler), self.last_batch)  # type: ignore[arg-type]

    @property
    def can_seek(self) -> bool:
        """Whether an epoch can begin at any item: see ``hooks.seekable``."""
        return self._planned is not None

    def seek(self, position: int, place: list[int] | None = None) -> Iterator[Any]:
        """Yield the items of the next epoch from one on, as ``hooks.seekable`` says."""
        epoch = self.epoch
        self.epoch = epoch + 1
        yield from self._draw(epoch, position, place)

    def place(self, position: int) -> list[int] | None:
        """Return the place of an item, or rather that of the item of any rank before it."""
        found: list[int] | None = self._planned.place(max(0, position * self.world_size - 1))
        return found

    def _draw(self, epoch: int, first: int = 0, place: list[int] | None = None) -> Iterator[Any]:
        set_epoch_of(self.sampler, epoch)
        steps = DrawnSteps(
            functools.partial(self._begin, place=place),
            self._cut,
            self.last_batch,
            start=first * self.world_size,
            rng_state=RngState(self.seed, epoch),
            planned=self._planned,
        )
        for step in steps:
            yield from step

    def _begin(self, first: int = 0, *, place: list[int] | None) -> Iterator[Any]:
        return iter(self._planned.seek(first, place)) if first else iterate(self.sampler)


def _check_sampler(sampler: object) -> None:
    if not (hasattr(type(sampler), "__iter__") or hasattr(type(sampler), "__getitem__")):
        raise TypeError(
            f"sampler should yield the indices of all samples, but got sampler={sampler!r}"
        )
    for each in (sampler, probe(sampler, "sampler")):
        if divides_for_ranks(each):
            raise ValueError(
                f"{type(each).__name__} yields only one rank's share of the samples, and "
                "ShardedSampler would divide that again: give it a sampler of all samples"
            )


class DistributedWeightedSampler(EpochSampler[int]):
    """One rank's share of a weighted draw that all ranks make alike.

    In each epoch, every rank makes the same draw of ``num_samples`` indices. It depends only on
    weights, seed and epoch. Each rank takes the positions ``rank``, ``rank + world_size``, and so
    on. So the ranks need not communicate, and together they have the draw of a single process,
    whatever their number. All ranks have the same number of indices: the last ``num_samples %
    world_size`` indices are left out. Without replacement, no index is on two ranks.

    All ranks need the same arguments except ``rank``, and must be in the same epoch.

    Random numbers come from numpy's Philox, keyed by (seed, epoch).

    Attributes:
        num_samples: Indices of all ranks together.
        replacement, seed: The arguments.
        weights: The argument, as an array of float64.
        rank, world_size: The arguments, or what was found instead.
        epoch: Number of the next epoch.

    Args:
        weights: A weight for each index, proportional to its probability: a sequence, 1-d numpy
            array or tensor of ints or floats. None is negative, and at least one is positive. An
            index of weight 0 is never drawn.
        num_samples: Indices to draw in an epoch for all ranks together, at least one per rank; None
            for as many as there are weights.
        replacement: Whether an index can be drawn more than once. Otherwise each draw is among the
            remaining indices, in proportion to their weights.
        rank: Rank of this process, from 0. If ``rank`` and ``world_size`` are None, they are those
            of the default group of ``torch.distributed`` if it is initialised now. Otherwise they
            come from the environment variables ``RANK`` and ``WORLD_SIZE``, or from a Slurm job
            step. Without these, there is a single process.
        world_size: Number of ranks, at least 1.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is not an int, ``replacement`` not a bool, or ``weights`` not
            numbers.
        ValueError: If a number is out of range, or only one of ``rank`` and ``world_size`` is
            known. If ``weights`` are not 1-d, none of them is positive, or one is negative,
            infinite or NaN. Without replacement, also if fewer weights are positive than there are
            indices to draw.
    """

    def __init__(
        self,
        weights: object,
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.weights = non_negatives(weights, "weights").astype(np.float64)
        self.weights.flags.writeable = False
        positive_count = int(np.count_nonzero(self.weights))
        if not positive_count:
            raise ValueError(
                "weights should have a positive number, "
                f"but got {len(self.weights)} weights, none of them positive"
            )
        self.rank, self.world_size = resolve_ranks(rank, world_size)
        total = len(self.weights) if num_samples is None else num_samples
        self.num_samples = whole_number(total, "num_samples", minimum=1)
        if self.num_samples < self.world_size:
            raise ValueError(
                f"num_samples should be at least one for each of world_size="
                f"{self.world_size} ranks, but got num_samples={self.num_samples}"
            )
        self.replacement = flag(replacement, "replacement")
        if not replacement and self.num_samples > positive_count:
            raise ValueError(
                f"num_samples should be at most {positive_count} without replacement, the "
                f"number of positive weights, but got num_samples={self.num_samples}"
            )

    def __len__(self) -> int:
        """Return the number of indices in an epoch of this rank, which is the same on all ranks."""
        return self.num_samples // self.world_size

    def _draw(self, epoch: int) -> Iterator[int]:
        random = random_numbers(self.seed, epoch)
        # Divided by the largest weight, so that the sum is finite.
        shares = self.weights / self.weights.max()
        if self.replacement:
            drawn = random.choice(len(shares), self.num_samples, p=shares / shares.sum())
        else:
            drawn = self._without_replacement(random, shares)
        yield from drawn[self.rank :: self.world_size][: len(self)].tolist()

    def _without_replacement(
        self, random: np.random.Generator, shares: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        # Each index arrives after a random time, exponentially distributed with its weight as rate.
        # The first to arrive is index i with a probability proportional to weight i. Such times
        # have no memory, so the same is true of the next one among those that remain. Division
        # gives the same bits on any processor, unlike a logarithm, and all ranks have to agree on
        # the order.
        candidates = np.flatnonzero(self.weights)
        times = random.standard_exponential(len(candidates))
        with np.errstate(all="ignore"):  # a share that is too small for a double comes last
            times /= shares[candidates]
        return candidates[np.argsort(times, kind="stable")[: self.num_samples]]
