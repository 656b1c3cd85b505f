"""Samplers: which samples a loader delivers, in which order, and on which rank.

``ShardedSampler`` yields a rank's share of what any sampler or batch sampler yields, and
``TokenBatches`` batches of a token budget, planned from lengths alone. Both are subclasses of
torch's ``Sampler``, so torch's own loader takes them as well.

They have ``seed=`` and ``set_epoch()``. What they yield in an epoch depends only on the arguments
and the epoch's number, not on the random number generators of the process (see the module
``samplers``).

Other modules make the loader's own order of samples. In ``plan``, :class:`EpochPlan` holds the
epoch and the position in it, which ``progress`` counts. ``seeded_order`` and ``sampler_order``
yield the index batches. ``steps`` cuts an order into batches, and carries over what is left.
``sampler_state`` saves what the order of a sampler depends on, and checks that it yields the same
again. ``loader_samplers`` has the samplers that frameworks find in a loader.

``TokenBatches`` plans one window of samples after the other. ``packing`` makes batches of lengths,
``balancing`` orders them by cost, and ``token_windows`` does both for any window of an epoch.
``sample_lengths`` checks lengths, ``pieces`` cuts long samples, and ``plan_report`` has figures.
"""

from shmloader.sampling.sharded import ShardedSampler
from shmloader.sampling.token_batches import TokenBatches

__all__ = ["ShardedSampler", "TokenBatches"]
