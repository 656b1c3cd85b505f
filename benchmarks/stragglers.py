"""How near is an epoch to the ideal time when 1 % of samples are 50 times slower?

Samples sleep, so that any machine can run eight workers: for 1 ms, or for 50 ms if the index has a
certain hash. The slow samples are the same for all loaders. A sleep ends some 0.1 ms late, and the
next one of the batch is shortened by as much. On a busy machine it ends later; then let samples
take longer (``--sample-ms``). The ideal is the sum of all sleeps divided by the number of workers.
Three loaders take turns within a round, each run in a fresh process, with equal prefetch: torch's
``DataLoader``; ours, where the number of a batch decides its worker (*round robin*, torch's rule);
and ours with ``seed=0``, where an idle worker takes the oldest batch (*idle takes oldest*). All
give batches in the sampler's order, and their content is compared. A histogram shows the times that
``next()`` took.

How near an epoch in order can come to the ideal depends on the window, too: while a slow batch is
made, the other workers can make the rest of the ``workers * prefetch`` batches, and no more.

Exit code: 0; 1 if two loaders gave different content; 2 if a run failed.
No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _fresh import in_turn, try_anew
from _machine import describe_machine
from _spread import with_spread

import shmloader

LOADERS = ("torch", "round robin", "idle takes oldest")

_SLOW_FACTOR = 50
_SLOW_ONE_IN = 100
_RUN_LIMIT_S = 300.0

# A sleep ends at most so late. After a longer gap, a sample belongs to another batch.
_LATEST_S = 0.5e-3

# The histogram's rows: each ends at twice the one before.
_FIRST_BIN_MS = 0.125
_BIN_COUNT = 14
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run measured.

    Attributes:
        epoch_s: Time from ``iter(loader)`` to the end, with workers that have started before.
        ideal_s: Sum of all sleeps divided by the workers, or the consumer's sleeps if longer.
        waits_ms: Time that each ``next()`` took.
        content: Digest of all batches.
    """

    epoch_s: float
    ideal_s: float
    waits_ms: list[float]
    content: str


