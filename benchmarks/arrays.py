"""How fast is a loader over data that is an array already?

The data is a ``TensorDataset`` of rows and labels, shuffled and in order, with the default collate.
The loaders are torch's, ours with processes, ours with threads, and ours without workers. The
ceiling is as many processes as there are workers, which do nothing but ``index_select`` into a
resident buffer, with indices that were drawn before. Each run is a fresh process and times whole
epochs, from ``iter()`` to the last batch, after a first epoch that does not count. Kinds take turns
within a round, and ratios are of one round. CPU time is that of all processes. It says more than
the clock if other programs use the machine.

``--memory-map`` measures instead how much memory a memory-mapped file of so many bytes takes in
each worker.

Exit code: 0; 2 if a run failed; 3 if the loaders' batches differ. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from _fresh import in_turn, run_anew
from _machine import describe_machine
from _measure import run_processes
from _spread import with_spread

import shmloader

_RUN_LIMIT_S = 600.0
_BATCH_SIZE = 1_024
_WIDTH = 32
_HASHED = 20
_CEILING_S = 0.3
_CEILING_STRIDE = 8
LOADERS = {
    "torch": torch.utils.data.DataLoader,
    "shmloader": shmloader.DataLoader,
    "shmloader, threads": functools.partial(shmloader.DataLoader, thread_pool=True),
    "shmloader, no workers": shmloader.DataLoader,
}
KINDS = [
    *(f"{name}, {order}" for order in ("shuffled", "in order") for name in LOADERS),
    "ceiling, shuffled",
]


def make_dataset(samples: int) -> torch.utils.data.TensorDataset:
    """Make rows and labels, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(samples, _WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(rows, torch.arange(samples))


def _cpu_s() -> float:
    workers = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in workers)


def run_loader(kind: str, samples: int, epochs: int, workers: int) -> dict[str, Any]:
    """Time some epochs of a loader, in µs a batch."""
    name, _, order = kind.rpartition(", ")
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
    if name == "shmloader, no workers":
        options = {}
    elif name != "shmloader, threads":
        options["multiprocessing_context"] = "fork"
    make_loader = LOADERS[name]
    loader = make_loader(make_dataset(samples), _BATCH_SIZE, order == "shuffled", **options)
    content = hashlib.blake2b(digest_size=8)
    for number, batch in enumerate(loader):
        if number < _HASHED or number == len(loader) - 1:
            for tensor in batch:
                content.update(tensor.numpy().tobytes())
    expected = samples * (samples - 1) // 2
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    for _ in range(epochs):
        total = 0
        for rows, labels in loader:
            total += int(labels.sum())
            rows[::16, 0].sum()  # touches every page
        if total != expected:
            raise RuntimeError("the loader gave other samples")
    batches = epochs * len(loader)
    return {
        "wall_us": (time.perf_counter() - began_s) / batches * 1e6,
        "cpu_us": (_cpu_s() - cpu_s) / batches * 1e6,
        "content": content.hexdigest(),
    }


def gatherer(dataset: torch.utils.data.TensorDataset) -> Callable[[int], object]:
    """Return what the ceiling does for one batch: gather rows into a buffer that stays."""
    order = torch.randperm(len(dataset))
    indices = [one for one in order.split(_BATCH_SIZE) if len(one) == _BATCH_SIZE]
    out = [
        torch.empty((_BATCH_SIZE, *rows.shape[1:]), dtype=rows.dtype) for rows in dataset.tensors
    ]

    def gather(number: int) -> None:
        for rows, place in zip(dataset.tensors, out, strict=True):
            torch.index_select(rows, 0, indices[number % len(indices)], out=place)

    return gather


def run_ceiling(samples: int, workers: int) -> dict[str, Any]:
    """Time processes that only gather, in µs a batch, for all of them together."""
    found = run_processes(
        lambda: gatherer(make_dataset(samples)), workers, _CEILING_S, _CEILING_STRIDE
    )
    return {
        "wall_us": found["elapsed_s"] / found["batches"] * 1e6,
        "cpu_us": found["workers_cpu_s"] / found["batches"] * 1e6,
        "content": "",
    }


