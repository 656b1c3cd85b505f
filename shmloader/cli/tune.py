"""``shmloader tune``: find the best ``num_workers`` and ``prefetch_factor``, by climbing.

From a first guess to whichever neighbour is faster, until none is. A setting is measured for as
long as its speed is uncertain and it may still be the best; one that would not fit the memory is
not tried. Workers are kept over epochs, so their start does not count.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shmloader.cli.measure import Run
from shmloader.cli.progress import Progress
from shmloader.cli.target import UsageError, find, like, make_loader, takes_settings
from shmloader.insight.snapshot import LoaderStats
from shmloader.insight.text import size
from shmloader.memory.limits import control_groups, free_memory
from shmloader.pools.cores import usable_cores

_ROOT = Path("/")
# A setting has to be so much faster to be worth more workers, or more memory.
_GAIN = 1.03
# A speed is known well enough when its standard error is less than this share of it.
_ERROR = 0.015
# Standard errors between a speed and the best one that make it hopeless.
_HOPELESS = 3.0
# Spans of time that a speed is told from; each at least so long.
_SPAN_S = 0.1
_FEWEST_SPANS = 4
_PREFETCH_LIMIT = 16
# Of the free memory, what a setting may be expected to take.
_MEMORY_SHARE = 0.8


class Setting(NamedTuple):
    """What is tried."""

    num_workers: int
    prefetch_factor: int

    def arguments(self) -> dict[str, Any]:
        """As a loader takes them."""
        if self.num_workers == 0:
            return {"num_workers": 0, "prefetch_factor": None}
        return {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}

    def __str__(self) -> str:
        """As Python has it."""
        if self.num_workers == 0:
            return "num_workers=0"
        return f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}"


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of a setting.

    Attributes:
        rate: Batches a second, in steady state.
        error: Its standard error.
        batches: Batches that it was told from.
        nbytes: Memory that its slots and workers took; 0 if not known.
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
    """Go to the better neighbour until there is none; gives the best so far after each measurement.

    Args:
        first: Where to begin.
        measure: Measures a setting; told the best speed so far.
        may_try: Whether a setting is within the limits.
    """
    known = {first: measure(first, None)}
    best = first
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
    """Whether it is worth it: what takes less need not be faster."""
    gain = _GAIN if one > other else 1 / _GAIN
    return known[one].rate > known[other].rate * gain


def _neighbours(here: Setting) -> Iterator[Setting]:
    workers, prefetch = here
    for other in (workers + max(1, workers // 2), workers + 1, workers - 1):
        if other >= 0:
            yield Setting(other, prefetch)
    if workers:
        if prefetch * 2 <= _PREFETCH_LIMIT:
            yield Setting(workers, prefetch * 2)
        if prefetch > 1:
            yield Setting(workers, prefetch // 2)


def tune(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or the plot cannot be drawn.
        KeyboardInterrupt: After a Ctrl-C, and after the best setting so far.
    """
    plot = None if options.plot is None else _plotter(options.plot)
    make = find(options.target)
    tuner = _Tuner(make, options)
    found: tuple[Setting, Speed] | None = None
    interrupted = None
    try:
        with Progress("tune", None, "settings") as progress:
            for found in climb(tuner.first(), tuner.measure, tuner.may_try):
                progress.step(f"best: {found[0]}, {found[1].rate:,.1f} batches/s")
    except KeyboardInterrupt as error:
        interrupted = error
        so_far = "of what was measured so far:" if tuner.known else "nothing was measured yet"
        print(f"interrupted; {so_far}")
    tuner.print_all()
    if found is not None:
        print(f"\nbest: {found[1].rate:,.1f} batches/s with\n")
        print(f"DataLoader(..., {found[0]})")
        if plot is not None:
            plot(tuner.known, found[0])
    if interrupted is not None:
        raise interrupted


