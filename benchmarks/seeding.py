"""What does ``seed=`` cost a sample?

First by stream: what it takes to set each of them, and what it would take otherwise. Then on the
whole: one epoch over a dataset that does nothing, without a seed and with one, in this process and
in one worker, in CPU time of both. There the difference is what a seed costs each sample; n workers
on n cores share it. Each run is a fresh process; the kinds take turns within a round, and a round's
difference compares runs that lie next to each other in time. The consumer looks at every batch, and
a checksum shows that it saw all samples.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
import timeit
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch
from _fresh import run_anew
from _machine import describe_machine
from _spread import with_spread
from _workloads import Nothing

import shmloader

_RUN_LIMIT_S = 180.0
_BATCH_SIZE = 256
_DIGEST = bytes(range(64))
_WIDE = int.from_bytes(_DIGEST[1:17], "little")
_WORD = int.from_bytes(_DIGEST[1:5], "little")
_LONG = int.from_bytes(_DIGEST[1:9], "little")

# What is timed, and whether it is what seed= does.
PARTS: dict[str, tuple[str, Callable[[], object]]] = {
    "digest": (
        "yes",
        lambda: hashlib.blake2b(b"%d,%d,%d,%d,%d" % (0, 1, 2, 3, 4), digest_size=64).digest(),
    ),
    "random.seed, 128 bits": ("yes", lambda: random.seed(_WIDE)),
    "numpy.random.seed, 32 bits": ("yes", lambda: np.random.seed(_WORD)),
    "numpy.random.seed, 4 words": (
        "no",
        lambda: np.random.seed(np.frombuffer(_DIGEST, "<u4", 4)),
    ),
    "torch.default_generator.manual_seed": (
        "yes",
        lambda: torch.default_generator.manual_seed(_LONG),
    ),
    "torch.manual_seed": ("no", lambda: torch.manual_seed(_LONG)),
    "a Philox generator": (
        "if asked for",
        lambda: np.random.Generator(np.random.Philox(key=_WIDE)),
    ),
}

LOADERS = {
    "plain, in-process": {},
    "seed=0, in-process": {"seed": 0},
    "plain, 1 worker": {"num_workers": 1, "multiprocessing_context": "fork"},
    "seed=0, 1 worker": {"num_workers": 1, "multiprocessing_context": "fork", "seed": 0},
}


def run_parts(times: int) -> dict[str, float]:
    """Measure what setting each stream takes; µs."""
    return {
        name: min(timeit.repeat(call, number=times, repeat=5)) / times * 1e6
        for name, (_, call) in PARTS.items()
    }


def _cpu_s() -> float:
    """CPU time of this process and its workers."""
    workers = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in workers)


def run_loader(name: str, length: int) -> dict[str, float]:
    """Measure an epoch after a first one; µs a sample, of CPU time."""
    options = LOADERS[name]
    dataset = Nothing(length)
    with shmloader.DataLoader(
        dataset, _BATCH_SIZE, persistent_workers="num_workers" in options, **options
    ) as loader:
        for _ in range(2):
            began_s = _cpu_s()
            total = sum(int(batch.sum()) for batch in loader)
            spent_s = _cpu_s() - began_s
            if total != length * (length - 1) // 2:
                raise RuntimeError("the loader gave other samples")
        return {name: spent_s / length * 1e6}


def _measure(arguments: Sequence[str]) -> dict[str, float]:
    return run_anew(__file__, arguments, _RUN_LIMIT_S)


def _take_turns(rounds: int, arguments: list[str]) -> dict[str, list[float]]:
    """What each part and each loader took in each round; µs."""
    figures: dict[str, list[float]] = {name: [] for name in (*PARTS, *LOADERS)}
    kinds = ["parts", *LOADERS]
    for round_ in range(rounds):
        turn = round_ % len(kinds)
        for kind in (*kinds[turn:], *kinds[:turn]):
            for name, figure in _measure([f"--run={kind}", *arguments]).items():
                figures[name].append(figure)
                print(f"round {round_ + 1} {name}: {figure:.2f} µs", file=sys.stderr)
    return figures


def main() -> None:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="whether it runs, and no more")
    parser.add_argument("--run", choices=["parts", *LOADERS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.samples = 1, 2 * _BATCH_SIZE
    if options.run == "parts":
        print(json.dumps(run_parts(options.samples // 50)))
        return
    if options.run:
        print(json.dumps(run_loader(options.run, options.samples)))
        return
    print(describe_machine())
    print(f"{options.samples:,} samples, batch {_BATCH_SIZE}, {options.rounds} rounds\n")
    figures = _take_turns(options.rounds, [f"--samples={options.samples}"])
    print("| to set | by seed= | µs |")
    print("|---|---|---|")
    for name, (is_used, _) in PARTS.items():
        print(f"| {name} | {is_used} | {with_spread(figures[name], '.2f')} |")
    print("\n| loader | CPU µs a sample | more than without a seed |")
    print("|---|---|---|")
    names = [*LOADERS]
    for plain, seeded in (names[:2], names[2:]):
        more = [own - other for own, other in zip(figures[seeded], figures[plain], strict=True)]
        print(f"| {plain} | {with_spread(figures[plain], '.2f')} | |")
        print(f"| {seeded} | {with_spread(figures[seeded], '.2f')} | {with_spread(more, '.2f')} |")


if __name__ == "__main__":
    main()
