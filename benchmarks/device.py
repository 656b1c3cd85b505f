"""How fast do batches arrive on a GPU, beside torch's pinned copy and a bare one?

Needs a CUDA device; without one it says so and ends. Three things take turns, each run in
a fresh process, on the same resident samples:

    * ``shmloader``: ``DataLoader(device="cuda")``;
    * ``torch``: ``DataLoader(pin_memory=True)`` and ``.to("cuda", non_blocking=True)``;
    * ``ceiling``: copies of one pinned buffer of the same size, and nothing else.

The consumer emulates a training step by a matrix product of chosen length and takes a
checksum of every batch on the GPU. The GPU's idle share is the time between one step's end and
the next one's start, by CUDA events. A hash over the checksums of the first batches must be the
same for both loaders.

Exit code: 0; 1 if the loaders gave different content; 2 if a run failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time

import psutil
import torch
from _machine import describe_machine
from torch.utils.data import Dataset

import shmloader

LOADERS = ("shmloader", "torch", "ceiling")
# name: shape of a sample, dtype, samples in a batch
WORKLOADS = {
    "uint8": ((3, 224, 224), torch.uint8, 256),
    "float32": ((3, 224, 224), torch.float32, 128),
}
_SAMPLES = 257  # prime: each batch begins at another sample
_WARMUP = 12
_HASHED = 8
_RUN_LIMIT_S = 300.0


class Resident(Dataset):
    """Samples that lie ready in memory, as often as they are asked for."""

    def __init__(self, shape, dtype, length):
        generator = torch.Generator().manual_seed(20_240_607)
        whole = torch.randint(0, 256, (_SAMPLES, *shape), dtype=torch.uint8, generator=generator)
        self.samples = list(whole.to(dtype))
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.samples[index % _SAMPLES]


class Step:
    """A training step: a matrix product that takes about so many milliseconds."""

    def __init__(self, step_ms):
        self.matrix = torch.rand(4096, 4096, device="cuda")
        self.repeats = 0
        self.starts, self.ends = [], []
        if step_ms > 0:
            for repeats in (5, 20):  # the first warms up
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(repeats):
                    self.matrix @ self.matrix
                end.record()
                end.synchronize()
            self.repeats = max(1, round(step_ms / (start.elapsed_time(end) / 20)))

    def __call__(self, batch):
        """Run it; returns the batch's checksum, on the GPU."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        checksum = batch.view(torch.uint8).sum(dtype=torch.int64)
        for _ in range(self.repeats):
            self.matrix @ self.matrix
        end.record()
        self.starts.append(start)
        self.ends.append(end)
        return checksum

    def idle_share(self):
        """Share of the time since the first step in which no step ran."""
        torch.cuda.synchronize()
        pairs = zip(self.ends, self.starts[1:], strict=False)
        idle = sum(max(0.0, end.elapsed_time(start)) for end, start in pairs)
        return idle / self.starts[0].elapsed_time(self.ends[-1])


def batches_of(loader, shape, dtype, batch_size, workers, count):
    """Batches on the GPU."""
    dataset = Resident(shape, dtype, count * batch_size)
    options = {"batch_size": batch_size, "num_workers": workers}
    if loader == "torch":
        for batch in torch.utils.data.DataLoader(dataset, pin_memory=True, **options):
            yield batch.to("cuda", non_blocking=True)
    elif loader == "shmloader":
        yield from shmloader.DataLoader(dataset, device="cuda", **options)
    else:
        pinned = torch.empty((batch_size, *shape), dtype=dtype).pin_memory()
        for _ in range(count):
            yield pinned.to("cuda", non_blocking=True)


def cpu_s():
    """CPU time of this process and of all its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(options):
    """One run, in this process; prints its figures as JSON."""
    shape, dtype, batch_size = WORKLOADS[options.workload]
    step = Step(options.step_ms)
    content, began, cpu_before = hashlib.blake2b(), 0.0, 0.0
    total = _WARMUP + options.batches
    batches = batches_of(options.run, shape, dtype, batch_size, options.workers, total)
    for count, batch in enumerate(batches, start=1):
        checksum = step(batch)
        if count <= _HASHED:
            content.update(str(int(checksum)).encode())
        if count == _WARMUP:
            torch.cuda.synchronize()
            step.starts.clear()
            step.ends.clear()
            began, cpu_before = time.perf_counter(), cpu_s()
        batch_bytes = batch.nbytes
        if count == total:  # before the workers end, whose time would be lost
            torch.cuda.synchronize()
            elapsed_s, used_cpu_s = time.perf_counter() - began, cpu_s() - cpu_before
    gigabytes = options.batches * batch_bytes / 1e9
    figures = {
        "batches/s": options.batches / elapsed_s,
        "GB/s": gigabytes / elapsed_s,
        "GPU idle": step.idle_share(),
        "CPU s/GB": used_cpu_s / gigabytes,
        "hash": content.hexdigest()[:16],
    }
    print(json.dumps(figures))


def run_once(options, workload, loader):
    """One run in a fresh process; its figures, or what went wrong."""
    command = [
        sys.executable, __file__, f"--run={loader}", f"--workload={workload}",
        f"--workers={options.workers}", f"--batches={options.batches}",
        f"--step-ms={options.step_ms}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_RUN_LIMIT_S, check=False
    )
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"exit code {done.returncode}: {last_line}"
    return json.loads(done.stdout.splitlines()[-1])


def compare(options):
    """All runs, interleaved, and the table; returns the exit code."""
    for name, value in {**describe_machine(), "GPU": torch.cuda.get_device_name()}.items():
        print(f"{name}: {value}")
    runs, code = {}, 0
    for round_ in range(options.rounds):
        for workload in WORKLOADS:
            for loader in LOADERS:
                figures = run_once(options, workload, loader)
                print(f"round {round_ + 1} ({workload}) {loader}: {figures}", file=sys.stderr)
                if isinstance(figures, str):
                    print(f"ERROR ({workload}) {loader}: {figures}")
                    code = 2
                else:
                    runs.setdefault((workload, loader), []).append(figures)
    columns = ("batches/s", "GB/s", "GPU idle", "CPU s/GB")
    print("| workload | loader |", " | ".join(columns), "|")
    print("|" + "---|" * (2 + len(columns)))
    for (workload, loader), figures in runs.items():
        cells = [statistics.median(one[column] for one in figures) for column in columns]
        print(f"| {workload} | {loader} |", " | ".join(f"{cell:.3g}" for cell in cells), "|")
    for workload in WORKLOADS:
        hashes = {one["hash"] for loader in LOADERS[:2] for one in runs.get((workload, loader), [])}
        print(f"content hash ({workload}): {' ≠ '.join(sorted(hashes))}")
        code = code or int(len(hashes) > 1)
    return code


def main():
    """Compare; or, started by ourselves, run once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=10.0, help="0: no step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        reason = "finds no GPU" if torch.backends.cuda.is_built() else "was built without CUDA"
        print(f"This benchmark needs a CUDA device, and torch {torch.__version__} {reason}.")
        return 0
    if options.run:
        measure(options)
        return 0
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
