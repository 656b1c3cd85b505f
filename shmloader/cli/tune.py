"""``shmloader tune``: finds the best ``num_workers`` and ``prefetch_factor``.

First it searches by hill climbing: it goes from a first guess to a faster neighbour until there is
none. Each setting is measured once, as long as its speed is uncertain and it may still be the best.
``num_workers=0`` is always among them. Settings that would not fit the memory are not tried.

Then the best few settings and ``num_workers=0`` are compared: they take turns for some rounds, so
that they see the same states of the machine. A setting is preferred to one that takes less only if
it wins by more than the rounds differ. Otherwise the cheaper one is recommended.

Workers persist over epochs, so their start does not count.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shmloader.cli.measure import Progress, Run
from shmloader.cli.report.picture import new_figure
from shmloader.cli.target import find, like, make_loader, takes_settings
from shmloader.insight.snapshot import LoaderStats
from shmloader.insight.text import size
from shmloader.memory.limits import control_groups, free_memory
from shmloader.pools.cores import usable_cores

_ROOT = Path("/")
# How much faster a setting with more workers, or more memory, has to be.
_GAIN = 1.03
# The largest standard error of a speed that is known well enough, as a share of the speed.
_ERROR = 0.015
# A speed is hopeless if it is this number of standard errors below the best one.
_HOPELESS = 3.0
# A speed is computed from spans of time of at least this length.
_SPAN_S = 0.1
_MIN_SPANS = 4
_MAX_PREFETCH = 16
# torch's default, and that of the first setting.
_PREFETCH = 2
# A setting takes part in the comparison if its speed is a larger share than this of the best one.
_NEAR = 0.9
# Longest measurement of a setting in a round, in seconds.
_ROUND_S = 1.0
# The share of the free memory that a setting may be expected to take.
_MEMORY_SHARE = 0.8


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


# No setting takes less. Nothing is loaded ahead, so it has no prefetch_factor.
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

    ``IN_PROCESS`` is measured once as well, but is neither a neighbour nor the best.

    Args:
        first: The setting to begin with, which has workers.
        measure: Measures a setting. Gets the setting, and the best speed so far.
        may_try: Returns whether a setting is within the limits.
    """
    known = {first: measure(first, None)}
    best = first
    yield best, known[best]
    # The climb leaves it out: from a top at 0 it would not see that two workers do better than one.
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
    """Whether a setting is better than another. A smaller one need not be faster."""
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
        known: What was measured.
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
        ratios: For each round, how many times as fast it was.
    """

    setting: Setting
    cheaper: Setting
    ratios: Sequence[float]

    @property
    def gain(self) -> float:
        """How many times as fast it was, by the median."""
        return statistics.median(self.ratios)

    @property
    def won(self) -> int:
        """In how many rounds it was faster."""
        return sum(ratio > 1 for ratio in self.ratios)

    @property
    def is_faster(self) -> bool:
        """Whether it is faster by more than the rounds differ."""
        spread = max(self.ratios) - min(self.ratios)
        return self.won == len(self.ratios) and self.gain - 1 > max(spread, _GAIN - 1)

    @property
    def outcome(self) -> str:
        """Whether it is faster or slower, or neither for certain."""
        if self.is_faster:
            return "faster"
        return "slower" if max(self.ratios) < 1 else "not certain to be faster"

    def __str__(self) -> str:
        """Return it in words."""
        low, high = min(self.ratios), max(self.ratios)
        return (
            f"{self.setting} was {self.gain:.2f} times as fast ({low:.2f}–{high:.2f}) as "
            f"{self.cheaper}, and won {self.won} of {len(self.ratios)} rounds"
        )


def decide(rates: Mapping[Setting, Sequence[float]]) -> tuple[Setting, list[Comparison]]:
    """Choose a setting: the cheapest, or one that is faster by more than the rounds differ.

    Args:
        rates: For each setting the batches per second of each round.

    Returns:
        The setting, and the comparisons that led to it. Each setting is compared with the cheapest
        one that no cheaper setting than itself has beaten.
    """
    cheapest, *others = sorted(rates)
    comparisons = []
    for setting in others:
        ratios = [one / other for one, other in zip(rates[setting], rates[cheapest], strict=True)]
        comparisons.append(Comparison(setting, cheapest, ratios))
        if comparisons[-1].is_faster:
            cheapest = setting
    return cheapest, comparisons


def tune(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or the plot cannot be drawn.
        KeyboardInterrupt: After a Ctrl-C, when the best setting so far is printed.
    """
    plot = None if options.plot is None else _plotter(options.plot)
    make = find(options.target)
    tuner = _Tuner(make, options)
    best: Setting | None = None
    rates: dict[Setting, list[float]] = {}
    interrupted = None
    try:
        with Progress("tune", None, "settings") as progress:
            for best, speed in climb(tuner.first(), tuner.measure, tuner.may_try):
                progress.step(f"best: {best}, {speed.rate:,.1f} batches/s")
        assert best is not None
        rates = {setting: [] for setting in finalists(tuner.known, best)}
        with Progress("compare", options.rounds, "rounds") as progress:
            for number in range(options.rounds):
                tuner.add_round(rates, number)
                progress.step()
    except KeyboardInterrupt as error:
        interrupted = error
        so_far = "measured so far:" if tuner.known else "nothing was measured yet"
        print(f"interrupted; {so_far}")
    tuner.print_all()
    if best is not None:
        chosen = _print_decision(rates) if interrupted is None else _print_best(best)
        if plot is not None:
            plot(tuner.known, chosen)
    if interrupted is not None:
        raise interrupted


