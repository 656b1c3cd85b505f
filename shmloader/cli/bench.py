"""``shmloader bench``: runs a loader, and shows where its time goes."""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from shmloader.cli.target import UsageError, close, make_loader, on_torch
from shmloader.grammar import described_type, seconds
from shmloader.insight.record import Record, Statistics
from shmloader.insight.stats import LoaderStats, Machine
from shmloader.insight.verdict import snapshot
from shmloader.loader.by_torch import samples_of
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader
from shmloader.pools.cores import usable_cores
from shmloader.probing import probe

# Marks the end of an epoch.
_END = object()


def bench(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or one that ``--vs`` cannot compare.
        KeyboardInterrupt: After a Ctrl-C. The measurements so far are printed before.
    """
    loader = make_loader(options.target)
    if options.vs is None:
        stats, interrupted = _run(loader, options)
        print(stats)
    elif isinstance(loader, DataLoader) and not isinstance(loader, ShardedDataLoader):
        interrupted = _compare(loader, options)
    else:
        raise UsageError(
            f"--vs: {options.target}() should return a shmloader.DataLoader, but returned "
            f"{described_type(loader)}"
        )
    if interrupted:
        raise KeyboardInterrupt


def _compare(loader: DataLoader[Any], options: argparse.Namespace) -> bool:
    """Run the loader and torch's in turns, with new loaders in each round, and print the results.

    Within a round, both see the same state of the machine. Which one runs first alternates.
    Returns whether it was interrupted.
    """
    rounds: list[tuple[LoaderStats, LoaderStats]] = []
    interrupted = False
    while not interrupted and len(rounds) < options.rounds:
        pair = [loader, on_torch(loader)]
        order = (1, 0) if len(rounds) % 2 else (0, 1)
        found = dict[int, LoaderStats]()
        for number in order:
            if not interrupted:
                found[number], interrupted = _run(pair[number], options)
        if not interrupted:
            rounds.append((found[0], found[1]))
            loader = make_loader(options.target)
    if rounds:
        print(f"{rounds[-1][0]}\n")
        _print_rounds(rounds)
    return interrupted


def _run(loader: Any, options: argparse.Namespace) -> tuple[LoaderStats, bool]:
    """Take batches, and return the statistics and whether a Ctrl-C came."""
    record, interrupted, taken = Statistics(), False, 0
    batches = _batches(loader, record, options.step_ms / 1e3)
    try:
        for _ in itertools.islice(batches, options.batches):
            taken += 1
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted after {taken} of {options.batches} batches")
    # The workers live still, so that their memory can be measured.
    if isinstance(loader, DataLoader) and loader.stats("total").batches:
        stats = loader.stats("total")
    else:
        stats = snapshot(record.total(), record.epochs, Machine(usable_cores(Path("/"))))
    batches.close()
    close(loader)
    return stats, interrupted


def _batches(loader: Any, statistics: Statistics, step_s: float) -> Generator[None]:
    """Take batches of any iterable, epoch after epoch, with a training step after each.

    Ends only if the loader cannot be iterated again, such as a generator.

    Raises:
        UsageError: If the first epoch has no batch.
    """
    batch_size, is_empty = probe(loader, "batch_size") or 1, False
    while not is_empty:
        record = Record(statistics.epochs + 1, "other", probe(loader, "num_workers", 0))
        statistics.begin(record, _batches)  # each epoch ends the one before
        iterator, is_empty = iter(loader), True
        record.begin()
        began_ns = time.monotonic_ns()
        while (batch := next(iterator, _END)) is not _END:
            samples = samples_of(batch, batch_size)
            record.add(began_ns, time.monotonic_ns(), 0, None, samples, 0)
            is_empty = False
            del batch
            time.sleep(step_s)
            yield
            began_ns = time.monotonic_ns()
        record.add(began_ns, time.monotonic_ns(), 0, None, "end", 0)
        if is_empty and statistics.epochs == 1:
            raise UsageError("the loader returns no batch")


def _rate(stats: LoaderStats) -> float:
    # The first batch of each epoch counts as start-up, which has a row of its own.
    steady_s = max(1e-9, stats.elapsed_s - stats.wait.startup_s)
    return (stats.batches - stats.epochs) / steady_s


_ROWS: list[tuple[str, Callable[[LoaderStats], float], Callable[[float], str], str]] = [
    ("batches/s", _rate, "{:,.1f}".format, "higher is better"),
    ("waited", lambda stats: stats.wait.total_s, seconds, "lower is better"),
    ("start-up", lambda stats: stats.wait.startup_s, seconds, "lower is better"),
]


def _print_rounds(rounds: Sequence[tuple[LoaderStats, LoaderStats]]) -> None:
    """Print medians over the rounds, with their ranges, and the ratio of ours to torch's."""
    print(f"  median (range) of {len(rounds)} rounds in turns, in one process")
    print(f"  {'':<13}{'shmloader':>26}{'torch':>26}{'shmloader / torch':>22}")
    for name, read, write, better in _ROWS:
        ours, torchs = ([read(stats) for stats in column] for column in zip(*rounds, strict=True))
        ratios = [one / max(1e-9, other) for one, other in zip(ours, torchs, strict=True)]
        cells = [_median(ours, write), _median(torchs, write), _median(ratios, "{:.2f}".format)]
        print(f"  {name:<13}{cells[0]:>26}{cells[1]:>26}{cells[2]:>22}  {better}")


def _median(values: Sequence[float], write: Callable[[float], str]) -> str:
    return f"{write(statistics.median(values))} ({write(min(values))}–{write(max(values))})"
