"""Which samples a loader gives, and in which order."""

from shmloader.sampling.sharded import ShardedSampler

__all__ = ["ShardedSampler"]
