"""What an epoch of a :class:`~shmloader.sampling.TokenBatches` is like, before it is loaded."""

import time
from dataclasses import dataclass

import numpy as np

from shmloader.sampling.balancing import CostFunction, Costs
from shmloader.sampling.token_windows import EpochWindows, Packer


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Figures of one epoch. ``str()`` gives them as a small table.

    Attributes:
        sample_count: Samples in the epoch; pieces, if samples are split.
        dropped_count: Samples that are left out as too long.
        batch_count: Batches of all ranks.
        world_size: Number of ranks.
        step_count: Steps of each rank, the last of which may have divided or repeated batches.
        fill: Share of ``max_tokens`` that the samples of a batch take on average; with several
            measures, of the one that is fullest.
        padding: Share of the batches' tokens that is padding; 0.0 for packed batches.
        cost_ratio: Cost of the most expensive rank of a step over the mean of its ranks, on average
            over whole steps: 1.0 if ranks never wait for one another.
        worst_cost_ratio: The largest of these.
        plan_s: Seconds that the plan of the epoch took.
    """

    sample_count: int
    dropped_count: int
    batch_count: int
    world_size: int
    step_count: int
    fill: float
    padding: float
    cost_ratio: float
    worst_cost_ratio: float
    plan_s: float

    def __str__(self) -> str:
        dropped = f", {self.dropped_count:,} left out" if self.dropped_count else ""
        return (
            f"samples   {self.sample_count:,}{dropped}\n"
            f"batches   {self.batch_count:,}\n"
            f"steps     {self.step_count:,} of {self.world_size} ranks\n"
            f"fill      {self.fill:.4f} of max_tokens\n"
            f"padding   {self.padding:.4f} of tokens\n"
            f"cost      max/mean over ranks {self.cost_ratio:.4f}, "
            f"worst {self.worst_cost_ratio:.4f}\n"
            f"planned   in {self.plan_s:.3f} s"
        )


def measure(
    windows: EpochWindows,
    packer: Packer,
    cost: CostFunction,
    world_size: int,
    dropped_count: int,
) -> PlanReport:
    """Plan all windows of an epoch and return its figures.

    Args:
        windows: The epoch's windows.
        packer: Makes their batches.
        cost: What to compare ranks by.
        world_size: Number of ranks.
        dropped_count: Samples that are left out.
    """
    budget = np.array(packer.budget)
    own, loaded = np.zeros(len(budget), np.int64), np.zeros(len(budget), np.int64)
    costs: list[Costs] = []
    sample_count, plan_s = 0, 0.0
    for number in range(windows.window_count):
        began_s = time.perf_counter()
        window = windows.window(number)
        plan_s += time.perf_counter() - began_s
        sample_count += len(window.numbers)
        own += window.lengths.sum(axis=0)
        loaded += packer.as_loaded(window).sum(axis=0)
        costs.append(packer.costs(window, cost))
    each = np.concatenate([np.zeros(0), *costs])
    ratios = _ratios(each, world_size)
    return PlanReport(
        sample_count=sample_count,
        dropped_count=dropped_count,
        batch_count=len(each),
        world_size=world_size,
        step_count=-(-len(each) // world_size),
        fill=float((own / (max(1, len(each)) * budget)).max()),
        padding=1 - float(own.sum()) / max(1, int(loaded.sum())) if sample_count else 0.0,
        cost_ratio=float(ratios.mean()),
        worst_cost_ratio=float(ratios.max()),
        plan_s=plan_s,
    )


def _ratios(costs: Costs, world_size: int) -> Costs:
    """Return max/mean of each whole step; of the only step if there is no whole one."""
    whole = len(costs) // world_size * world_size
    steps = costs[:whole].reshape(-1, world_size) if whole else costs[None]
    if not steps.size:
        return np.ones(1)
    means = steps.mean(axis=1)
    ratios: Costs = np.divide(steps.max(axis=1), means, out=np.ones(len(steps)), where=means > 0)
    return ratios
