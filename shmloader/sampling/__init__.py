"""Samplers: which samples a loader delivers, in which order, and on which rank.

They are subclasses of torch's ``Sampler``, so torch's own loader takes them as well.

==============================  ====================================================================
``ShardedSampler``              a rank's share of what any sampler or batch sampler yields
``SplitSampler``                a contiguous part of the indices for each rank, shuffled or in order
``IntervalSampler``             every n-th index, then the same from the next index on
``FilterSampler``               the samples that satisfy a function, found as they are drawn
``BucketBatchSampler``          batches of samples of similar length; for one or several devices
``DistributedWeightedSampler``  a rank's share of one weighted draw
==============================  ====================================================================

Those that draw at random have ``seed=`` and ``set_epoch()``: an epoch depends only on the arguments
and its number, and does not use the random number generators of the process (``epochs``).

The loader's own order of samples begins in ``plan``: :class:`EpochPlan` holds the position in the
epoch, ``seeded_order`` and ``sampler_order`` yield the index batches, the latter by a
``resumable_sampler``. ``steps`` cuts an order into batches and knows what it leaves over,
``rollover`` carries that into the next epoch, ``fast_forward`` draws from a position on.
``seeded_samplers`` show a seeded order to what reads a loader's samplers, ``epoch_counter`` numbers
the epochs for both.
"""

from shmloader.sampling.bucket import BucketBatchSampler
from shmloader.sampling.samplers import (
    DistributedWeightedSampler,
    FilterSampler,
    IntervalSampler,
    SplitSampler,
)
from shmloader.sampling.sharded import ShardedSampler

__all__ = [
    "BucketBatchSampler",
    "DistributedWeightedSampler",
    "FilterSampler",
    "IntervalSampler",
    "ShardedSampler",
    "SplitSampler",
]
