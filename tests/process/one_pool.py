"""What a rank of a run finds about the workers that it shares, for tests of what starts ranks."""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from shmloader import ShardedDataLoader
from tests.process.support import wait_until

LONG_S = 100
WORKERS = 2


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, torch.rand(2), os.getpid()


def make(**options: Any) -> ShardedDataLoader[Any]:
    defaults = {"num_workers": WORKERS, "worker_scope": "host", "seed": 3}
    return ShardedDataLoader(Samples(), 4, True, **{**defaults, **options})


def contents(batches: list[Any]) -> list[Any]:
    return [[indices.tolist(), drawn.tolist()] for indices, drawn, _ in batches]


class Report:
    """What one rank finds. Ranks wait for each other, so that none is done before another begins.

    Args:
        folder: Where the ranks write.
        rank: The rank.
        ranks: How many there are.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.found: dict[str, Any] = {}

    def meet(self, what: str) -> None:
        (self.folder / f"{what}{self.rank}").touch()
        wait_until(lambda: len([*self.folder.glob(f"{what}[0-9]")]) == self.ranks, LONG_S)

    def look(self, loader: Any) -> None:
        """Note the processes, while all ranks have begun and none has ended."""
        self.meet("begun")
        pool = loader._parts.host_pool
        workers = [each.pid for each in psutil.Process(pool.nursery.pid).children()]
        # A worker that has not made a batch for this rank may not have heard of it yet.
        own_cores = os.sched_getaffinity(0)
        wait_until(lambda: all(os.sched_getaffinity(pid) >= own_cores for pid in workers), LONG_S)
        self.meet("known")
        self.found |= {
            "owner": pool.nursery.pid,
            "workers": sorted(workers),
            "cores": [sorted(os.sched_getaffinity(pid)) for pid in workers],
            "socket": pool.name[1:],
            "shm": [line for pid in (pool.nursery.pid, *workers) for line in _in_dev_shm(pid)],
        }
        self.meet("seen")

    def write(self, batches: list[Any]) -> None:
        """Write it all, beside what the rank's own workers give."""
        with make(worker_scope="rank", num_workers=1) as private:
            epochs = [contents(list(private)) for _ in range(2)]
        self.found["is_alike"] = contents(batches) == [each for epoch in epochs for each in epoch]
        self.found["makers"] = sorted({pid for _, _, pids in batches for pid in pids.tolist()})
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(self.found))
        self.meet("written")


def run_rank(folder: Path, rank: int, ranks: int) -> None:
    """Load two epochs, and write what was found."""
    report = Report(folder, rank, ranks)
    with make() as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        report.look(loader)
        batches += iterator
        batches += loader
    report.write(batches)


def _in_dev_shm(pid: int) -> list[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]


def check(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Check what the ranks have found, once all of them have ended, and return it."""
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert all(rank["is_alike"] for rank in found)
    assert len({rank["owner"] for rank in found}) == 1
    (workers,) = {tuple(rank["workers"]) for rank in found}
    assert len(workers) == WORKERS
    assert set().union(*(rank["makers"] for rank in found)) <= set(workers)
    assert not any(rank["shm"] for rank in found)
    sockets = Path("/proc/net/unix").read_text()
    assert not [rank["socket"] for rank in found if rank["socket"] in sockets]
    wait_until(lambda: not any(map(_is_alive, (found[0]["owner"], *workers))), LONG_S)
    return found


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
