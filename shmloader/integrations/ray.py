"""Ray Train: a ``prepare_data_loader`` that keeps the class and the arguments of a loader."""

from typing import Any

import ray.train
import ray.train.torch
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from shmloader.integrations import check_loader, rebuild
from shmloader.loader.dataloader import DataLoader
from shmloader.sampling.arguments import divides_for_ranks
from shmloader.sampling.loader_samplers import SeededRandomSampler, SeededSequentialSampler


def prepare_data_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Prepare a loader for this training process, as ``ray.train.torch.prepare_data_loader`` does.

    With several training processes, each gets its part of the samples from a
    ``DistributedSampler``, which shuffles if the loader does. Call
    ``loader.sampler.set_epoch(epoch)`` before each epoch. An iterable dataset must itself yield
    only the samples of its rank. If Ray's device is not the CPU, batches arrive on Ray's device,
    unless the loader has a ``device``.

    Args:
        loader: A :class:`shmloader.DataLoader`. Its samples have to be divided if there are several
            training processes, the dataset is map-style, and neither ``sampler`` nor
            ``batch_sampler`` yields one rank's samples only, as a ``DistributedSampler`` does. The
            loader then needs a ``batch_size``, and no ``sampler=``.

    Returns:
        A new loader of the same class if the samples have to be divided, otherwise ``loader``.

    Raises:
        TypeError: If ``loader`` is of another class, or a ``ShardedDataLoader``, which divides
            itself among the ranks.
        ValueError: If the samples have to be divided, and the loader has no ``batch_size``, or has
            a sampler that a ``DistributedSampler`` cannot replace.
    """
    check_loader(loader, "shmloader.integrations.ray.prepare_data_loader")
    context = ray.train.get_context()
    count, rank = context.get_world_size(), context.get_world_rank()
    device = ray.train.torch.get_device()
    is_divided = divides_for_ranks(loader.sampler) or divides_for_ranks(loader.batch_sampler)
    if count > 1 and not isinstance(loader.dataset, IterableDataset) and not is_divided:
        loader = _of_rank(loader, count, rank)
    if loader.device is None and device.type != "cpu":
        loader.device = device
    return loader


def _of_rank(loader: DataLoader[Any], count: int, rank: int) -> DataLoader[Any]:
    """Return a loader of the same class with the samples of one of ``count`` ranks."""
    if loader.batch_size is None or not _has_default_sampler(loader):
        raise ValueError(
            "prepare_data_loader would replace your "
            f"{type(loader.sampler).__name__} by a DistributedSampler. Give batch_size and "
            "shuffle= instead, or a sampler with num_replicas and rank that yields the samples of "
            "one rank, such as shmloader.sampling.ShardedSampler."
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        count,
        rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=loader.seed or 0,
    )
    order: dict[str, Any] = {"sampler": sampler, "batch_size": loader.batch_size}
    if loader.last_batch is None:
        order["drop_last"] = loader.drop_last
    else:
        order["last_batch"] = loader.last_batch
    return rebuild(loader, loader.dataset, **order)


def _has_default_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler is one that it makes without ``sampler=``, or equal to it."""
    sampler: Any = loader.sampler
    if type(sampler) in {RandomSampler, SeededRandomSampler}:
        is_whole = not sampler.replacement
    else:
        is_whole = type(sampler) in {SequentialSampler, SeededSequentialSampler}
    return is_whole and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