class _Tuner:
    """Makes a loader for each setting, and measures it."""

    def __init__(self, make: Callable[..., Any], options: argparse.Namespace) -> None:
        self._make, self._name = make, options.target
        self._step_s = options.step_ms / 1e3
        self._most_s = options.seconds
        self._cores = usable_cores(_ROOT)
        free = free_memory(_ROOT, control_groups(_ROOT))
        self._free_bytes = math.inf if free is None else free.nbytes * _MEMORY_SHARE
        self._takes_settings = takes_settings(make)
        self._given: Any = None
        self.known: dict[Setting, Speed] = {}
        if not self._takes_settings:
            self._given = make_loader(make, self._name)
            like(self._given)  # or say at once why not

    def first(self) -> Setting:
        """Half of the cores: the other half is for training."""
        return Setting(max(1, self._cores // 2), 2)

    def may_try(self, setting: Setting) -> bool:
        """Whether there are cores and memory for it."""
        if setting.num_workers > self._cores:
            return False
        most = max(self.known.items(), key=lambda item: item[1].nbytes, default=None)
        if most is None or most[0].num_workers == 0:
            return True
        each = most[1].nbytes / most[0].num_workers / (1 + most[0].prefetch_factor)
        expected = each * setting.num_workers * (1 + setting.prefetch_factor)
        return expected <= self._free_bytes

    def measure(self, setting: Setting, best: Speed | None) -> Speed:
        """Measure a setting for as long as needed."""
        if self._takes_settings:
            loader = make_loader(self._make, self._name, **setting.arguments())
        else:
            is_persistent = {"persistent_workers": True} if setting.num_workers else {}
            loader = like(self._given, **setting.arguments(), **is_persistent)
        with Run(loader, self._step_s) as run:
            spans = _Spans(self._most_s, best)
            # The first window is of batches that were loaded while the workers started.
            skipped = setting.num_workers * setting.prefetch_factor
            batches = run.batches()
            for _ in itertools.islice(_for_a_time(batches, self._most_s), skipped):
                pass
            for elapsed_s in batches:
                if spans.note(elapsed_s):
                    break
            speed = spans.speed(_memory_of(run.stats()))
        self.known[setting] = speed
        return speed

    def print_all(self) -> None:
        """Print what was measured."""
        for setting, speed in sorted(self.known.items()):
            memory = f", {size(speed.nbytes)}" if speed.nbytes else ""
            print(f"  {setting!s:<36}{speed.rate:>10,.1f} ± {speed.error:,.1f} batches/s{memory}")


def _for_a_time(batches: Iterator[float], limit_s: float) -> Iterator[float]:
    """Some of them; not for longer than this, but for the first."""
    until_s = time.monotonic() + limit_s
    for elapsed_s in batches:
        yield elapsed_s
        if time.monotonic() > until_s:
            return


def _memory_of(stats: LoaderStats) -> int:
    return stats.slots.nbytes + sum(worker.pss_bytes or 0 for worker in stats.workers)


class _Spans:
    """The speed of a loader, from one span of time to the next.

    Args:
        most_s: After so long, what is known is enough.
        best: The best speed so far.
    """

    def __init__(self, most_s: float, best: Speed | None) -> None:
        self._most_s = most_s
        self._best = best
        self._rates: list[float] = []
        self._elapsed_s = self._span_s = 0.0
        self._batches = self._in_span = 0

    def note(self, elapsed_s: float) -> bool:
        """Note a batch; whether enough is known."""
        self._elapsed_s += elapsed_s
        self._span_s += elapsed_s
        self._in_span += 1
        self._batches += 1
        if self._span_s >= _SPAN_S:
            self._rates.append(self._in_span / self._span_s)
            self._span_s, self._in_span = 0.0, 0
        if self._elapsed_s >= self._most_s:
            return True
        if len(self._rates) < _FEWEST_SPANS:
            return False
        speed = self.speed()
        if speed.error < _ERROR * speed.rate:
            return True
        best = self._best
        if best is None:
            return False
        return best.rate - speed.rate > _HOPELESS * math.hypot(best.error, speed.error)

    def speed(self, nbytes: int = 0) -> Speed:
        """What is known."""
        rates = self._rates
        rate = self._batches / self._elapsed_s if self._elapsed_s else 0.0
        error = rate
        if len(rates) > 1:
            error = statistics.stdev(rates) / math.sqrt(len(rates))
        return Speed(rate, error, self._batches, nbytes)


def _plotter(path: Path) -> Callable[[dict[Setting, Speed], Setting], None]:
    """Draws the curve; made before anything is measured, so that what lacks is told at once.

    Raises:
        UsageError: If it cannot be drawn, or not be written there.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'shmloader[report]'") from error
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"--plot: {path.name!r} names no kind of picture, such as .png or .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no directory {str(path.parent)!r}")

    def plot(known: dict[Setting, Speed], best: Setting) -> None:
        axes = figure.add_subplot()
        for prefetch in sorted({setting.prefetch_factor for setting in known}):
            of_it = sorted(item for item in known.items() if item[0].prefetch_factor == prefetch)
            axes.errorbar(
                [setting.num_workers for setting, _ in of_it],
                [speed.rate for _, speed in of_it],
                [speed.error for _, speed in of_it],
                marker="o",
                capsize=3,
                label=f"prefetch_factor={prefetch}",
            )
        axes.plot(
            best.num_workers,
            known[best].rate,
            "o",
            ms=14,
            mfc="none",
            mec="black",
            label=f"best: {best}",
        )
        axes.set(xlabel="num_workers", ylabel="batches/s", title="shmloader tune")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path)
        print(f"\nthe curve: {path}")

    return plot
