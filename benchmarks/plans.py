"""How full and how balanced are batches of a token budget, and how long does the plan take?

Lengths are log-normal (median 300, sigma 1), cut at the budget of 16,384 tokens. The first table
has ways to make batches of the same 1,000,000 samples: the share of the budget that samples take,
padding, and the cost of the most expensive rank of a step over the mean of its ranks, where a
sequence of L tokens costs ``a * L + L**2`` with a = 6 * 4096. "torch" is what torch's samplers
make: batches of as many samples as fit the budget on average, in random order, then padded.

The second table has the time to plan: to the first batch, from the lengths on; all batches, drawn
as lists, which is the most that resuming takes; and ``len()`` alone. Times are CPU time of the one
thread that plans, which other programs hardly change.

Every run is recorded at once, and a campaign that was interrupted continues where it was. A full
campaign takes some minutes, and writes the section of ``RESULTS.md``.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from _campaign import Campaign, Cells
from _record import Run, values_of
from _sections import judge, write_table
from _spread import with_spread_if_any

from shmloader.sampling import TokenBatches
from shmloader.sampling.balancing import attention

BUDGET = 16_384
WINDOW = 10_000
WORLD_SIZES = (8, 64)

WAYS: dict[str, dict[str, Any] | None] = {
    "packed, balanced by attention": {"balance": "attention"},
    "packed, balanced by tokens": {"balance": "tokens"},
    "packed, random order": {},
    "padded, balanced by attention": {"layout": "padded", "balance": "attention"},
    "padded, random order": {"layout": "padded"},
    "torch: as many samples each, padded": None,
}
# Cases of times: the samples that are planned.
SIZES = {"1,000,000": 1_000_000, "10,000,000": 10_000_000}
_SMALLEST = 20_000

# For each figure of the times: its title, a factor, how it is written.
TIMES = {
    "first_s": ("first batch, ms", 1e3, ".1f"),
    "all_s": ("all batches, s", 1, ".2f"),
    "len_s": ("len(), s", 1, ".2f"),
}


def make_lengths(count: int) -> npt.NDArray[np.int64]:
    """Return the lengths of the samples."""
    lengths = np.random.default_rng(7).lognormal(np.log(300), 1.0, count)
    return np.clip(lengths, 1, BUDGET).astype(np.int64)


def measure_way(way: str, count: int) -> dict[str, float]:
    """Return fill, padding, and the ratio of costs for each world size."""
    lengths, options = make_lengths(count), WAYS[way]
    if options is None:
        return _measure_torch(lengths)
    plan = TokenBatches(lengths, BUDGET, window=WINDOW, **options)
    reports = {size: plan.report(size, cost="attention") for size in WORLD_SIZES}
    ratios = {f"ratio_{size}": report.cost_ratio for size, report in reports.items()}
    return {"fill": reports[8].fill, "padding": reports[8].padding, **ratios}


def _measure_torch(lengths: npt.NDArray[np.int64]) -> dict[str, float]:
    size = int(BUDGET / lengths.mean())
    order = np.random.default_rng(0).permutation(len(lengths))
    batches = lengths[order[: len(order) // size * size]].reshape(-1, size)
    padded = np.repeat(batches.max(axis=1), size)
    costs = attention(padded[:, None]).reshape(-1, size).sum(axis=1)
    figures = {"padding": 1 - float(batches.sum() / padded.sum())}
    for world_size in WORLD_SIZES:
        steps = costs[: len(costs) // world_size * world_size].reshape(-1, world_size)
        figures[f"ratio_{world_size}"] = float((steps.max(axis=1) / steps.mean(axis=1)).mean())
    return figures


def measure_times(count: int) -> dict[str, float]:
    """Return how long the plan of so many samples takes, in seconds."""
    lengths = make_lengths(count)

    def make(count: int | None = None) -> TokenBatches:
        return TokenBatches(lengths[:count], BUDGET, window=WINDOW, balance="attention")

    next(iter(make(WINDOW)))  # everything is imported
    began_s = time.thread_time()
    next(iter(make()))
    first_s = time.thread_time() - began_s
    began_s = time.thread_time()
    batch_count = sum(1 for _ in make())
    all_s = time.thread_time() - began_s
    counted = make()
    began_s = time.thread_time()
    if len(counted) != batch_count:
        raise RuntimeError("len() is not the number of batches")
    len_s = time.thread_time() - began_s
    return {"first_s": first_s, "all_s": all_s, "len_s": len_s}


# ---------------------------------------------------------------- the section


def report(runs: Sequence[Run], machine: Mapping[str, str], is_smallest: bool) -> list[str]:
    """Return the lines of the section of RESULTS.md."""
    size = f"{_SMALLEST if is_smallest else SIZES['1,000,000']:,}"
    heading = ["batches", "fill", "padding", *(f"max/mean, {each} ranks" for each in WORLD_SIZES)]
    times = ["samples", *(title for title, _, _ in TIMES.values())]
    return [
        "## Batches of a token budget",
        "",
        "Made by `benchmarks/plans.py`, which says what each figure is.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        f"{size} samples in windows of {WINDOW:,}, budget {BUDGET:,} tokens:",
        "",
        *write_table(heading, [_way(runs, way) for way in WAYS]),
        "",
        "CPU time of the plan:",
        "",
        *write_table(times, [_times(runs, name) for name in SIZES]),
        "",
        *write_table(["figure", "goal", ""], _goals(runs)),
    ]


def _way(runs: Sequence[Run], way: str) -> list[str]:
    names = ("fill", "padding", *(f"ratio_{size}" for size in WORLD_SIZES))
    found = [values_of(runs, "batches", way, name) for name in names]
    return [way, *(with_spread_if_any(values, ".4f") if values else "" for values in found)]


def _times(runs: Sequence[Run], case: str) -> list[str]:
    cells = [case]
    for name, (_, factor, spec) in TIMES.items():
        values = [value * factor for value in values_of(runs, case, "plan", name)]
        cells.append(with_spread_if_any(values, spec) if values else "not run")
    return cells


def _goals(runs: Sequence[Run]) -> list[list[str]]:
    best = "packed, balanced by attention"
    goals = (
        ("fill", values_of(runs, "batches", best, "fill"), 0.99, False),
        ("max/mean, 8 ranks", values_of(runs, "batches", best, "ratio_8"), 1.02, True),
        ("1,000,000 samples, s", values_of(runs, "1,000,000", "plan", "all_s"), 1, True),
        ("10,000,000 samples, s", values_of(runs, "10,000,000", "plan", "all_s"), 10, True),
        ("first batch of these, s", values_of(runs, "10,000,000", "plan", "first_s"), 0.05, True),
    )
    return [
        [f"{name}: {statistics.median(values):.3g}", *judge(values, wanted, is_most=is_most)]
        for name, values, wanted, is_most in goals
        if values
    ]


def _run(name: str, kind: str, round_: int, is_smallest: bool) -> Cells:  # noqa: ARG001
    if name == "batches":
        figures = measure_way(kind, _SMALLEST if is_smallest else SIZES["1,000,000"])
    else:
        figures = measure_times(_SMALLEST if is_smallest else SIZES[name])
    return [(name, kind, figures)]


def main() -> int:
    """Measure, or do one run."""
    kinds = {"batches": tuple(WAYS), **dict.fromkeys(SIZES, ("plan",))}
    campaign = Campaign(
        file=__file__,
        about=str(__doc__).partition("\n")[0],
        kinds=kinds,
        smallest={"batches": tuple(WAYS)[::2], "1,000,000": ("plan",)},
        rounds=5,
        limit_s=300.0,
        run=_run,
        report=report,
    )
    return campaign.main()


if __name__ == "__main__":
    raise SystemExit(main())