def run_memory_map(nbytes: int, method: str, workers: int) -> dict[str, Any]:
    """Load a memory-mapped file, shuffled; return the most memory that is a worker's own."""
    row = 512
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        count = nbytes // (4 * row)
        with path.open("wb") as file:
            for start in range(0, count, 4_096):
                stop = min(count, start + 4_096)
                block = np.arange(start, stop, dtype=np.float32)[:, None]
                file.write(np.broadcast_to(block, (stop - start, row)).tobytes())
            # A page that waits to be written to disk would count as the reader's.
            file.flush()
            os.fsync(file.fileno())
        rows = np.memmap(path, np.float32, "r", shape=(count, row))
        loader = shmloader.DataLoader(
            rows, _BATCH_SIZE, shuffle=True, num_workers=workers, multiprocessing_context=method
        )
        with loader:
            batches, total, most = iter(loader), 0.0, 0
            children = psutil.Process().children()
            first = 0
            for number, batch in enumerate(batches):
                total += float(batch[:, 0].double().sum())
                first = first or max(map(_own_bytes, children))
                if number % 100 == 99 or number == len(loader) - 2:
                    most = max(most, *map(_own_bytes, children))
        if total != float(np.arange(count, dtype=np.float32).astype(np.float64).sum()):
            raise RuntimeError("the loader gave other samples")
    return {"own_mb": most / 1e6, "first_mb": first / 1e6}


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory that a process wrote. The kernel may drop a file's other pages."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = {line.split()[0]: int(line.split()[1]) << 10 for line in lines}
    return fields["Private_Dirty:"]


def _compare(options: argparse.Namespace) -> int:
    kinds = [kind for kind in KINDS if not options.smallest or kind.endswith("shuffled")]
    figures: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    common = [f"--samples={options.samples}", f"--workers={options.workers}"]
    for round_ in range(options.rounds):
        for kind in in_turn(kinds, round_):
            epochs = 1 if kind.startswith("torch") else options.epochs
            found: Any = run_anew(
                __file__, [f"--run={kind}", f"--epochs={epochs}", *common], _RUN_LIMIT_S
            )
            figures[kind].append(found)
            print(f"round {round_ + 1} {kind}: {found}", file=sys.stderr)
    print("| loader | µs a batch | of CPU time | speed to torch | by CPU time | to the ceiling |")
    print("|---|---|---|---|---|---|")
    for kind, runs in figures.items():
        order = kind.rpartition(", ")[2]
        cells = [with_spread([run[unit] for run in runs], ",.0f") for unit in ("wall_us", "cpu_us")]
        for other, units in ((f"torch, {order}", ("wall_us", "cpu_us")), (KINDS[-1], ("wall_us",))):
            for unit in units:
                ratios = [
                    peer[unit] / run[unit] for peer, run in zip(figures[other], runs, strict=True)
                ]
                is_asked = other != kind and order in other
                cells.append(with_spread(ratios, ",.2f") if is_asked else "")
        print(f"| {kind} | {' | '.join(cells)} |")
    for order in ("shuffled", "in order"):
        hashes = {run["content"] for name in LOADERS for run in figures.get(f"{name}, {order}", ())}
        print(f"content hash, {order}: {' and '.join(sorted(hashes))}")
        if len(hashes) > 1:
            return 3
    return 0


def main() -> int:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3, help="of our loaders; torch's runs one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-map", type=int, metavar="BYTES", help="size, such as 2000000000")
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.epochs, options.samples = 1, 1, 10 * _BATCH_SIZE
    if options.run in {"fork", "spawn"}:
        found = run_memory_map(options.memory_map, options.run, options.workers)
    elif options.run == "ceiling, shuffled":
        found = run_ceiling(options.samples, options.workers)
    elif options.run:
        found = run_loader(options.run, options.samples, options.epochs, options.workers)
    else:
        print(describe_machine())
        if options.memory_map:
            for method in ("fork", "spawn"):
                arguments = [f"--run={method}", f"--memory-map={options.memory_map}"]
                run: Any = run_anew(__file__, arguments, _RUN_LIMIT_S)
                print(f"{options.memory_map / 1e9:.1f} GB mapped, {method}: "
                      f"{run['own_mb']:.0f} MB of a worker's own at most, "
                    f"{run['first_mb']:.0f} MB after the first batch")  # fmt: skip
            return 0
        print(f"{options.samples:,} × {_WIDTH} float32 and labels, batch {_BATCH_SIZE:,}, "
              f"{options.workers} workers, {options.rounds} rounds\n")  # fmt: skip
        return _compare(options)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
