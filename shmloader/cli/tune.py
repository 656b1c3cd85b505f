"""``shmloader tune``: finds the best ``num_workers`` and ``prefetch_factor``.

First it searches by hill climbing: it goes from a first guess to a better neighbour until there is
none. Each setting is measured once, for as long as its speed is uncertain and may still be the
best. ``num_workers=0`` is always measured. Settings that need too many cores or too much memory are
not tried.

Then the best few settings and ``num_workers=0`` are compared: they take turns for some rounds, so
that they see the same states of the machine. A setting is preferred to a cheaper one only if it
wins by more than the rounds differ. Otherwise the cheaper one is recommended.

Workers persist over epochs, so their start does not count. Where the user's function makes the
loader of each setting, that function decides whether workers persist.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmloader.cli.climb import IN_PROCESS, Setting, Speed, climb, decide, finalists
from shmloader.cli.measure import Progress, Run
from shmloader.cli.report.picture import new_figure
from shmloader.cli.target import find, like, make_loader, takes_settings
from shmloader.insight.snapshot import LoaderStats
from shmloader.insight.text import size
from shmloader.memory.limits import control_groups, free_memory
from shmloader.pools.cores import usable_cores

_ROOT = Path("/")
# The largest standard error of a speed that is known well enough, as a share of the speed.
_ERROR = 0.015
# A speed is hopeless if it is this number of standard errors below the best one.
_HOPELESS = 3.0
# The error of a speed is computed from the speeds in spans of time of at least this length.
_SPAN_S = 0.1
_MIN_SPANS = 4
# The prefetch_factor of the first setting, which is torch's default.
_PREFETCH = 2
# Longest measurement of a setting in a round, in seconds.
_ROUND_S = 1.0
# The share of the free memory that a setting may be expected to take.
_MEMORY_SHARE = 0.8


def tune(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or the plot cannot be drawn.
        KeyboardInterrupt: After a Ctrl-C. The best setting so far is printed before.
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
    print(f"\nbest in the search, which has measured each setting once:\n\nDataLoader(..., {best})")
    return best


def _print_decision(rates: Mapping[Setting, Sequence[float]]) -> Setting:
    """Print the comparison and the recommended setting, and return that.

    Args:
        rates: For each setting, the batches per second of each round.
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
        """Return the first setting: workers for half of the cores, since training needs some."""
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
        """Measure a setting for as long as needed, and note its speed."""
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
    """Computes the speed of a loader, and from spans of time the error of that speed.

    Args:
        max_s: Longest measurement in seconds.
        best: The best speed so far; None if there is none to compare with.
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
        UsageError: If matplotlib is not installed, or no picture can be written to ``path``.
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
