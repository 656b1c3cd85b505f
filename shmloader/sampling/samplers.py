"""Samplers for one process, and the base class of samplers whose epochs are numbered.

**Guarantees.** What such a sampler yields in an epoch depends only on its arguments and the epoch's
number. The process's own random number generators (``random``, ``numpy.random``, torch's) are not
used, so ranks whose generators differ still agree, and an epoch can be repeated.

**Assumes.** An epoch begins when its first index is drawn. ``iter()`` alone does not count: torch's
loader with workers calls it twice before the first epoch, and draws from the second iterator.

How ``BucketBatchSampler`` cuts an epoch, with 4 shards and batches of 2::

    samples, by length   a b c d e f g h i j k l m n o p q r s t u v w x y z
    steps of 4 · 2       ├──────────────┤├──────────────┤├──────────────┤├─┤
    buckets, 2 of them   ├──────────────────────────────┤├─────────────────┤
    batches of 2         ├──┤├──┤├──┤├──┤├──┤├──┤├──┤├──┤├──┤├──┤├──┤├──┤├─┤

With ``shuffle``, samples are shuffled within each bucket before batches are cut, and then the full
steps are shuffled. Buckets end where steps end. Otherwise every bucket could have a short step, not
only the last one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler

from shmloader.sampling.arguments import flag, non_negatives, whole_number

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
            each pass has one index.
        rollover: Whether to begin again, one index further, until each index was yielded once.
            Otherwise only the pass from 0 is yielded.

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
    indices. A loader's workers load the selected samples again. This is repeated in each epoch. So
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


class BucketBatchSampler(EpochSampler[list[Any]]):
    """Batches of samples of similar length, so that little of a padded batch is padding.

    A batch is a list of indices. Samples are sorted by length and cut into buckets at quantiles of
    the lengths. Buckets end where steps end, so their sizes differ by at most ``batch_size`` (times
    ``num_shards``). All samples of a batch are from one bucket. An epoch has each sample once, in
    ``ceil(samples / batch_size)`` batches. Only the last batch can have fewer than ``batch_size``
    samples.

    With ``num_shards``, each step is a list of that many batches, one for each device, all from one
    bucket. If the batches do not fill the last step, it is filled up with the batches that precede
    it in the order of buckets. Their samples then come twice, and lengths stay similar. (An epoch
    with fewer batches than shards repeats its batches in turn.)

    Random numbers come from numpy's Philox, keyed by (seed, epoch).

    Attributes:
        batch_size, num_buckets, num_shards, shuffle, seed: The arguments.
        lengths: The argument, as a read-only array of int64 or float64.
        bucket_sizes: Number of samples in each bucket; the bucket of the shortest samples is first.
            It has fewer than ``num_buckets`` items if there are fewer steps, and is (0,) if there
            are no samples.
        epoch: Number of the next epoch.

    Args:
        lengths: Length of each sample, in any unit: a sequence, 1-d numpy array or tensor of ints
            or floats, none of them negative. Sample i is index i.
        batch_size: Samples in a batch of each shard, at least 1.
        num_buckets: Number of buckets, at least 1. More buckets mean less padding; fewer buckets
            mean more random batches.
        num_shards: Batches in a step; 0 if a step is a batch instead of a list of batches.
        shuffle: Whether each epoch has random batches in random order. A short last step, of the
            longest samples, stays last, and samples of equal length are distributed over buckets at
            random. Without ``shuffle``, samples are in order of length, and those of equal length
            in order of index.
        seed: Seed of the random numbers, from 0 to 2**64 - 1.

    Raises:
        TypeError: If a number is not an int, ``shuffle`` not a bool, or ``lengths`` not numbers.
        ValueError: If a number is out of range, ``lengths`` is not 1-d, or a length is negative,
            infinite or NaN.
    """

    def __init__(
        self,
        lengths: object,
        batch_size: int,
        num_buckets: int = 10,
        num_shards: int = 0,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.lengths = non_negatives(lengths, "lengths")
        self.batch_size = whole_number(batch_size, "batch_size", minimum=1)
        self.num_buckets = whole_number(num_buckets, "num_buckets", minimum=1)
        self.num_shards = whole_number(num_shards, "num_shards", minimum=0)
        self.shuffle = flag(shuffle, "shuffle")
        self._step_size = self.batch_size * max(self.num_shards, 1)
        bucket_count = max(1, min(self.num_buckets, len(self)))
        self._edges = [
            min(bucket * len(self) // bucket_count * self._step_size, len(self.lengths))
            for bucket in range(bucket_count + 1)
        ]

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """Number of samples in each bucket."""
        return tuple(end - begin for begin, end in pairwise(self._edges))

    def __len__(self) -> int:
        """Return the number of steps in an epoch: batches, or with ``num_shards`` lists of them."""
        return math.ceil(len(self.lengths) / self._step_size)

    def _draw(self, epoch: int) -> Iterator[list[Any]]:
        random = random_numbers(self.seed, epoch)
        order = self._order(random).tolist()
        size, whole, count = self.batch_size, self._step_size, len(order) // self._step_size
        steps = random.permutation(count).tolist() if self.shuffle else range(count)
        firsts = [step * whole for step in steps]
        if count < len(self):  # the last step is filled up with the batches before it
            firsts.append(max(0, math.ceil(len(order) / size) * size - whole))
        for first in firsts:
            end = min(first + whole, len(order))
            batches = [order[begin : min(begin + size, end)] for begin in range(first, end, size)]
            step = [*islice(cycle(batches), whole // size)]
            yield step if self.num_shards else step[0]

    def _order(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return the indices sorted by length; with ``shuffle``, in random order within buckets."""
        if not self.shuffle:
            return np.argsort(self.lengths, kind="stable")
        # Shuffled before sorting, so that samples of equal length fall into buckets at random.
        mixed = random.permutation(len(self.lengths))
        order = mixed[np.argsort(self.lengths[mixed], kind="stable")]
        for begin, end in pairwise(self._edges):
            random.shuffle(order[begin:end])
        return order
