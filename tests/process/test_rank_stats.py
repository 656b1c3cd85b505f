"""What ranks, real processes of torch.distributed, find about the ranks that they wait for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from shmloader import LoaderStats, LoaderTimeoutError, ShardedDataLoader
from shmloader.insight.ranks import RankStats
from shmloader.insight.stats import WaitStats
from tests.process.support import Calls

pytestmark = pytest.mark.timeout(120)

RANKS = 3


def run(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    loader = ShardedDataLoader(torch.arange(RANKS * 8 * 2), 2, timeout=0)
    for epoch in range(2):
        for step, _ in enumerate(loader):
            if step == rank:
                break  # so that ranks differ
        found = loader.stats(ranks=True)
        assert [one.batches for one in found.ranks] == [1, 2, 3]
        assert [one.epoch for one in found.ranks] == [epoch] * RANKS
        assert found.ranks[rank].wait == loader.stats().wait
    total = loader.stats("total", ranks=True)
    assert [one.batches for one in total.ranks] == [2, 4, 6]
    (folder / f"rank{rank}.json").write_text(json.dumps(total.to_dict()))
    dist.barrier()
    dist.destroy_process_group()


def test_each_rank_gets_the_statistics_of_all(tmp_path) -> None:
    torch.multiprocessing.start_processes(run, (tmp_path,), RANKS, start_method="fork")
    found = [(tmp_path / f"rank{rank}.json").read_text() for rank in range(RANKS)]
    assert found[0] == found[1] == found[2]
    assert json.loads(found[0])["ranks"][2]["samples"] == 12


def wait_alone(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    loader = ShardedDataLoader(Calls(int, 8), num_workers=1, timeout=0.2)
    if rank == 0:
        with pytest.raises(LoaderTimeoutError, match=r"rank 0 waits until all ranks call stats"):
            loader.stats(ranks=True)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_does_not_call_is_a_timeout(tmp_path) -> None:
    torch.multiprocessing.start_processes(wait_alone, (tmp_path,), 2, start_method="fork")


def test_without_a_group_there_is_an_error_or_one_rank() -> None:
    loader = ShardedDataLoader([0, 1], rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group\(\) before"):
        loader.stats(ranks=True)
    alone = ShardedDataLoader([0, 1])
    list(alone)
    found = alone.stats(ranks=True)
    assert (len(found.ranks), found.slowest, found.waited_most) == (1, None, 0)


def stats_of(*waits_s: float, elapsed_s: float = 10.0) -> RankStats:
    def one(wait_s: float) -> Any:
        return LoaderStats(batches=5, elapsed_s=elapsed_s, wait=WaitStats(total_s=wait_s))

    return RankStats(tuple(map(one, waits_s)))


@pytest.mark.parametrize(
    ("waits_s", "waited_most", "slowest"),
    [((0.1, 4.0), 1, 1), ((2.0, 2.4), 1, None), ((1, 9, 1, 8), 1, 1), ((3, 3, 3), 0, None)],
)
def test_the_others_wait_for_a_rank_whose_wait_stands_out(waits_s, waited_most, slowest) -> None:
    found = stats_of(*waits_s)
    assert (found.waited_most, found.slowest) == (waited_most, slowest)
    held_up = f"The others waited for rank {slowest}, which" if slowest else "No rank held up"
    assert found.verdict.startswith(held_up)
    assert str(found).endswith(found.verdict)
    assert str(found).count("\n") == len(waits_s) + 4
