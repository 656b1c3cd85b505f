"""What does ``seed=`` cost, for each kind of dataset?

The first table has the time that it takes to seed, save and restore the process's generators. The
second one has whole epochs without a seed and with one, for each kind of dataset, in this process
and in two workers: CPU time of all processes together, in µs a batch. The kinds differ in what may
draw random numbers: nothing (tensors and arrays that are gathered, a list, numbers), code that does
not draw, or code that does.

Each run is a fresh process in which the loaders take turns, an epoch at a time. The least time of
each loader is taken, which is its cost when no other process wants the core. A round runs all
kinds, and the tables have the median of the rounds with the least and the most. The consumer looks
at every batch, and all loaders must deliver the same samples.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from _fresh import run_anew
from _machine import describe_machine
from _spread import with_spread
from torch.utils.data import Dataset, TensorDataset

import shmloader
from shmloader.sampling.rng import kept

_RUN_LIMIT_S = 180.0
_DIGEST = bytes(range(64))
_WIDE = int.from_bytes(_DIGEST[1:17], "little")
_WORD = int.from_bytes(_DIGEST[1:5], "little")
_LONG = int.from_bytes(_DIGEST[1:9], "little")
_IMAGE = (3, 32, 32)


def _save_and_restore() -> None:
    with kept():
        pass


PARTS: dict[str, Callable[[], object]] = {
    "a sample: the digest": lambda: hashlib.blake2b(b"0,1,2,3,4", digest_size=64).digest(),
    "a sample: random": lambda: random.seed(_WIDE),
    "a sample: numpy.random": lambda: np.random.seed(_WORD),
    "a sample: torch": lambda: torch.default_generator.manual_seed(_LONG),
    "a batch in this process: save and restore all": _save_and_restore,
    "for comparison: torch.manual_seed": lambda: torch.manual_seed(_LONG),
    "for comparison: numpy.random.get_state": np.random.get_state,
}


class Made(Dataset[Any]):
    """A dataset of pairs: the sample's number, and the value of a function."""

    def __init__(self, make: Callable[[], object], length: int) -> None:
        self._make = make
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, object]:
        if index >= self._length:
            raise IndexError(index)
        return index, self._make()


def _transform() -> torch.Tensor:
    """Augment an image as torchvision's transforms do: six draws from torch's generator."""
    image = torch.ones(_IMAGE)
    if torch.rand(1).item() < 0.5:
        image = image.flip(-1)
    top, left = (int(torch.randint(0, 5, (1,)).item()) for _ in range(2))
    image = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
    low, high = (float(torch.empty(1).uniform_(0.8, 1.2)) for _ in range(2))
    return (image * low).clamp_(0, 1) * high + float(torch.rand(1))


def make_dataset(kind: str, length: int) -> Any:
    """Return a dataset of a kind whose samples begin with their numbers."""
    numbers = torch.arange(length)
    match kind:
        case "TensorDataset":
            return TensorDataset(numbers, torch.zeros(length, 32))
        case "numpy array":
            return numbers.numpy()
        case "list of tensors":
            return list(numbers)
        case "list of ints":
            return numbers.tolist()
    return Made(CODE[kind], length)


CODE: dict[str, Callable[[], object]] = {
    "code, no draws": lambda: 1,
    "code, random.random()": random.random,
    "code, numpy.random.rand()": np.random.rand,
    "code, torch.rand(())": lambda: torch.rand(()),
    "code, six draws on an image": _transform,
}
KINDS = ["TensorDataset", "numpy array", "list of tensors", "list of ints", *CODE]


def run_parts(times: int) -> dict[str, float]:
    """Measure how long each of ``PARTS`` takes, in µs."""
    return {
        name: min(timeit.repeat(call, number=times, repeat=20)) / times * 1e6
        for name, call in PARTS.items()
    }


def _cpu_s() -> float:
    """Return the CPU time of this process and its workers."""
    workers = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in workers)


def _epoch_us(loader: Any, length: int, cpu_s: Callable[[], float]) -> float:
    began_s, total, batches = cpu_s(), 0, 0
    for batch in loader:
        total += int((batch[0] if isinstance(batch, list) else batch).sum())
        batches += 1
    spent_s = cpu_s() - began_s
    if total != length * (length - 1) // 2:
        raise RuntimeError("the loader delivered other samples")
    return spent_s / batches * 1e6


def run_kind(kind: str, workers: int, batch_size: int, batches: int) -> dict[str, float]:
    """Measure the epochs of one kind without a seed and with one, in µs a batch."""
    length = batch_size * batches
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    # The CPU time of workers is known in steps of 10 ms, so their epochs must be longer.
    epochs, cpu_s = 30, time.process_time
    if workers:
        options |= {"persistent_workers": True, "multiprocessing_context": "fork"}
        epochs, cpu_s = 6, _cpu_s
    figures: dict[str, list[float]] = {"plain": [], "seeded": []}
    with (
        shmloader.DataLoader(make_dataset(kind, length), **options) as plain,
        shmloader.DataLoader(make_dataset(kind, length), seed=0, **options) as seeded,
    ):
        for _ in range(epochs):
            figures["plain"].append(_epoch_us(plain, length, cpu_s))
            figures["seeded"].append(_epoch_us(seeded, length, cpu_s))
    return {name: min(values[1:]) for name, values in figures.items()}


def _measure(arguments: Sequence[str]) -> dict[str, float]:
    return run_anew(__file__, arguments, _RUN_LIMIT_S)


def main() -> None:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=100, help="in an epoch; x20 with workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=["parts", *KINDS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.batches, options.batch_size = 1, 2, 4
    if options.run == "parts":
        print(json.dumps(run_parts(100)))
        return
    if options.run:
        (workers,) = options.workers
        print(json.dumps(run_kind(options.run, workers, options.batch_size, options.batches)))
        return
    print(describe_machine())
    print(f"batches of {options.batch_size}, {options.rounds} rounds\n")
    parts: list[dict[str, float]] = []
    some = KINDS[::4] if options.smallest else KINDS
    kinds = [(kind, workers) for workers in options.workers for kind in some]
    figures: dict[tuple[str, int], list[dict[str, float]]] = {each: [] for each in kinds}
    for _ in range(options.rounds):
        parts.append(_measure(["--run=parts"]))
        for kind, workers in kinds:
            batches = options.batches * (20 if workers and not options.smallest else 1)
            sizes = [f"--batch-size={options.batch_size}", f"--batches={batches}"]
            figures[kind, workers].append(
                _measure([f"--run={kind}", f"--workers={workers}", *sizes])
            )
    print("| to seed | µs |")
    print("|---|---|")
    for name in PARTS:
        print(f"| {name} | {with_spread([part[name] for part in parts], '.2f')} |")
    print("\n| dataset | workers | µs a batch | with seed= | ratio | more, µs a sample |")
    print("|---|---|---|---|---|---|")
    for (kind, workers), runs in figures.items():
        more = [(run["seeded"] - run["plain"]) / options.batch_size for run in runs]
        columns = [
            with_spread([run["plain"] for run in runs], ".1f"),
            with_spread([run["seeded"] for run in runs], ".1f"),
            with_spread([run["seeded"] / run["plain"] for run in runs], ".2f"),
            with_spread(more, ".2f"),
        ]
        print(f"| {kind} | {workers} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
