"""What does one pool of workers for all ranks of a host save, beside workers of each rank?

Each case runs the same epochs on ranks with workers of their own (``own``), with as many workers in
one pool (``host``: ``worker_scope="host"``), and with torch's loader and ``DistributedSampler``
(``torch``). Each run has fresh processes, and the kinds take turns. Samples only sleep, so the
machine's cores do not decide, except in the rows on memory and on the main process.

=========  =======================================================================================
even       4 ranks, 4 workers in all, samples of 2 ms: samples a second of all ranks
uneven     the same, but the samples of rank 0 take 5 times as long: seconds until all ranks end
memory     4 ranks with 4 workers each, which share 4 in the pool: worker processes, and their PSS
main       one rank, small batches, 2 workers: CPU time of the rank's process for a batch
many       8 ranks, 64 workers in all, samples of 20 ms: samples a second, to the ideal
=========  =======================================================================================

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import uuid
from typing import Any, NamedTuple

import psutil
import torch
from _fresh import in_turn, run_anew
from _machine import describe_machine
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import ShardedDataLoader

_RUN_LIMIT_S = 600.0
KINDS = ("torch", "own", "host")


class Case(NamedTuple):
    """What is run. ``workers`` are those of the host, ``own`` those of a rank if not its share."""

    ranks: int
    workers: int
    batches: int
    batch_size: int
    sample_s: float = 0.0
    slower: int = 1
    own: int | None = None


CASES = {
    "even": Case(4, 4, 60, 16, 0.002),
    "uneven": Case(4, 4, 60, 16, 0.002, slower=5),
    "memory": Case(4, 4, 60, 16, 0.0, own=4),
    "main": Case(1, 2, 4000, 4),
    "many": Case(8, 64, 24, 16, 0.02),
}


class Samples(Dataset[torch.Tensor]):
    """Samples that sleep: longer, if the rank that wants them is the slow one."""

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
    """Batches of consecutive samples, in an order in which rank r of n gets the r-th n-th."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return self.case.batches * self.case.ranks

    def __iter__(self) -> Any:
        case = self.case
        for step in range(case.batches):
            for rank in range(case.ranks):
                first = (rank * case.batches + step) * case.batch_size
                yield list(range(first, first + case.batch_size))


def run(case: Case, kind: str) -> dict[str, float]:
    """Start the ranks, and wait for their epochs."""
    spawn = multiprocessing.get_context("spawn")
    begins, queue = spawn.Barrier(case.ranks), spawn.Queue()
    run_id = uuid.uuid4().hex
    processes = [
        spawn.Process(target=_rank, args=(case, kind, rank, run_id, begins, queue))
        for rank in range(case.ranks)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=_RUN_LIMIT_S) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    workers = {pid: nbytes for one in found for pid, nbytes in one["workers"].items()}
    return {
        "elapsed_s": max(one["ended_s"] for one in found) - min(one["began_s"] for one in found),
        "main_us": max(one["main_us"] for one in found),
        "processes": len(workers),
        "worker_bytes": sum(workers.values()),
    }


def _rank(case: Case, kind: str, rank: int, run_id: str, begins: Any, queue: Any) -> None:
    """Load a first epoch, in which all start up, and a second one, which counts."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": run_id,
        "RANK": str(rank),
        "WORLD_SIZE": str(case.ranks),
        "LOCAL_WORLD_SIZE": str(case.ranks),
    }
    torch.set_num_threads(1)
    share = case.batches * case.batch_size
    dataset = Samples(share * case.ranks, case.sample_s, range(share), case.slower)
    own = case.own or max(1, case.workers // case.ranks)
    loader: Any
    if kind == "torch":
        sampler = _Own(Blocks(case), rank, case.ranks)
        loader = TorchLoader(
            dataset, batch_sampler=sampler, num_workers=own, persistent_workers=True
        )
    else:
        scope: dict[str, Any] = {"num_workers": own, "persistent_workers": True}
        if kind == "host":
            scope |= {"num_workers": case.workers, "worker_scope": "host"}
        loader = ShardedDataLoader(dataset, batch_sampler=Blocks(case), **scope)
    for _ in loader:
        pass
    begins.wait(_RUN_LIMIT_S)
    began_s, before_s = time.monotonic(), time.process_time()
    for _ in loader:
        pass
    used_s, ended_s = time.process_time() - before_s, time.monotonic()
    workers = _workers(run_id)
    begins.wait(_RUN_LIMIT_S)
    queue.put(
        {
            "began_s": began_s,
            "ended_s": ended_s,
            "main_us": used_s / case.batches * 1e6,
            "workers": workers,
        }
    )


class _Own:
    """Every n-th batch of a batch sampler."""

    def __init__(self, batches: Blocks, rank: int, ranks: int) -> None:
        self.batches = batches
        self.rank = rank
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.batches) // self.ranks

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batches):
            if number % self.ranks == self.rank:
                yield batch


def _workers(run_id: str) -> dict[int, int]:
    """Return the proportional set sizes of all worker processes of a run, by process id."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.name() != "pt_data_worker":
                continue
            if process.environ().get("TORCHELASTIC_RUN_ID") == run_id or _is_below_rank(process):
                found[process.pid] = int(process.memory_full_info().pss)
        except psutil.Error:
            continue
    return found


def _is_below_rank(worker: psutil.Process) -> bool:
    """Whether a worker was forked by this rank, whose variables were set after its start."""
    return worker.ppid() == os.getpid()


def _figure(name: str, case: Case, found: dict[str, float]) -> str:
    samples = case.ranks * case.batches * case.batch_size
    if name == "uneven":
        return f"{found['elapsed_s']:.2f} s"
    if name == "memory":
        return f"{found['processes']:.0f} processes, {found['worker_bytes'] / 1e6:,.0f} MB"
    if name == "main":
        return f"{found['main_us']:.0f} µs"
    if name == "many":
        ideal_s = case.batches * case.ranks * case.batch_size * case.sample_s / case.workers
        return f"{ideal_s / found['elapsed_s']:.2f} of the ideal"
    return f"{samples / found['elapsed_s']:,.0f} samples/s"


def main() -> int:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smallest", action="store_true", help="whether it runs, and no more")
    parser.add_argument("--run", nargs=2, metavar=("CASE", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = dict(CASES)
    if options.smallest:
        cases = {"even": Case(2, 2, 4, 4, 0.001)}
    if options.run:
        name, kind = options.run
        print(json.dumps(run(cases[name], kind)))
        return 0
    print(describe_machine())
    print(f"{options.rounds} rounds\n")
    print("| case | " + " | ".join(KINDS) + " |\n|---|" + "---|" * len(KINDS))
    for name in cases if options.smallest else options.cases.split(","):
        figures: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for round_ in range(1 if options.smallest else options.rounds):
            for kind in in_turn(KINDS, round_):
                arguments = [*(["--smallest"] if options.smallest else []), "--run", name, kind]
                found = run_anew(__file__, arguments, _RUN_LIMIT_S)
                figures[kind].append(found)
                print(f"round {round_ + 1} {name} {kind}: {_figure(name, cases[name], found)}",
                      file=sys.stderr)  # fmt: skip
        medians = [
            {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            for runs in figures.values()
        ]
        cells = (_figure(name, cases[name], median) for median in medians)
        print(f"| {name} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
