"""One rank of a run of ``host_workers.py``: loads two epochs, of which the second is measured.

torchrun starts this file once for each rank, with the case as JSON, the kind of loader, and the
file to which rank 0 writes the figures of the run. The ranks have a process group of gloo, as those
of a training do. They use it to begin the measured epoch at the same time, and to bring their
figures to rank 0, which looks at the memory of all processes while all of them live.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from _usage import pss_bytes_of
from _workloads import WORKLOADS, touch
from _workloads import Samples as Ints
from memory import Texts, make_texts
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

import shmloader
from shmloader import DataLoader, ShardedDataLoader

# A rank that takes longer is ended by SIGALRM, and then torchrun ends the others.
_RANK_LIMIT_S = 500

KINDS = ("torch", "own", "host")
UNSEEDED = "unseeded"
SHARE = "share"


class Case(NamedTuple):
    """A case: what the ranks load, and with how many workers.

    Attributes:
        ranks: Number of ranks.
        workers: Workers of the host, of all ranks together.
        batches: Batches of each rank in an epoch.
        batch_size: Samples in a batch.
        sample_s: How long a sample sleeps.
        slower: How many times as long a sample of rank 0 sleeps.
        own: Workers of each rank, for kinds in which ranks have workers of their own. None: the
            rank's share of ``workers``.
        data: What is loaded: samples that sleep, ints in sequential order, or a list of texts in
            random order.
        is_alone: Whether only the kind ``host`` is run.
    """

    ranks: int
    workers: int
    batches: int
    batch_size: int
    sample_s: float = 0.0
    slower: int = 1
    own: int | None = None
    data: Literal["sleeping", "ints", "texts"] = "sleeping"
    is_alone: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of loader that the case compares."""
        if self.is_alone:
            return ("host",)
        more = {"sleeping": (), "ints": (UNSEEDED,), "texts": (SHARE,)}
        return (*KINDS, *more[self.data])

    @property
    def own_workers(self) -> int:
        """Workers of each rank, if ranks have workers of their own."""
        return self.own or max(1, self.workers // self.ranks)

    @property
    def share(self) -> int:
        """Samples of each rank in an epoch."""
        return self.batches * self.batch_size


class SleepingSamples(Dataset[torch.Tensor]):
    """Samples that sleep, those of the slow rank (indices in ``slow``) longer."""

    def __init__(self, count: int, sample_s: float, slow: range, slower: int) -> None:
        self.count = count
        self.sample_s = sample_s
        self.slow = slow
        self.slower = slower

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sample_s:
            is_slow = index in self.slow
            time.sleep(self.sample_s * (self.slower if is_slow else 1))
        return torch.full((8,), index)


class Blocks(torch.utils.data.Sampler[list[int]]):
    """Batches of consecutive samples, dealt to the ranks in turn.

    Rank r of n gets the r-th of n consecutive parts of the dataset.
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return self.case.batches * self.case.ranks

    def __iter__(self) -> Iterator[list[int]]:
        case = self.case
        for step in range(case.batches):
            for rank in range(case.ranks):
                first = (rank * case.batches + step) * case.batch_size
                yield list(range(first, first + case.batch_size))


class EveryNth:
    """A rank's batches: every n-th one of a batch sampler."""

    def __init__(self, batches: Blocks, rank: int, ranks: int) -> None:
        self.batches = batches
        self.rank = rank
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.batches) // self.ranks

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batches):
            if number % self.ranks == self.rank:
                yield batch


def make_loader(case: Case, kind: str, rank: int) -> Any:
    """Return a rank's loader.

    Raises:
        ValueError: If the case has no such kind.
    """
    if kind not in case.kinds:
        raise ValueError(f"the kind should be one of {', '.join(case.kinds)}, but got {kind!r}")
    options: dict[str, Any] = {"persistent_workers": True}
    if kind == "host" and case.data != "texts":
        options |= {"num_workers": case.workers, "worker_scope": "host"}
    else:
        options |= {"num_workers": case.own_workers, "multiprocessing_context": "fork"}
    make = {"sleeping": _of_sleeping, "ints": _of_ints, "texts": _of_texts}[case.data]
    return make(case, kind, rank, options)