def is_slow(index: int) -> bool:
    """Whether a sample is one of the slow ones."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _SLOW_ONE_IN == 0


def weight(index: int) -> int:
    """Return how long a sample takes, as a multiple of a quick one; 0 for negative indices."""
    if index < 0:
        return 0
    return _SLOW_FACTOR if is_slow(index) else 1


def sample_count(options: argparse.Namespace) -> int:
    """Return the number of samples of an epoch, of all workers together."""
    return options.batches * options.workers * options.batch_size


class Sleepers(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that sleep."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.length = sample_count(options)
        self.sample_s = options.sample_ms / 1e3
        self._due: dict[int, float] = {}  # by thread

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        now, thread = time.perf_counter(), threading.get_ident()
        last = self._due.get(thread, 0.0)
        due = (last if now - last < _LATEST_S else now) + self.sample_s * weight(index)
        self._due[thread] = due
        time.sleep(max(0.0, due - now))
        return torch.full((16,), index, dtype=torch.int64)


class Order(torch.utils.data.Sampler[int]):
    """First an epoch of some batches for each worker that take no time, then whole epochs."""

    def __init__(self, options: argparse.Namespace, batches: int = 1) -> None:
        self._first: int | None = batches * options.workers * options.batch_size
        self._length = sample_count(options)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        first, self._first = self._first, None
        return iter(range(self._length)) if first is None else itertools.repeat(-1, first)


def make_loader(name: str, options: argparse.Namespace) -> Any:
    """Make one of the three loaders."""
    is_torch = name == "torch"
    loader_type: Any = torch.utils.data.DataLoader if is_torch else shmloader.DataLoader
    return loader_type(
        **({"seed": 0} if name == "idle takes oldest" else {}),
        dataset=Sleepers(options),
        batch_size=options.batch_size,
        sampler=Order(options),
        persistent_workers=True,
        num_workers=options.workers,
        prefetch_factor=options.prefetch,
        multiprocessing_context="fork",
    )


def run_loader(name: str, options: argparse.Namespace) -> Figures:
    """Measure one epoch in this process, after one that starts the workers."""
    loader = make_loader(name, options)
    for _ in loader:
        pass
    return take_epoch(lambda: iter(loader), options)


def take_epoch(open_epoch: Callable[[], Iterator[torch.Tensor]], options: Any) -> Figures:
    """Take one epoch of all samples in order; training takes ``train_ms`` for each batch."""
    content, waits_ms = hashlib.blake2b(digest_size=16), []
    began = time.perf_counter()
    batches = open_epoch()
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waits_ms.append((time.perf_counter() - asked) * 1e3)
        if batch is None:
            break
        content.update(batch.numpy())
        if options.train_ms:
            time.sleep(options.train_ms / 1e3)
    epoch_s = time.perf_counter() - began
    work_s = options.sample_ms / 1e3 * sum(map(weight, range(sample_count(options))))
    training_s = options.train_ms / 1e3 * options.batches * options.workers
    ideal_s = max(work_s / options.workers, training_s)
    return Figures(epoch_s, ideal_s, waits_ms[:-1], content.hexdigest())


def measure(name: str, workers: int, options: argparse.Namespace) -> Figures | str:
    """Do one run in a fresh process; returns what went wrong, if anything did."""
    arguments = [
        f"--run={name}",
        f"--workers={workers}",
        f"--batches={options.batches}",
        f"--batch-size={options.batch_size}",
        f"--prefetch={options.prefetch}",
        f"--train-ms={options.train_ms}",
        f"--sample-ms={options.sample_ms}",
    ]
    found = try_anew(__file__, arguments, _RUN_LIMIT_S)
    return found if isinstance(found, str) else Figures(**found)


def draw(waits_ms: Sequence[float]) -> list[str]:
    """Return the lines of a histogram of waits, in bins that double."""
    edges = [_FIRST_BIN_MS * 2**number for number in range(_BIN_COUNT)]
    counts = [0] * (_BIN_COUNT + 1)
    for wait_ms in waits_ms:
        counts[sum(wait_ms >= edge for edge in edges)] += 1
    last = max(number for number, count in enumerate(counts) if count)
    lines = []
    for number, count in enumerate(counts[: last + 1]):
        name = f"< {edges[number]:g} ms" if number < _BIN_COUNT else f">= {edges[-1]:g} ms"
        bar = "#" * -(-count * _BAR_WIDTH // max(counts))
        lines.append(f"{name:>12} {count:6} {bar}".rstrip())
    return lines


def compare(options: argparse.Namespace) -> int:
    """Measure all, print, and return the exit code."""
    runs: dict[tuple[int, str], list[Figures]] = {}
    errors = []
    for round_ in range(options.rounds):
        for workers in options.worker_counts:
            for name in in_turn(LOADERS, round_):
                figures = measure(name, workers, options)
                if isinstance(figures, str):
                    errors.append(f"ERROR {workers} workers, {name}: {figures}")
                    continue
                runs.setdefault((workers, name), []).append(figures)
                print(
                    f"round {round_ + 1}, {workers} workers, {name}: "
                    f"{figures.epoch_s / figures.ideal_s:.3f} of the ideal",
                    file=sys.stderr,
                    flush=True,
                )
    print("| workers | loader | epoch s | to the ideal | mean wait ms | longest ms |")
    print("|---|---|---|---|---|---|")
    for (workers, name), chosen in runs.items():
        waits = [statistics.mean(one.waits_ms) for one in chosen]
        cells = (
            with_spread([one.epoch_s for one in chosen], ".2f"),
            with_spread([one.epoch_s / one.ideal_s for one in chosen], ".3f"),
            with_spread(waits, ".1f"),
            with_spread([max(one.waits_ms) for one in chosen], ".0f"),
        )
        print(f"| {workers} | {name} | {' | '.join(cells)} |")
    for (workers, name), chosen in runs.items():
        print(f"\nwaits in next(), {workers} workers, {name}, all rounds")
        print("\n".join(draw([wait_ms for one in chosen for wait_ms in one.waits_ms])))
    contents: dict[int, set[str]] = {}
    for (workers, _), chosen in runs.items():
        contents.setdefault(workers, set()).update(one.content for one in chosen)
    is_same = all(len(found) == 1 for found in contents.values())
    print(f"\ncontent: {'the same' if is_same else 'DIFFERENT'} for all loaders")
    for error in dict.fromkeys(errors):
        print(error)
    if errors:
        return 2
    return 0 if is_same else 1


def main() -> int:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=50, help="in an epoch, for each worker")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--prefetch", type=int, default=2, help="prefetch_factor, of all loaders")
    parser.add_argument("--sample-ms", type=float, default=1.0, help="sleep of most samples")
    parser.add_argument("--train-ms", type=float, default=0.0, help="sleep of the consumer")
    parser.add_argument("--worker-counts", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.batches, options.batch_size = 1, 2, 4
    if options.run:
        print(json.dumps(asdict(run_loader(options.run, options))))
        return 0
    for name, value in describe_machine().items():
        print(f"{name}: {value}")
    print(
        f"options: {options.batches} batches of {options.batch_size} a worker, samples of "
        f"{options.sample_ms:g} ms, prefetch_factor {options.prefetch}, "
        f"consumer {options.train_ms:g} ms a batch, {options.rounds} rounds\n",
        flush=True,
    )
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
