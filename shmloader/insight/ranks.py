"""The statistics of all ranks: which rank waited for data, and whether the others waited for it.

Ranks that train together meet in each step. A rank that waits longer for its data comes later, and
the others then wait for it in the step, where no loader sees it. So the rank with the longest wait
for data is the one that the others wait for, if it stands out.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from shmloader.grammar import counted, seconds
from shmloader.insight.stats import LoaderStats
from shmloader.insight.verdict import IDLE_SHARE


@dataclass(frozen=True, slots=True)
class RankStats:
    """The statistics of all ranks, in the order of their numbers. ``print`` shows a table.

    Attributes:
        ranks: The statistics of each rank's loader.
    """

    ranks: tuple[LoaderStats, ...]

    @property
    def waited_most(self) -> int:
        """The rank that waited longest for data; of several, the first."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].wait.total_s)

    @property
    def slowest(self) -> int | None:
        """The rank that the others waited for, as its data came late; None if none stands out.

        It waited longer than the rank in the middle by more than 5 % of the time. This holds for
        ranks that compute equally fast and meet in each step, as in data-parallel training.
        """
        rank, middle_s = self.waited_most, self._middle_s
        ours = self.ranks[rank]
        stands_out = ours.wait.total_s - middle_s > IDLE_SHARE * ours.elapsed_s
        return rank if stands_out else None

    @property
    def _middle_s(self) -> float:
        return statistics.median_low(each.wait.total_s for each in self.ranks)

    @property
    def verdict(self) -> str:
        """Which rank the others waited for, and what limits its loader."""
        rank = self.waited_most
        ours, least_s = self.ranks[rank], min(one.wait.total_s for one in self.ranks)
        longest = f"{seconds(ours.wait.total_s)} (rank {rank})"
        text = f"No rank held up the others: they waited {seconds(least_s)} to {longest} for data."
        if self.slowest is not None:
            text = f"The others waited for rank {rank}, which waited {longest[:-1]} for data, "
            text += f"and the rank in the middle {seconds(self._middle_s)}."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the properties, and a list of the ranks' statistics, for ``json.dumps``."""
        return {
            "waited_most": self.waited_most,
            "slowest": self.slowest,
            "verdict": self.verdict,
            "ranks": [each.to_dict() for each in self.ranks],
        }

    def __str__(self) -> str:
        """Return a table of the ranks, and the verdict."""
        lines = [f"shmloader: {counted(len(self.ranks), 'rank')}", ""]
        lines += [f"  {'rank':<6}{'batches':>9}{'waited':>10}{'share':>7}  limited by"]
        for rank, one in enumerate(self.ranks):
            wait = one.wait
            row = f"{rank:<6}{one.batches:>9,}{seconds(wait.total_s):>10}{wait.share:>7.0%}"
            lines.append(f"  {row}  {one.finding.value}")
        return "\n".join([*lines, "", self.verdict])
