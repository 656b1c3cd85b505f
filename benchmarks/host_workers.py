"""What does one pool of workers for all ranks of a host save, beside workers of each rank?

Each case runs the same epochs on ranks with workers of their own (``own``), with as many workers in
one pool (``host``: ``worker_scope="host"``), and with torch's loader and ``DistributedSampler``
(``torch``). Each run has fresh processes, and the kinds take turns. Samples only sleep, so the
machine's cores do not decide, except in the rows on memory and on the main process.

=========  =======================================================================================
even       4 ranks, 4 workers in all, samples of 2 ms: samples a second of all ranks
uneven     half as many, but those of rank 0 take 5 times as long: seconds until all ranks end
memory     4 ranks with 4 workers each, which share 4 in the pool: processes and their PSS, with the
           one that owns the pool
main2      2 ranks, 2 workers in all, one int a batch: CPU time of a rank's process for a batch
main4      the same with 4 ranks and 4 workers
many       8 ranks, 64 workers in all, samples of 80 ms: samples a second, to the ideal
most       8 ranks, 512 workers in all, samples of 320 ms: the same, for the pool alone
=========  =======================================================================================

Ranks are spawned, and have torchrun's variables, but no process group: a loader uses none.

The rows on the main process are measured as row A of ``peers.py`` is, whose loader has no seed and
so neither streams of random numbers for each sample nor dynamic dispatch: ``unseeded`` is
``DataLoader`` as it is there, with a rank's share of the workers.

Every run is recorded at once, and a campaign that was interrupted goes on where it was. A full run
replaces its section of ``RESULTS.md``.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from _campaign import Campaign, Cells
from _record import Run, select
from _sections import judge, write_table
from _spread import with_spread_if_any
from _workloads import WORKLOADS, touch
from _workloads import Samples as Tiny
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

from shmloader import DataLoader, ShardedDataLoader

_RUN_LIMIT_S = 600.0
KINDS = ("torch", "own", "host")
UNSEEDED = "unseeded"


class Case(NamedTuple):
    """What is run.

    Attributes:
        ranks: How many there are.
        workers: The workers of the host.
        batches: Of each rank, in each of two epochs.
        batch_size: Samples in a batch.
        sample_s: How long a sample sleeps.
        slower: How many times as long for rank 0.
        own: Workers of each rank that has workers of its own, if not its share.
        is_tiny: Whether a batch is one int, from a plain order.
        is_alone: Whether only the pool is run.
    """

    ranks: int
    workers: int
    batches: int
    batch_size: int
    sample_s: float = 0.0
    slower: int = 1
    own: int | None = None
    is_tiny: bool = False
    is_alone: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.is_alone:
            return ("host",)
        return (*KINDS, UNSEEDED) if self.is_tiny else KINDS


CASES = {
    "even": Case(4, 4, 60, 16, 0.002),
    "uneven": Case(4, 4, 30, 16, 0.002, slower=5),
    "memory": Case(4, 4, 60, 16, 0.0, own=4),
    "main2": Case(2, 2, 5000, 1, is_tiny=True),
    "main4": Case(4, 4, 2500, 1, is_tiny=True),
    "many": Case(8, 64, 320, 4, 0.08),
    "most": Case(8, 512, 1024, 4, 0.32, is_alone=True),
}
SMALLEST = {
    "even": Case(2, 2, 4, 4, 0.001),
    "main2": Case(2, 2, 8, 1, is_tiny=True),
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
        "main_us": statistics.mean(one["main_us"] for one in found),
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
    # As in a rank that torchrun has started; a spawned process would spawn its workers, too.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    loader = _make(case, kind, rank)
    for batch in loader:
        if case.is_tiny:
            touch(batch)
    begins.wait(_RUN_LIMIT_S)
    began_s, before_s = time.monotonic(), time.process_time()
    for batch in loader:
        if case.is_tiny:
            touch(batch)
    used_s, ended_s = time.process_time() - before_s, time.monotonic()
    workers = _workers(run_id, loader)
    begins.wait(_RUN_LIMIT_S)
    queue.put(
        {
            "began_s": began_s,
            "ended_s": ended_s,
            "main_us": used_s / case.batches * 1e6,
            "workers": workers,
        }
    )


def _make(case: Case, kind: str, rank: int) -> Any:
    """Return a rank's loader."""
    own = case.own or max(1, case.workers // case.ranks)
    options: dict[str, Any] = {"num_workers": own, "persistent_workers": True}
    if kind == "host":
        options |= {"num_workers": case.workers, "worker_scope": "host"}
    share = case.batches * case.batch_size
    if case.is_tiny:
        tiny = Tiny(WORKLOADS["e"])
        if kind == UNSEEDED:
            return DataLoader(tiny.first(share), **options)
        dataset = tiny.first(share * case.ranks)
        if kind == "torch":
            order = DistributedSampler(dataset, case.ranks, rank, shuffle=False)
            return TorchLoader(dataset, sampler=order, **options)
        return ShardedDataLoader(dataset, **options)
    samples = Samples(share * case.ranks, case.sample_s, range(share), case.slower)
    if kind == "torch":
        return TorchLoader(samples, batch_sampler=_Own(Blocks(case), rank, case.ranks), **options)
    return ShardedDataLoader(samples, batch_sampler=Blocks(case), **options)


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


def _workers(run_id: str, loader: Any) -> dict[int, int]:
    """Return the proportional set sizes of all worker processes of a run, by process id.

    The process that owns the workers of a host is one of them.
    """
    found = {}
    pool = getattr(getattr(loader, "_parts", None), "host_pool", None)
    if pool is not None:
        owner = psutil.Process(pool.owner_pid)
        found[owner.pid] = int(owner.memory_full_info().pss)
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


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        case: The case.
        title: What the table calls the figure, with its unit.
        spec: How the figure is written.
        wanted: What the figure in one pool should be, or its ratio; None if nothing was asked.
        key: The figure of a run, before ``figure`` computes with it.
        is_ratio: Whether the ratio to workers of each rank is judged.
        is_most: Whether ``wanted`` is the most; else it is the least.
    """

    case: str
    title: str
    spec: str
    wanted: float | None
    key: str
    is_ratio: bool = True
    is_most: bool = True

    def figure(self, run: Mapping[str, float], case: Case) -> float:
        """What the row tells of a run."""
        samples = case.ranks * case.batches * case.batch_size
        value = run[self.key]
        if self.key == "worker_bytes":
            return value / 1e6
        if self.case == "even":
            return samples / value
        if self.case in {"many", "most"}:
            return samples * case.sample_s / case.workers / value
        return value


ROWS = (
    Row("uneven", "uneven: s", ".2f", 0.6, "elapsed_s"),
    Row("even", "even: samples/s", ",.0f", 0.97, "elapsed_s", is_most=False),
    Row("memory", "memory: processes", ".0f", None, "processes"),
    Row("memory", "memory: PSS of these, MB", ",.0f", 0.4, "worker_bytes"),
    Row("main2", "main2: µs of CPU a batch", ".0f", 35, "main_us", is_ratio=False),
    Row("main4", "main4: µs of CPU a batch", ".0f", 35, "main_us", is_ratio=False),
    Row("many", "many: of the ideal", ".3f", 0.95, "elapsed_s", is_ratio=False, is_most=False),
    Row("most", "most: of the ideal", ".3f", 0.95, "elapsed_s", is_ratio=False, is_most=False),
)


def _cells(runs: Sequence[Run], row: Row, case: Case) -> list[str]:
    """A row of the table: the figure of each kind, the ratio, the goal, the verdict."""
    figures = {
        kind: {
            run.round: row.figure(run.figures, case)
            for run in select(runs, row.case, kind)
            if run.figures
        }
        for kind in (*KINDS, UNSEEDED)
    }
    told = {kind: list(of_kind.values()) for kind, of_kind in figures.items()}
    cells = [
        with_spread_if_any(told[kind], row.spec) if told[kind] else ""
        for kind in ("host", "own", UNSEEDED, "torch")
    ]
    own, host = figures["own"], figures["host"]
    ratios = [host[round_] / own[round_] for round_ in host if round_ in own]
    ratio = with_spread_if_any(ratios, ".2f") if ratios else ""
    judged = ratios if row.is_ratio else told["host"]
    if row.wanted is None or not judged:
        return [row.title, *cells, ratio, "", "" if told["host"] else "not run"]
    goal, verdict = judge(judged, row.wanted, is_most=row.is_most)
    return [row.title, *cells, ratio, f"{goal}{' of own' if row.is_ratio else ''}", verdict]


def report(runs: Sequence[Run], machine: Mapping[str, str], is_smallest: bool) -> list[str]:
    """The section of RESULTS.md."""
    cases = SMALLEST if is_smallest else CASES
    rows = [_cells(runs, row, cases[row.case]) for row in ROWS if row.case in cases]
    short = [row[0].partition(":")[0] for row in rows if row[-1].startswith("**")]
    heading = ["what", "host", "own", UNSEEDED, "torch", "host to own", "goal", ""]
    return [
        "## One pool of workers for all ranks of a host",
        "",
        "Made by `make bench-host`; `benchmarks/host_workers.py` says what each row is.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        *write_table(heading, rows),
        "",
        f"Rows that fall short: {', '.join(short) if short else 'none'}.",
    ]


def _run(name: str, kind: str, round_: int, is_smallest: bool) -> Cells:  # noqa: ARG001
    return [(name, kind, run((SMALLEST if is_smallest else CASES)[name], kind))]


def main() -> int:
    """Compare, or do one run for a comparison."""
    campaign = Campaign(
        file=__file__,
        about=str(__doc__).partition("\n")[0],
        kinds={name: case.kinds for name, case in CASES.items()},
        smallest={name: case.kinds for name, case in SMALLEST.items()},
        rounds=3,
        limit_s=_RUN_LIMIT_S,
        run=_run,
        report=report,
    )
    return campaign.main()


if __name__ == "__main__":
    raise SystemExit(main())