def _of_sleeping(case: Case, kind: str, rank: int, options: dict[str, Any]) -> Any:
    slow = range(case.share)
    dataset = SleepingSamples(case.share * case.ranks, case.sample_s, slow, case.slower)
    if kind == "torch":
        order = EveryNth(Blocks(case), rank, case.ranks)
        return TorchLoader(dataset, batch_sampler=order, **options)
    return ShardedDataLoader(dataset, batch_sampler=Blocks(case), **options)


def _of_ints(case: Case, kind: str, rank: int, options: dict[str, Any]) -> Any:
    ints = Ints(WORKLOADS["e"])
    if kind == UNSEEDED:
        return DataLoader(ints.first(case.share), **options)
    dataset = ints.first(case.share * case.ranks)
    if kind == "torch":
        order = DistributedSampler(dataset, case.ranks, rank, shuffle=False)
        return TorchLoader(dataset, sampler=order, **options)
    return ShardedDataLoader(dataset, **options)


def _of_texts(case: Case, kind: str, rank: int, options: dict[str, Any]) -> Any:
    build = partial(_make_texts, case.share * case.ranks)
    if kind == "host":
        dataset = shmloader.share_on_host(build)
    else:
        dataset = shmloader.share(build()) if kind == SHARE else build()
    if kind == "torch":
        order = DistributedSampler(dataset, case.ranks, rank)
        return TorchLoader(dataset, case.batch_size, sampler=order, **options)
    return ShardedDataLoader(dataset, case.batch_size, True, **options)


def _make_texts(count: int) -> Texts:
    return Texts(make_texts(count))


def run(case: Case, kind: str) -> dict[str, float]:
    """Load a first epoch, in which everything starts up, and a second one, which is measured.

    Returns:
        The figures of the run in rank 0, an empty dict in other ranks.
    """
    rank = dist.get_rank()
    loader = make_loader(case, kind, rank)
    touches = case.data == "ints"
    for batch in loader:
        if touches:
            touch(batch)
    dist.barrier()
    began_s, before_s = time.monotonic(), time.process_time()
    for batch in loader:
        if touches:
            touch(batch)
    used_s, ended_s = time.process_time() - before_s, time.monotonic()
    found: list[Any] | None = [None] * case.ranks if rank == 0 else None
    dist.gather_object((began_s, ended_s, used_s), found)
    figures = {}
    if found is not None:
        began, ended, used = zip(*found, strict=True)
        figures = {
            "elapsed_s": max(ended) - min(began),
            "main_us": statistics.mean(used) / case.batches * 1e6,
            **_memory(loader),
        }
    dist.barrier()  # All processes live until rank 0 has looked at their memory.
    return figures


def _memory(loader: Any) -> dict[str, float]:
    """Return the number of worker processes of this run, their memory, and that of all processes.

    The process that owns the workers of a host counts as one of them.
    """
    pool = getattr(getattr(loader, "_parts", None), "host_pool", None)
    owner_pid = None if pool is None else pool.nursery.pid
    run_id = os.environ["TORCHELASTIC_RUN_ID"]
    workers: list[int] = []
    others: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TORCHELASTIC_RUN_ID") != run_id:
                continue
            is_worker = process.name() == "pt_data_worker" or process.pid == owner_pid
            (workers if is_worker else others).append(pss_bytes_of(process.pid))
        except (OSError, psutil.Error):
            continue  # it has ended, or is another user's
    return {
        "processes": len(workers),
        "worker_bytes": sum(workers),
        "all_bytes": sum(workers) + sum(others),
    }


@record  # torchrun learns what went wrong
def main() -> None:
    """Do a rank's part of a run."""
    signal.alarm(_RANK_LIMIT_S)
    case, kind, results = sys.argv[1:]
    dist.init_process_group("gloo")
    figures = run(Case(**json.loads(case)), kind)
    if figures:
        Path(results).write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