def _print_best(best: Setting) -> Setting:
    """Print the best setting by the search alone, and return it."""
    print(f"\nbest of what was measured once, without a comparison:\n\nDataLoader(..., {best})")
    return best


def _print_decision(rates: Mapping[Setting, Sequence[float]]) -> Setting:
    """Print the comparison and the recommended setting, and return that.

    Args:
        rates: See :func:`decide`.
    """
    chosen, comparisons = decide(rates)
    count = len(rates[chosen])
    print(f"\ncompared in {count} rounds in turns; batches/s, median (range), higher is better:")
    for setting, each in rates.items():
        median = f"{statistics.median(each):,.1f} ({min(each):,.1f}–{max(each):,.1f})"
        print(f"  {setting!s:<36}{median:>32}")
    for comparison in comparisons:
        print(f"  {comparison}: {comparison.outcome}")
    if any(comparison.is_faster for comparison in comparisons):
        print("\nbest: faster than each cheaper setting by more than the rounds differ:")
    else:
        print("\nno setting is faster by more than the rounds differ; the cheapest one:")
    print(f"\nDataLoader(..., {chosen})")
    return chosen


class _Tuner:
    """Makes a loader for each setting, and measures it."""

    def __init__(self, make: Callable[..., Any], options: argparse.Namespace) -> None:
        self._make, self._name = make, options.target
        self._step_s = options.step_ms / 1e3
        self._max_s = options.seconds
        self._cores = usable_cores(_ROOT)
        free = free_memory(_ROOT, control_groups(_ROOT))
        self._free_bytes = math.inf if free is None else free.nbytes * _MEMORY_SHARE
        self._takes_settings = takes_settings(make)
        self._given: Any = None
        self.known: dict[Setting, Speed] = {}
        if not self._takes_settings:
            self._given = make_loader(make, self._name)
            like(self._given)  # if this is not possible, fail at once

    def first(self) -> Setting:
        """Return the first setting: half of the cores, since training needs some."""
        return Setting(max(1, self._cores // 2), _PREFETCH)

    def may_try(self, setting: Setting) -> bool:
        """Whether there are enough cores and memory for a setting."""
        if setting.num_workers > self._cores:
            return False
        largest = max(self.known.items(), key=lambda item: item[1].nbytes, default=None)
        if largest is None or largest[0].num_workers == 0:
            return True
        each = largest[1].nbytes / largest[0].num_workers / (1 + largest[0].prefetch_factor)
        expected = each * setting.num_workers * (1 + setting.prefetch_factor)
        return expected <= self._free_bytes

    def measure(self, setting: Setting, best: Speed | None) -> Speed:
        """Measure a setting as long as needed."""
        speed = self.known[setting] = self._measure(setting, _Spans(self._max_s, best))
        return speed

    def add_round(self, rates: Mapping[Setting, list[float]], number: int) -> None:
        """Measure each setting once more; which of them comes first changes from round to round."""
        turn = number % len(rates)
        settings = list(rates)
        speeds = {
            setting: self._measure(setting, _Spans(min(self._max_s, _ROUND_S), None))
            for setting in (*settings[turn:], *settings[:turn])
        }
        for setting, speed in speeds.items():
            rates[setting].append(speed.rate)

    def _measure(self, setting: Setting, spans: "_Spans") -> Speed:
        if self._takes_settings:
            loader = make_loader(self._make, self._name, **setting.arguments())
        else:
            is_persistent = {"persistent_workers": True} if setting.num_workers else {}
            loader = like(self._given, **setting.arguments(), **is_persistent)
        with Run(loader, self._step_s) as run:
            # The batches of the first window were loaded while the workers started.
            skipped = setting.num_workers * setting.prefetch_factor
            batches = run.batches()
            until_s = time.monotonic() + self._max_s
            for _ in itertools.islice(batches, skipped):
                if time.monotonic() > until_s:
                    break
            for elapsed_s in batches:
                if spans.note(elapsed_s):
                    break
            return spans.speed(_memory_of(run.stats()))

    def print_all(self) -> None:
        """Print what the search has measured."""
        if self.known:
            print("searched; batches/s of one measurement ± its standard error:")
        for setting, speed in sorted(self.known.items()):
            memory = f", {size(speed.nbytes)}" if speed.nbytes else ""
            print(f"  {setting!s:<36}{speed.rate:>10,.1f} ± {speed.error:,.1f}{memory}")


def _memory_of(stats: LoaderStats) -> int:
    return stats.slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)


class _Spans:
    """Computes the speed of a loader from spans of time.

    Args:
        max_s: Longest measurement in seconds.
        best: The best speed so far.
    """

    def __init__(self, max_s: float, best: Speed | None) -> None:
        self._max_s = max_s
        self._best = best
        self._rates: list[float] = []
        self._elapsed_s = self._span_s = 0.0
        self._batches = self._in_span = 0

    def note(self, elapsed_s: float) -> bool:
        """Note the seconds that a batch took. Returns whether the measurement is over."""
        self._elapsed_s += elapsed_s
        self._span_s += elapsed_s
        self._in_span += 1
        self._batches += 1
        if self._span_s >= _SPAN_S:
            self._rates.append(self._in_span / self._span_s)
            self._span_s, self._in_span = 0.0, 0
        if self._elapsed_s >= self._max_s:
            return True
        if len(self._rates) < _MIN_SPANS:
            return False
        speed = self.speed()
        if speed.error < _ERROR * speed.rate:
            return True
        best = self._best
        if best is None:
            return False
        return best.rate - speed.rate > _HOPELESS * math.hypot(best.error, speed.error)

    def speed(self, nbytes: int = 0) -> Speed:
        """Return the speed so far."""
        rates = self._rates
        rate = self._batches / self._elapsed_s if self._elapsed_s else 0.0
        error = rate
        if len(rates) > 1:
            error = statistics.stdev(rates) / math.sqrt(len(rates))
        return Speed(rate, error, self._batches, nbytes)


def _plotter(path: Path) -> Callable[[dict[Setting, Speed], Setting], None]:
    """Return a function that draws the speeds.

    Called before anything is measured, so that errors come at once.

    Raises:
        UsageError: If it cannot be drawn, or not be written there.
    """
    figure = new_figure("--plot", path, figsize=(7, 4.2), dpi=150, layout="constrained")

    def plot(known: dict[Setting, Speed], best: Setting) -> None:
        axes = figure.add_subplot()
        for prefetch in sorted({setting.prefetch_factor for setting in known}):
            curve = sorted(item for item in known.items() if item[0].prefetch_factor == prefetch)
            axes.errorbar(
                [setting.num_workers for setting, _ in curve],
                [speed.rate for _, speed in curve],
                [speed.error for _, speed in curve],
                marker="o",
                capsize=3,
                label=f"prefetch_factor={prefetch}" if prefetch else str(IN_PROCESS),
            )
        axes.plot(
            best.num_workers,
            known[best].rate,
            "o",
            ms=14,
            mfc="none",
            mec="black",
            label=f"recommended: {best}",
        )
        axes.set(xlabel="num_workers", ylabel="batches/s", title="shmloader tune")
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)
        print(f"\nplot: {path}")

    return plot
