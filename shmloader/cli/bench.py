"""``shmloader bench``: runs a loader, and shows where its time goes."""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shmloader.cli.target import Run, UsageError, make_loader, on_torch
from shmloader.grammar import described_type, seconds
from shmloader.insight.stats import LoaderStats
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader

# Seconds between two lines of progress.
_LINE_EVERY_S = 1.0


def bench(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or one that ``--vs`` cannot compare.
        KeyboardInterrupt: After a Ctrl-C. The measurements so far are printed before.
    """
    loader = make_loader(options.target)
    if options.vs is None:
        stats, interrupted = _run("bench", loader, options)
        print(stats)
    elif isinstance(loader, DataLoader) and not isinstance(loader, ShardedDataLoader):
        interrupted = _compare(loader, options)
    else:
        raise UsageError(
            f"--vs: {options.target}() should return a shmloader.DataLoader, but returned "
            f"{described_type(loader)}"
        )
    if interrupted is not None:
        raise interrupted


def _compare(loader: DataLoader[Any], options: argparse.Namespace) -> KeyboardInterrupt | None:
    """Run the loader and torch's in turns, with new loaders in each round, and print the results.

    Within a round, both see the same state of the machine. Which one runs first alternates.
    """
    measured: dict[str, list[LoaderStats]] = {"shmloader": [], "torch": []}
    interrupted = None
    for turn in range(2 * options.rounds):
        number, is_second = divmod(turn, 2)
        name = list(measured)[is_second ^ number % 2]
        if number and not is_second:
            loader = make_loader(options.target)
        each = on_torch(loader) if name == "torch" else loader
        stats, interrupted = _run(f"{name}, round {number + 1}", each, options)
        if interrupted is not None:
            break
        measured[name].append(stats)
    for stats in measured["shmloader"][-1:]:
        print(stats)
    rounds = list(zip(measured["shmloader"], measured["torch"], strict=False))
    if rounds:
        print()
        _print_rounds(rounds)
    return interrupted


def _run(
    name: str, loader: Any, options: argparse.Namespace
) -> tuple[LoaderStats, KeyboardInterrupt | None]:
    interrupted, said_s = None, time.monotonic()
    with Run(loader, options.step_ms / 1e3) as run:
        batches = run.batches()  # keeps the workers alive, which `stats` examines
        try:
            for _ in itertools.islice(batches, options.batches):
                if time.monotonic() - said_s > _LINE_EVERY_S:
                    said_s = time.monotonic()
                    print(f"{name}: {run.taken} of {options.batches} batches", file=sys.stderr)
        except KeyboardInterrupt as error:
            interrupted = error
            print(f"interrupted after {run.taken} of {options.batches} batches")
        stats = run.stats()
        batches.close()
    return stats, interrupted


def _rate(stats: LoaderStats) -> float:
    # The first batch of each epoch counts as start-up, which has a row of its own.
    steady_s = max(1e-9, stats.elapsed_s - stats.wait.startup_s)
    return (stats.batches - stats.epochs) / steady_s


_ROWS: list[tuple[str, Callable[[LoaderStats], float], Callable[[float], str], str]] = [
    ("batches/s", _rate, "{:,.1f}".format, "higher is better"),
    ("waited", lambda stats: stats.wait.total_s, seconds, "lower is better"),
    ("start-up", lambda stats: stats.wait.startup_s, seconds, "lower is better"),
    ("share waited", lambda stats: stats.wait.share, "{:.0%}".format, "lower is better"),
]


def _print_rounds(rounds: Sequence[tuple[LoaderStats, LoaderStats]]) -> None:
    """Print medians over the rounds, with their ranges, and the ratio of ours to torch's."""
    count = len(rounds)
    plural = "" if count == 1 else "s"
    print(f"  median (range) of {count} round{plural} in turns, in one process")
    print(f"  {'':<13}{'shmloader':>26}{'torch':>26}{'shmloader / torch':>22}")
    for name, read, write, better in _ROWS:
        ours, torchs = ([read(stats) for stats in column] for column in zip(*rounds, strict=True))
        ratios = [one / other for one, other in zip(ours, torchs, strict=True) if other]
        cells = [_median(ours, write), _median(torchs, write), _median(ratios, "{:.2f}".format)]
        print(f"  {name:<13}{cells[0]:>26}{cells[1]:>26}{cells[2]:>22}  {better}")


def _median(values: Sequence[float], write: Callable[[float], str]) -> str:
    if not values:
        return "–"
    text = write(statistics.median(values))
    return text if len(values) == 1 else f"{text} ({write(min(values))}–{write(max(values))})"
