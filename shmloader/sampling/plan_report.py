"""What an epoch of a :class:`~shmloader.sampling.TokenBatches` is like, before it is loaded."""

import time
from dataclasses import dataclass

import numpy as np

from shmloader.sampling.balancing import CostFunction, Costs
from shmloader.sampling.token_windows import EpochWindows, Packer


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Figures of one epoch. ``str()`` gives them in a line.

    Attributes:
        fill: Share of ``max_tokens`` that the samples of a batch take on average; with several
            measures, of the one that is fullest.
        padding: Share of the batches' tokens that is padding; 0.0 for packed batches.
        cost_ratio: Cost of the most expensive rank of a step over the mean of its ranks, on average
            over whole steps: 1.0 if ranks never wait for one another.
        plan_s: Seconds that the plan of the epoch took.
    """

    fill: float
    padding: float
    cost_ratio: float
    plan_s: float

    def __str__(self) -> str:
        return (
            f"fill {self.fill:.4f}, padding {self.padding:.4f}, cost max/mean over ranks "
            f"{self.cost_ratio:.4f}, planned in {self.plan_s:.3f} s"
        )


def measure(
    windows: EpochWindows, packer: Packer, cost: CostFunction, world_size: int
) -> PlanReport:
    """Plan all windows of an epoch and return its figures.

    Args:
        windows: The epoch's windows.
        packer: Makes their batches.
        cost: What to compare ranks by.
        world_size: Number of ranks.
    """
    budget = np.array(packer.budget)
    own, loaded = np.zeros(len(budget), np.int64), np.zeros(len(budget), np.int64)
    costs: list[Costs] = []
    plan_s = 0.0
    began_s = time.perf_counter()
    for window in windows:
        plan_s += time.perf_counter() - began_s
        own += window.lengths.sum(axis=0)
        loaded += packer.as_loaded(window).sum(axis=0)
        costs.append(packer.costs(window, cost))
        began_s = time.perf_counter()
    each = np.concatenate([np.zeros(0), *costs])
    return PlanReport(
        fill=float((own / (max(1, len(each)) * budget)).max()),
        padding=float((loaded - own).sum() / max(1, loaded.sum())),
        cost_ratio=_cost_ratio(each, world_size),
        plan_s=plan_s,
    )


def _cost_ratio(costs: Costs, world_size: int) -> float:
    """Return the mean of max/mean over whole steps; of the only step if there is no whole one."""
    whole = len(costs) // world_size * world_size
    steps = costs[:whole].reshape(-1, world_size) if whole else costs[None]
    if not steps.size:
        return 1.0
    means = steps.mean(axis=1)
    ratios = np.divide(steps.max(axis=1), means, out=np.ones(len(steps)), where=means > 0)
    return float(ratios.mean())
