"""Samplers of single indices, and the base class of samplers whose epochs are numbered.

**Guarantees.** What such a sampler yields in an epoch depends only on its arguments and the epoch's
number. The process's own random number generators (``random``, ``numpy.random``, torch's) are not
used, so ranks whose generators differ still agree, and an epoch can be repeated.

**Assumes.** An epoch begins when its first index is drawn. ``iter()`` alone does not count: torch's
loader with workers calls it twice before the first epoch, and draws from the second iterator.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler

from shmloader.sampling.checks import flag, non_negatives, whole_number
from shmloader.sampling.ranks import resolve_ranks

_Drawn_co = TypeVar("_Drawn_co", covariant=True)

# Seeds and epochs are 64-bit words of Philox's key and counter.
_WORD_VALUES = 2**64

# The key's second word, so that a user's own Philox with the same seed yields other numbers.
_OURS = int.from_bytes(b"sampling", "big")


def random_numbers(seed: int, epoch: int, part: int = 0) -> np.random.Generator:
    """Return a generator for one epoch, independent of that of any other epoch.

    Args:
        seed: The user's seed, from 0 to 2**64 - 1.
        epoch: Number of the epoch, in the same range.
        part: Number of a part or rank that has its own random numbers, in the same range.

    Returns:
        numpy's generator over Philox 4x64. Seed, epoch and part are separate words of its key and
        counter. (With a sum such as ``seed + epoch``, epoch 1 of seed 0 would be epoch 0 of seed
        1.) Philox's words are the same in all releases of numpy; what its methods make of them may
        change.
    """
    key = np.array([seed, _OURS], dtype=np.uint64)
    counter = np.array([0, 0, part, epoch], dtype=np.uint64)  # the low words count what is drawn
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class EpochSampler(Sampler[_Drawn_co], ABC):
    """A sampler whose epochs are numbered.

    Attributes:
        seed: The argument.
        epoch: Number of the next epoch: 0 at first, and one more with each epoch that is begun.

    Args:
        seed: Seed of the sampler's random numbers, an int from 0 to 2**64 - 1.

    Raises:
        TypeError: If the seed is not an int.
        ValueError: If it is out of that range.
    """

    def __init__(self, seed: int) -> None:
        self.seed = whole_number(seed, "seed", minimum=0, below=_WORD_VALUES)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as with torch's ``DistributedSampler``.

        Later epochs count on from there. An epoch that has begun is not changed.

        Args:
            epoch: Number of the next epoch, an int from 0 to 2**64 - 1.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is out of that range.
        """
        self.epoch = whole_number(epoch, "epoch", minimum=0, below=_WORD_VALUES)

    def __iter__(self) -> Iterator[_Drawn_co]:
        """Yield the items of the next epoch. Its number is read when the first item is drawn."""
        epoch = self.epoch
        self.epoch = epoch + 1
        yield from self._draw(epoch)

    @abstractmethod
    def _draw(self, epoch: int) -> Iterable[_Drawn_co]:
        """Yield the items of this epoch."""


