"""Samplers: which samples a loader gives, in which order, and on which rank.

They are torch's ``Sampler`` by class, so torch's own loader takes them as well.

==============================  ===================================================================
``ShardedSampler``              a rank's part of what any sampler, or batch sampler, gives
``SplitSampler``                a contiguous part of the indices for each rank, shuffled or in order
``IntervalSampler``             every n-th index, then the same from the next one on
``FilterSampler``               the samples that satisfy a function, found as they are drawn
``BucketBatchSampler``          batches of samples of similar length; for several devices at a time
``DistributedWeightedSampler``  a rank's share of one weighted draw
==============================  ===================================================================

Those that draw at random have ``seed=`` and ``set_epoch()``: an epoch is a function of the
arguments and its number, and never touches the random streams of the process (``epochs``).
``ranks`` says which rank a process has; ``checks`` looks at arguments.
"""

from shmloader.sampling.bucket import BucketBatchSampler
from shmloader.sampling.filter import FilterSampler
from shmloader.sampling.interval import IntervalSampler
from shmloader.sampling.sharded import ShardedSampler
from shmloader.sampling.split import SplitSampler
from shmloader.sampling.weighted import DistributedWeightedSampler

__all__ = [
    "BucketBatchSampler",
    "DistributedWeightedSampler",
    "FilterSampler",
    "IntervalSampler",
    "ShardedSampler",
    "SplitSampler",
]
