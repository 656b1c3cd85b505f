"""How the best setting is searched and chosen: the rules of ``shmloader tune``. Pure."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# By which factor a setting with more workers, or a larger prefetch_factor, has to be faster.
_GAIN = 1.03
_MAX_PREFETCH = 16
# A setting takes part in the comparison if its speed is a larger share than this of the best one.
_NEAR = 0.9


class Setting(NamedTuple):
    """The two arguments that are tuned. The smaller of two settings is the cheaper one."""

    num_workers: int
    prefetch_factor: int

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for a loader."""
        if self.num_workers == 0:
            return {"num_workers": 0, "prefetch_factor": None}
        return {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}

    def __str__(self) -> str:
        """Return the arguments as Python code."""
        if self.num_workers == 0:
            return "num_workers=0"
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}"


# The cheapest setting. Nothing is loaded ahead, so it has no prefetch_factor.
IN_PROCESS = Setting(0, 0)


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of a setting.

    Attributes:
        rate: Batches per second, in steady state.
        error: Standard error of the rate.
        batches: Number of batches that it was computed from.
        nbytes: Memory of its slots and workers in bytes; 0 if unknown.
    """

    rate: float
    error: float
    batches: int
    nbytes: int = 0


def climb(
    first: Setting,
    measure: Callable[[Setting, Speed | None], Speed],
    may_try: Callable[[Setting], bool],
) -> Iterator[tuple[Setting, Speed]]:
    """Go to a better neighbour until there is none. Yields the best so far after each measurement.

    ``IN_PROCESS`` is measured once as well, but is never a neighbour, and never yielded.

    Args:
        first: The setting to begin with. It has workers.
        measure: Measures a setting. Gets the setting, and the best speed so far.
        may_try: Returns whether a setting is within the limits.
    """
    known = {first: measure(first, None)}
    best = first
    yield best, known[best]
    # The climb leaves it out: if it is faster than one worker, the climb would stop there and
    # never try two workers.
    known[IN_PROCESS] = measure(IN_PROCESS, known[best])
    yield best, known[best]
    while True:
        here = best
        for near in _neighbours(here):
            if near in known or not may_try(near):
                continue
            known[near] = measure(near, known[best])
            if _is_better(near, best, known):
                best = near
            yield best, known[best]
        if best == here:
            return


def _is_better(one: Setting, other: Setting, known: dict[Setting, Speed]) -> bool:
    """Whether a setting is better than another. A cheaper one may even be a little slower."""
    gain = _GAIN if one > other else 1 / _GAIN
    return known[one].rate > known[other].rate * gain


def _neighbours(here: Setting) -> Iterator[Setting]:
    workers, prefetch = here
    for other in (workers + max(1, workers // 2), workers + 1, workers - 1):
        if other:
            yield Setting(other, prefetch)
    if prefetch * 2 <= _MAX_PREFETCH:
        yield Setting(workers, prefetch * 2)
    if prefetch > 1:
        yield Setting(workers, prefetch // 2)


def finalists(known: Mapping[Setting, Speed], best: Setting) -> list[Setting]:
    """Return the settings to compare, the cheapest first: at most four.

    Args:
        known: The measured speeds.
        best: The best setting by these measurements.
    """
    near = [one for one in known if known[one].rate > _NEAR * known[best].rate]
    fastest = max(known, key=lambda one: known[one].rate)
    return sorted({IN_PROCESS, min(near), best, fastest} & known.keys())


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a setting did against a cheaper one.

    Attributes:
        setting: The setting.
        cheaper: The cheaper one.
        ratios: For each round, how many times as fast as the cheaper one the setting was.
    """

    setting: Setting
    cheaper: Setting
    ratios: Sequence[float]

    @property
    def gain(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def won(self) -> int:
        """Number of rounds in which the setting was faster."""
        return sum(ratio > 1 for ratio in self.ratios)

    @property
    def is_faster(self) -> bool:
        """Whether the setting is faster by more than the rounds differ."""
        spread = max(self.ratios) - min(self.ratios)
        return self.won == len(self.ratios) and self.gain - 1 > max(spread, _GAIN - 1)

    @property
    def outcome(self) -> str:
        """In words, whether the setting is faster, slower, or not certain to be faster."""
        if self.is_faster:
            return "faster"
        return "slower" if max(self.ratios) < 1 else "not certain to be faster"

    def __str__(self) -> str:
        """Return the comparison in words."""
        low, high = min(self.ratios), max(self.ratios)
        return (
            f"{self.setting} was {self.gain:.2f} times as fast ({low:.2f}–{high:.2f}) as "
            f"{self.cheaper}, and won {self.won} of {len(self.ratios)} rounds"
        )


def decide(rates: Mapping[Setting, Sequence[float]]) -> tuple[Setting, list[Comparison]]:
    """Choose a setting: the cheapest, or one that is faster by more than the rounds differ.

    Args:
        rates: For each setting, the batches per second of each round.

    Returns:
        The setting, and the comparisons that led to it. The cheapest setting is chosen first. The
        others, in order of cost, are each compared with the chosen one, and replace it if they are
        faster.
    """
    cheapest, *others = sorted(rates)
    comparisons = []
    for setting in others:
        ratios = [one / other for one, other in zip(rates[setting], rates[cheapest], strict=True)]
        comparisons.append(Comparison(setting, cheapest, ratios))
        if comparisons[-1].is_faster:
            cheapest = setting
    return cheapest, comparisons
