"""Loaders whose workers all ranks of a host share, and what their batches should be."""

import os
from typing import Any

import psutil
import torch

from shmloader import ShardedDataLoader

COUNT, BATCH, WORKERS = 45, 4, 2


class Samples:
    """Samples that tell which process made them; some do what a test wants first."""

    def __init__(self, count: int = COUNT, at: dict[int, Any] | None = None) -> None:
        self.count = count
        self.at = at or {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        if index in self.at:
            self.at[index]()
        return index, torch.rand(2), os.getpid()


def loader(dataset: Any = None, **options: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(
        Samples() if dataset is None else dataset,
        BATCH,
        True,
        **{"num_workers": WORKERS, "worker_scope": "host", "last_batch": "keep", **options},
    )


def contents(batches: Any) -> list[tuple[list[int], list[list[float]]]]:
    return [(indices.tolist(), drawn.tolist()) for indices, drawn, _ in batches]


def pids(batches: Any) -> set[int]:
    return {pid for _, _, makers in batches for pid in makers.tolist()}


def expected(rank: int, ranks: int = 2, epochs: int = 1, **options: Any) -> list[Any]:
    with loader(
        num_workers=0, worker_scope="rank", rank=rank, world_size=ranks, **options
    ) as alone:
        return [contents(alone) for _ in range(epochs)]


def owner_of(one: ShardedDataLoader[Any]) -> int:
    pool = one._parts.host_pool
    assert pool is not None
    return pool.nursery.pid


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
