"""A rank's part of what any sampler, or batch sampler, gives."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch.utils.data import DistributedSampler

from shmloader.probing import probe
from shmloader.sampling.checks import whole_number
from shmloader.sampling.epochs import EpochSampler
from shmloader.sampling.ranks import is_cut_for_ranks, resolve_ranks
from shmloader.sampling.rng import RngState
from shmloader.sampling.sampler_checkpoint import are_known, set_epoch_of
from shmloader.sampling.steps import Cut, DrawnSteps, step_count


class ShardedSampler(EpochSampler[Any]):
    """What one rank takes of a sampler's indices, or of a batch sampler's batches.

    Every rank draws all that the sampler gives, under random streams that depend on ``seed`` and
    the epoch alone (``random``, ``numpy.random`` and torch's, the process's own put back after),
    and keeps its part: of each ``batch_size * world_size`` items the ``rank``-th run of
    ``batch_size``. A sampler that has a generator of its own must be given the same on all ranks.

    Each iteration that is begun counts an epoch, from 0.

    Args:
        sampler: A sampler, or a batch sampler; it is iterated anew for each epoch. If it has
            ``set_epoch``, that is called with the epoch.
        batch_size: Length of a run: the batch size of the loader that uses this as its
            ``sampler``, so that the ranks' batches, one after the other, are a batch of one large
            loader. 1 deals items one by one: right for a batch sampler, whose batches stay whole.
        rank: This process's number. With ``world_size`` None: that of ``torch.distributed``'s
            default group, else of torchrun's ``RANK``, else 0.
        world_size: Number of ranks; likewise.
        tail: What becomes of items that do not fill the last global step: ``"pad"`` fills it up
            from the epoch's start, so that ranks have equally many; ``"drop"`` leaves them out;
            ``"uneven"`` gives them to who is next.
        seed: Of the random streams.

    Raises:
        ValueError, TypeError: For arguments that do not fit.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_size: int = 1,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["pad", "drop", "uneven"] = "pad",
        seed: int = 0,
    ) -> None:
        share = whole_number(batch_size, "batch_size", minimum=1)
        if tail not in {"pad", "drop", "uneven"}:
            raise ValueError(
                f"tail option should be 'pad', 'drop' or 'uneven', but got tail={tail!r}"
            )
        super().__init__(seed)
        _check_sampler(sampler)
        self.sampler = sampler
        self.rank, self.world_size = resolve_ranks(rank, world_size)
        self.tail = tail
        self.batch_size = share
        self._cut = Cut(share, self.rank, self.world_size)

    def __len__(self) -> int:
        """Items of this rank in an epoch.

        Raises:
            TypeError: If the sampler has no length.
        """
        count = len(self.sampler)  # type: ignore[arg-type]
        whole, left = divmod(count, self._cut.global_count)
        if self.tail == "uneven":
            return whole * self._cut.share + self._cut.count(left)
        return step_count(count, self._cut, self.tail) * self._cut.share

    def _draw(self, epoch: int) -> Iterator[Any]:
        """This rank's items."""
        set_epoch_of(self.sampler, epoch)
        rng_state, is_first = RngState(self.seed, epoch), are_known(self.sampler)
        steps = DrawnSteps(self.sampler.__iter__, rng_state, is_first, self._cut, self.tail)
        for step in steps:
            yield from step


def _check_sampler(sampler: object) -> None:
    for found in (sampler, probe(sampler, "sampler")):
        if isinstance(found, DistributedSampler) or is_cut_for_ranks(found):
            raise ValueError(
                f"{type(found).__name__} gives a part of the samples to each rank, and "
                "ShardedSampler would cut that part again: give it a sampler of all samples"
            )