class SplitSampler(EpochSampler[int]):
    """One of several contiguous parts of ``range(length)``, shuffled or in order.

    All parts together have each index once. Their sizes differ by at most one: the first ``length %
    num_parts`` parts are longer. Each part reads its own region of the dataset, while with
    ``DistributedSampler``, each rank reads from everywhere.

    Random numbers come from numpy's Philox, keyed by (seed, epoch, part_index).

    Attributes:
        length, num_parts, part_index, even_size, repeat, shuffle, seed: The arguments.
        epoch: Number of the next epoch.

    Args:
        length: Number of samples in the whole set, at least 0.
        num_parts: Number of parts, at least 1.
        part_index: Number of this part, from 0.
        even_size: Whether a shorter part is extended to the size of the longest by a random index
            of the whole set, drawn for each epoch. All parts then have the same size, and an index
            may be in two parts, or twice in one.
        repeat: How many times an epoch goes through the part, at least 1.
        shuffle: Whether each pass has a random order of its own. Otherwise indices ascend, and an
            index that ``even_size`` adds is last.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is not an int, or ``even_size`` or ``shuffle`` not a bool.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        even_size: bool = False,
        repeat: int = 1,
        shuffle: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.length = whole_number(length, "length", minimum=0)
        self.num_parts = whole_number(num_parts, "num_parts", minimum=1)
        self.part_index = whole_number(part_index, "part_index", minimum=0)
        if self.part_index >= self.num_parts:
            raise ValueError(
                f"part_index should be below num_parts={self.num_parts}, "
                f"but got part_index={self.part_index}"
            )
        self.even_size = flag(even_size, "even_size")
        self.repeat = whole_number(repeat, "repeat", minimum=1)
        self.shuffle = flag(shuffle, "shuffle")
        size, longer_count = divmod(self.length, self.num_parts)
        begin = self.part_index * size + min(self.part_index, longer_count)
        self._own = range(begin, begin + size + (self.part_index < longer_count))
        is_short = longer_count > 0 and self.part_index >= longer_count
        self._added_count = int(self.even_size and is_short)

    def __len__(self) -> int:
        """Return the number of indices in an epoch, over all repetitions."""
        return (len(self._own) + self._added_count) * self.repeat

    def _draw(self, epoch: int) -> Iterator[int]:
        random = random_numbers(self.seed, epoch, self.part_index)
        added = random.integers(self.length, size=self._added_count)
        part = np.concatenate([np.arange(self._own.start, self._own.stop), added])
        for _ in range(self.repeat):
            yield from (random.permutation(part) if self.shuffle else part).tolist()


class IntervalSampler(Sampler[int]):
    """Every ``interval``-th index of ``range(length)``, from 0, then from 1, and so on.

    With length 10 and interval 4: 0, 4, 8, then 1, 5, 9, then 2, 6, then 3, 7. All epochs are the
    same.

    Attributes:
        length, interval, rollover: The arguments.

    Args:
        length: Number of samples in the whole set, at least 0.
        interval: Distance from one index to the next, at least 1. If it is at least ``length``,
            each run has one index.
        rollover: Whether to begin again, one index further, until each index was yielded once.
            Otherwise only the run from 0 is yielded.

    Raises:
        TypeError: If a number is not an int, or ``rollover`` not a bool.
        ValueError: If a number is out of range.
    """

    def __init__(self, length: int, interval: int, rollover: bool = True) -> None:
        self.length = whole_number(length, "length", minimum=0)
        self.interval = whole_number(interval, "interval", minimum=1)
        self.rollover = flag(rollover, "rollover")

    def __iter__(self) -> Iterator[int]:
        run_count = min(self.interval, self.length) if self.rollover else 1
        for begin in range(run_count):
            yield from range(begin, self.length, self.interval)

    def __len__(self) -> int:
        """Return the number of indices in an epoch."""
        return self.length if self.rollover else len(range(0, self.length, self.interval))


class FilterSampler(Sampler[int]):
    """The indices, ascending, of the samples that satisfy a function.

    To find the next index, samples are loaded in the process and on the thread that draws the
    indices; a loader's workers load the selected samples again. This is repeated in each epoch. So
    use it for datasets whose samples are cheap to load, or to take a few samples from the beginning
    of many.

    Attributes:
        fn, dataset: The arguments.

    Args:
        fn: Called with a sample; selects it if the result is true. What it or the dataset raises is
            raised where the index is drawn.
        dataset: A map-style dataset, indexed from 0 to ``len(dataset) - 1``. Its length is read at
            the beginning of each epoch.

    Raises:
        TypeError: If ``fn`` is not callable, or the dataset is iterable-style or has no length.
    """

    def __init__(self, fn: Callable[[Any], object], dataset: Any) -> None:
        if not callable(fn):
            raise TypeError(f"fn should be callable, but got fn={fn!r}")
        has_both = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not has_both:
            raise TypeError(
                "dataset should be map-style, with __getitem__ and __len__, "
                f"but got dataset={dataset!r}"
            )
        self.fn = fn
        self.dataset = dataset
        self._selected_count: int | None = None

    def __iter__(self) -> Iterator[int]:
        count = 0
        for index in range(len(self.dataset)):
            if self.fn(self.dataset[index]):
                count += 1
                yield index
        self._selected_count = count

    def __len__(self) -> int:
        """Return the number of indices in the last epoch that was drawn to its end.

        Raises:
            TypeError: If no epoch was drawn to its end yet.
        """
        if self._selected_count is None:
            raise TypeError(
                "the length of a FilterSampler is known only after a first full pass, since fn has "
                f"to be called with each of the {len(self.dataset)} samples"
            )
        return self._selected_count


class DistributedWeightedSampler(EpochSampler[int]):
    """One rank's share of a weighted draw that all ranks make alike.

    In each epoch, every rank makes the same draw of ``num_samples`` indices, which depends only on
    weights, seed and epoch, and takes the positions ``rank``, ``rank + world_size``, and so on. So
    the ranks need not communicate, and together they have the draw of a single process, whatever
    their number. All ranks have the same number of indices: the last ``num_samples % world_size``
    indices are left out. Without replacement, no index is on two ranks.

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
            array or tensor of ints or floats, none of them negative, at least one positive. An
            index of weight 0 is never drawn.
        num_samples: Indices to draw in an epoch for all ranks together, at least one per rank; None
            for as many as there are weights.
        replacement: Whether an index can be drawn more than once. Otherwise each draw is among the
            remaining indices, in proportion to their weights.
        rank: Rank of this process, from 0. If ``rank`` and ``world_size`` are None: those of the
            default group of ``torch.distributed`` if it is initialised now, else those of the
            environment variables ``RANK`` and ``WORLD_SIZE``, else those of a Slurm job step, else
            those of a single process.
        world_size: Number of ranks, at least 1.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is not an int, ``replacement`` not a bool, or ``weights`` not
            numbers.
        ValueError: If a number is out of range, only one of ``rank`` and ``world_size`` is known,
            ``weights`` are not 1-d, none of them is positive, or one is negative, infinite or NaN.
            Without replacement, also if fewer weights are positive than there are indices to draw.
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
        drawn = self._with_replacement(random) if self.replacement else self._without(random)
        yield from drawn[self.rank :: self.world_size][: len(self)].tolist()

    def _with_replacement(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        # Divided by the largest weight, so that the sum is finite.
        shares = self.weights / self.weights.max()
        return random.choice(len(shares), self.num_samples, p=shares / shares.sum())

    def _without(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        # Each index arrives after a random time, exponentially distributed with its weight as rate.
        # The first to arrive is index i with a probability proportional to weight i. Such times
        # have no memory, so the same is true of the next one among those that remain. Division
        # gives the same bits on any processor, unlike a logarithm, and all ranks have to agree on
        # the order.
        candidates = np.flatnonzero(self.weights)
        shares = self.weights[candidates] / self.weights.max()
        times = random.standard_exponential(len(shares))
        with np.errstate(all="ignore"):  # a share that is too small for a double comes last
            times /= shares
        return candidates[np.argsort(times, kind="stable")[: self.num_samples]]
