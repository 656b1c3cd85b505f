"""A sampler of one rank's share of what another sampler yields."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from shmloader.interruptions import probe
from shmloader.sampling.arguments import choice, divides_for_ranks, resolve_ranks, whole_number
from shmloader.sampling.hooks import is_planned, set_epoch_of
from shmloader.sampling.rng import RngState
from shmloader.sampling.samplers import EpochSampler
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
        self._planned: Any = sampler if share == 1 and is_planned(sampler) else None
        if self._planned is not None and last_batch == "pad":
            self.last_batch = "discard" if self._planned.last_batch == "discard" else "pad"

    def __len__(self) -> int:
        """Return the number of items of this rank in an epoch.

        Raises:
            TypeError: If the sampler has no length.
        """
        return self._cut.own_count(len(self.sampler), self.last_batch)  # type: ignore[arg-type]

    def _draw(self, epoch: int) -> Iterator[Any]:
        set_epoch_of(self.sampler, epoch)
        steps = DrawnSteps(
            functools.partial(iterate, self.sampler),
            self._cut,
            self.last_batch,
            rng_state=RngState(self.seed, epoch),
            planned=self._planned,
        )
        for step in steps:
            yield from step


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
