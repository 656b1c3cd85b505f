"""Ray Train: a ``prepare_data_loader`` that keeps the class and the arguments of a loader."""

from typing import Any

import ray.train
import ray.train.torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from shmloader.integrations.rebuilding import check_loader, rebuild
from shmloader.loader.dataloader import DataLoader


def prepare_data_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Prepare a loader for this training process, as ``ray.train.torch.prepare_data_loader`` does.

    With several training processes, each gets its part of the samples from a
    ``DistributedSampler``, which shuffles if the loader does. Call
    ``loader.sampler.set_epoch(epoch)`` before each epoch. An iterable dataset must itself yield
    only the samples of its rank. If Ray's device is not the CPU, batches arrive on Ray's device,
    unless the loader has a ``device``.

    Args:
        loader: A :class:`shmloader.DataLoader` with a ``batch_size`` and no ``sampler``.

    Returns:
        ``loader`` itself, or, where the samples have to be divided, a new loader of the same class.

    Raises:
        TypeError: If ``loader`` is of another class, or a ``ShardedDataLoader``, which divides
            itself among the ranks.
        ValueError: If the samples have to be divided and the loader has no ``batch_size``.
    """
    check_loader(loader, "shmloader.integrations.ray.prepare_data_loader")
    context = ray.train.get_context()
    count, rank = context.get_world_size(), context.get_world_rank()
    device = ray.train.torch.get_device()
    if loader.device is None and device.type != "cpu":
        loader.device = device
    if count == 1 or isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    if loader.batch_size is None:
        raise ValueError(
            "prepare_data_loader cuts the samples for the ranks, which a batch_sampler of your "
            "own, or batch_size=None, does not allow: give batch_size, or cut it by rank yourself"
        )
    shuffles = isinstance(loader.sampler, RandomSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, count, rank, shuffle=shuffles, seed=loader.seed or 0
    )
    return rebuild(
        loader,
        loader.dataset,
        sampler=sampler,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
    )
