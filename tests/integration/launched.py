"""What the programs that launchers start do in each rank, in the folder of their run."""

from pathlib import Path

import torch.distributed as dist

from tests.process import one_dataset, one_pool


def join_by_store(rank: int, ranks: int) -> None:
    store = f"file://{Path().absolute()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)


def run_rank(shared: str) -> None:
    """Share "workers" or a "dataset" with the other ranks of the group, then leave it."""
    run = {"workers": one_pool, "dataset": one_dataset}[shared].run_rank
    run(Path(), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
