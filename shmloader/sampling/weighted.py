"""One weighted draw, cut for ranks."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shmloader.sampling.checks import flag, non_negatives, whole_number
from shmloader.sampling.epochs import EpochSampler, random_numbers
from shmloader.sampling.ranks import resolve_ranks


class DistributedWeightedSampler(EpochSampler[int]):
    """What one rank has of a weighted draw that all ranks make alike.

    In each epoch every rank makes the same draw of ``num_samples`` indices, a function of weights,
    seed and epoch alone, and takes the positions ``rank``, ``rank + world_size``, and so on. So the
    ranks need not talk, and together have the draw of a single process: on other numbers of ranks
    it is the same one. All have equally many: what is over at its end, ``num_samples %
    world_size`` indices, goes to none. Without replacement no index is on two ranks.

    All ranks have to be given the same arguments but for ``rank``, and be in the same epoch.

    Random numbers are of numpy's Philox, keyed by (seed, epoch).

    Attributes:
        num_samples, replacement, seed: As given; ``num_samples`` of all ranks.
        weights: As given, as an array of float64.
        rank, world_size: As given or found.
        epoch: Number of the next epoch.

    Args:
        weights: A weight for each index, proportional to its probability: a sequence, 1-d numpy
            array or tensor of ints or floats, none of them negative, at least one positive. An
            index of weight 0 is never drawn.
        num_samples: Indices to draw in an epoch for all ranks together, at least one a rank; None
            for as many as there are weights.
        replacement: Whether an index can be drawn more than once. Else each draw is among those
            that remain, in proportion to their weights.
        rank: This process's number, from 0. With ``world_size`` None, too, those of the default
            group of ``torch.distributed`` at this moment, if it is initialised; else those of the
            environment variables ``RANK`` and ``WORLD_SIZE``; without these, a single process.
        world_size: Number of ranks, from 1.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is no int, ``replacement`` no bool, or ``weights`` no numbers.
        ValueError: If a number is out of range, only one of ``rank`` and ``world_size`` is known,
            or ``weights`` are not 1-d, none of them positive, or one negative, infinite or NaN; or
            without replacement, if fewer weights are positive than there are indices to draw.
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
                "weights option should have a positive number, "
                f"but got {len(self.weights)} weights, none of them positive"
            )
        self.rank, self.world_size = resolve_ranks(rank, world_size)
        total = len(self.weights) if num_samples is None else num_samples
        self.num_samples = whole_number(total, "num_samples", minimum=1)
        if self.num_samples < self.world_size:
            raise ValueError(
                f"num_samples option should be at least one for each of world_size="
                f"{self.world_size} ranks, but got num_samples={self.num_samples}"
            )
        self.replacement = flag(replacement, "replacement")
        if not replacement and self.num_samples > positive_count:
            raise ValueError(
                f"num_samples option should be at most {positive_count} without replacement, the "
                f"number of positive weights, but got num_samples={self.num_samples}"
            )

    def __len__(self) -> int:
        """Indices of an epoch for this rank; on all ranks the same."""
        return self.num_samples // self.world_size

    def _draw(self, epoch: int) -> Iterator[int]:
        random = random_numbers(self.seed, epoch)
        drawn = self._with_replacement(random) if self.replacement else self._without(random)
        yield from drawn[self.rank :: self.world_size][: len(self)].tolist()

    def _with_replacement(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        # By the largest, so that the sum is finite.
        shares = self.weights / self.weights.max()
        return random.choice(len(shares), self.num_samples, p=shares / shares.sum())

    def _without(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        # A race: each index arrives after a time that is exponential with its weight as rate. The
        # first is index i in proportion to weight i, and since such times have no memory, so is
        # the next among those that remain. Division is exact to the bit on any processor, where
        # a logarithm is not, and ranks on different ones have to agree on the order.
        taking_part = np.flatnonzero(self.weights)
        shares = self.weights[taking_part] / self.weights.max()
        times = random.standard_exponential(len(shares))
        with np.errstate(all="ignore"):  # a share may be too small for a double: then it is last
            times /= shares
        return taking_part[np.argsort(times, kind="stable")[: self.num_samples]]
