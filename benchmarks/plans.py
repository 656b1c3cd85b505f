"""How full and how balanced are batches of a token budget, and how long does the plan take?

Lengths are log-normal (median 300, sigma 1), cut at the budget of 16,384 tokens. The first table
has ways to make batches of the same samples: the share of the budget that samples take, padding,
and the cost of the most expensive rank of a step over the mean of its ranks, where a sequence of L
tokens costs ``a * L + L**2`` with a = 6 * 4096. "torch" is batches of as many samples as fit the
budget on average, in random order and padded, as its samplers make them. The second table has the
time to plan more samples: to the first batch, from the lengths on; of all batches, which are drawn;
of ``len()`` alone; and to go on from the midst of an epoch. Times are CPU time of the one thread
that plans, which other programs hardly change.

Each run is a fresh process. The tables have the median of the rounds with the least and the most.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from _fresh import run_anew
from _machine import describe_machine
from _spread import with_spread

from shmloader.sampling import TokenBatches
from shmloader.sampling.balancing import attention

_RUN_LIMIT_S = 300.0
BUDGET = 16_384
WINDOW = 10_000
WORLD_SIZES = (8, 64)

WAYS: dict[str, dict[str, Any]] = {
    "packed, balanced by attention": {"balance": "attention"},
    "packed, balanced by tokens": {"balance": "tokens"},
    "packed, random order": {},
    "padded, balanced by attention": {"layout": "padded", "balance": "attention"},
    "padded, random order": {"layout": "padded"},
}


def make_lengths(count: int) -> npt.NDArray[np.int64]:
    """Return the lengths of the samples."""
    lengths = np.random.default_rng(7).lognormal(np.log(300), 1.0, count)
    return np.clip(lengths, 1, BUDGET).astype(np.int64)


def measure_torch(lengths: npt.NDArray[np.int64]) -> list[Any]:
    """Return fill, padding and the ratios of costs of torch's random batches, padded."""
    size = int(BUDGET / lengths.mean())
    order = np.random.default_rng(0).permutation(len(lengths))
    batches = lengths[order[: len(order) // size * size]].reshape(-1, size)
    padded = np.repeat(batches.max(axis=1), size).reshape(-1, 1)
    costs = attention(padded).reshape(-1, size).sum(axis=1)
    ratios = []
    for world_size in WORLD_SIZES:
        steps = costs[: len(costs) // world_size * world_size].reshape(-1, world_size)
        ratios.append(float((steps.max(axis=1) / steps.mean(axis=1)).mean()) if len(steps) else 1.0)
    return [1 - float(batches.sum() / padded.sum()), *ratios]


def run_ways(count: int) -> dict[str, list[Any]]:
    """Measure all ways once: fill, padding, and the ratio for each world size."""
    lengths = make_lengths(count)
    figures: dict[str, list[Any]] = {}
    for way, options in WAYS.items():
        plan = TokenBatches(lengths, BUDGET, window=WINDOW, **options)
        reports = [plan.report(each, cost="attention") for each in WORLD_SIZES]
        ratios = [report.cost_ratio for report in reports]
        figures[way] = [reports[0].fill, reports[0].padding, *ratios]
    figures["torch: batches of as many samples, padded"] = [None, *measure_torch(lengths)]
    return figures


def run_times(count: int) -> dict[str, float]:
    """Measure how long the plan of so many samples takes, in seconds."""
    lengths = make_lengths(count)
    np.add(lengths, 1)  # the pages are there

    def make() -> TokenBatches:
        return TokenBatches(lengths, BUDGET, window=WINDOW, balance="attention")

    figures: dict[str, float] = {}
    make_lengths(WINDOW)
    next(iter(TokenBatches(lengths[:WINDOW], BUDGET, balance="attention")))
    began_s = time.thread_time()
    next(iter(make()))
    figures["first"] = time.thread_time() - began_s
    began_s = time.thread_time()
    batch_count = sum(1 for _ in make())
    figures["all"] = time.thread_time() - began_s
    began_s = time.thread_time()
    counted = make()
    if len(counted) != batch_count:
        raise RuntimeError("len() is not the number of batches")
    figures["len"] = time.thread_time() - began_s
    place = counted.place(batch_count // 2)  # which saved states have
    began_s = time.thread_time()
    next(make().seek(batch_count // 2, place))
    figures["resume"] = time.thread_time() - began_s
    return figures


def main() -> None:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the first table")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=["ways", "times"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.samples, options.sizes = 1, 20_000, [20_000]
    if options.run == "ways":
        print(json.dumps(run_ways(options.samples)))
        return
    if options.run == "times":
        print(json.dumps(run_times(options.samples)))
        return
    print(describe_machine())
    print(f"{options.rounds} rounds\n")
    ways = run_anew(__file__, ["--run=ways", f"--samples={options.samples}"], _RUN_LIMIT_S)
    print(f"{options.samples:,} samples, budget {BUDGET:,} tokens, windows of {WINDOW:,}\n")
    print("| batches | fill | padding | max/mean cost, 8 ranks | 64 ranks |")
    print("|---|---|---|---|---|")
    for way, figures in ways.items():
        texts = ["–" if figure is None else f"{figure:.4f}" for figure in figures]
        print(f"| {way} | {' | '.join(texts)} |")
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in options.sizes}
    for _ in range(options.rounds):
        for size, found in runs.items():
            found.append(run_anew(__file__, ["--run=times", f"--samples={size}"], _RUN_LIMIT_S))
    print("\n| samples | first batch, ms | resume in the midst, ms | all batches, s | len(), s |")
    print("|---|---|---|---|---|")
    for size, found in runs.items():
        texts = [
            with_spread([one[name] * 1e3 for one in found], ".1f") for name in ("first", "resume")
        ]
        texts += [with_spread([one[name] for one in found], ".2f") for name in ("all", "len")]
        print(f"| {size:,} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()
