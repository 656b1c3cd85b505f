"""The samplers that a loader has in place of torch's.

Those of a loader with a seed yield its order. The loader does not draw from them. They are for
frameworks that read, wrap or iterate the samplers of a loader, which does not affect the loader.
"""

import copy
import warnings
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from shmloader.interruptions import probe
from shmloader.sampling.indices import Permutation
from shmloader.sampling.progress import EpochCounter
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import Cut, OrderSteps

# Lightning's two packages.
_LIGHTNING = ("lightning", "pytorch_lightning")

# Indices that SeededRandomSampler computes at a time.
_BLOCK = 8192


class SeededSampler(Sampler[int]):
    """The base class: a sampler whose epochs are numbered as those of its loader."""

    data_source: Sized

    def __init__(self, data_source: Sized, seed: int, epochs: EpochCounter) -> None:
        super().__init__(data_source)  # type: ignore[call-arg] # that of one of torch's samplers
        self.seed, self.epochs = seed, epochs

    @property
    def epoch(self) -> int:
        """Number of the epoch that is iterated next: the loader's, or what was set since."""
        return self.epochs.of_samplers

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is iterated next, here and by the next ``iter()`` of the loader."""
        self.epochs.name(epoch)


class SeededRandomSampler(SeededSampler, RandomSampler):
    """The order of a loader with ``shuffle=True``."""

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the epoch."""
        length = len(self.data_source)
        order = Permutation(length, self.seed, self.epochs.begin_pass())
        for block in OrderSteps(length, order, Cut(_BLOCK), "keep"):
            yield from block


class SeededSequentialSampler(SeededSampler, SequentialSampler):
    """The order of a loader without ``shuffle``: the same in all epochs."""


class SeededShardSampler(SeededSampler, DistributedSampler[Any]):  # type: ignore[override]
    """A rank's share of the order of a ``ShardedDataLoader``, with the samples that pad it.

    It is a subclass of torch's ``DistributedSampler``, so that frameworks do not divide it again.
    The loader sets ``order``.
    """

    order: SeededOrder

    def __init__(self, dataset: Any, seed: int, epochs: EpochCounter, *, shuffle: bool) -> None:
        # torch's constructor is not called, since it needs the ranks.
        self.dataset = self.data_source = dataset
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        self.drop_last = False

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank, as it is known now."""
        return self.order.cut.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks, as it is known now."""
        return self.order.cut.world_size

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Number of samples of this rank in an epoch."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Number of samples of all ranks, if each has as many as this rank."""
        return len(self) * self.num_replicas

    def without_repeats(self) -> "SeededShardSampler":
        """Return a copy that yields each sample on one rank alone, and leaves none out."""
        other = copy.copy(self)
        other.order = self.order.without_repeats()
        return other

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices of the epoch."""
        for step in self.order.steps_of(self.epochs.begin_pass()):
            yield from step

    def __len__(self) -> int:
        """Return the number of samples of this rank in an epoch."""
        return self.order.sample_count()


def leave_out_repeats(batch_sampler: Any) -> None:
    """Make the sharded loader with which Lightning predicts deliver each sample once.

    The order of a sharded loader is padded with repeated samples. For predicting, Lightning builds
    another loader, whose batch sampler wraps one over this order.
    """
    if type(batch_sampler).__module__.partition(".")[0] not in _LIGHTNING:
        return
    for batches in vars(batch_sampler).values():
        order = probe(batches, "sampler")
        if isinstance(order, SeededShardSampler):
            batches.sampler = batch_sampler.sampler = order.without_repeats()
            return
    if isinstance(probe(batch_sampler, "sampler"), SeededShardSampler):
        warnings.warn(
            "this release of Lightning is not known to shmloader. Predict with a DataLoader. A "
            "ShardedDataLoader may predict twice the samples that fill up the last batches, and "
            "never those that are discarded.",
            stacklevel=3,
        )
