"""Samplers: which samples a loader delivers, in which order, and on which rank.

They are subclasses of torch's ``Sampler``, so torch's own loader takes them as well.

==============================  ====================================================================
``ShardedSampler``              a rank's share of what any sampler or batch sampler yields
``SplitSampler``                a contiguous part of the indices for each rank, shuffled or in order
``IntervalSampler``             every n-th index, then the same from the next index on
``FilterSampler``               the samples that satisfy a function, found as they are drawn
``BucketBatchSampler``          batches of samples of similar length, for one or several devices
``TokenBatches``                batches of a token budget, planned from lengths alone
``DistributedWeightedSampler``  a rank's share of one weighted draw
==============================  ====================================================================

Samplers that draw at random have ``seed=`` and ``set_epoch()``. What they yield in an epoch depends
only on the arguments and the epoch's number, not on the random number generators of the process
(see the module ``samplers``).

Other modules make the loader's own order of samples. In ``plan``, :class:`EpochPlan` holds the
epoch and the position in it, which ``progress`` counts. ``seeded_order`` and ``sampler_order``
yield the index batches. ``steps`` cuts an order into batches, and carries over what is left.
``sampler_state`` saves what the order of a sampler depends on, and checks that it yields the same
again. ``loader_samplers`` has the samplers that frameworks find in a loader.

``TokenBatches`` plans one window of samples after the other. ``packing`` makes batches of lengths,
``balancing`` orders them by cost, and ``token_windows`` does both for any window of an epoch.
``sample_lengths`` checks lengths, ``pieces`` cuts long samples, and ``plan_report`` has figures.
"""

from shmloader.sampling.samplers import (
    BucketBatchSampler,
    FilterSampler,
    IntervalSampler,
    SplitSampler,
)
from shmloader.sampling.sharded import DistributedWeightedSampler, ShardedSampler
from shmloader.sampling.token_batches import TokenBatches

__all__ = [
    "BucketBatchSampler",
    "DistributedWeightedSampler",
    "FilterSampler",
    "IntervalSampler",
    "ShardedSampler",
    "SplitSampler",
    "TokenBatches",
]
