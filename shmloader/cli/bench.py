"""``shmloader bench``: runs a loader, and shows where its time goes."""

import argparse
import itertools
import statistics
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from shmloader.cli.target import UsageError, close, make_loader, on_torch
from shmloader.grammar import described_type
from shmloader.insight.record import Record, Statistics
from shmloader.insight.stats import LoaderStats, Machine
from shmloader.insight.verdict import snapshot
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader
from shmloader.pools.cores import usable_cores


def bench(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or one that ``--vs`` cannot compare.
        KeyboardInterrupt: After a Ctrl-C. The measurements so far are printed before.
    """
    if options.vs is None:
        print(_run(make_loader(options.target), options))
        return
    rounds: list[list[LoaderStats]] = []
    try:
        while len(rounds) < options.rounds:
            loader = make_loader(options.target)
            if not isinstance(loader, DataLoader) or isinstance(loader, ShardedDataLoader):
                raise UsageError(
                    f"--vs: {options.target}() should return a shmloader.DataLoader, but returned "
                    f"{described_type(loader)}"
                )
            # New loaders with the same samples, each of which is the first one in turn.
            turn = -1 if len(rounds) % 2 else 1
            both = [loader, on_torch(loader)][::turn]
            rounds.append([_run(one, options) for one in both][::turn])
    finally:
        if rounds:
            print(f"{rounds[-1][0]}\n")
            _print_rounds(rounds)


def _run(loader: Any, options: argparse.Namespace) -> LoaderStats:
    """Take batches, and return the statistics. They are printed before a Ctrl-C leaves this."""
    record, taken = Statistics(), 0
    batches = _batches(loader, record, options.step_ms / 1e3)

    def read() -> LoaderStats:
        if isinstance(loader, DataLoader):
            return loader.stats("total")
        return snapshot(record.total(), record.epochs, Machine(usable_cores(Path("/"))))

    try:
        for _ in itertools.islice(batches, options.batches):
            taken += 1
        return read()  # while the workers live, so that their memory can be measured
    except KeyboardInterrupt:
        print(f"interrupted after {taken} of {options.batches} batches\n{read()}")
        raise
    finally:
        batches.close()
        close(loader)


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
        iterator = iter(loader)
        record.begin()
        began_ns, is_empty = time.monotonic_ns(), True
        for batch in iterator:
            samples = _samples_of(batch, batch_size)
            record.add(began_ns, time.monotonic_ns(), 0, None, samples, 0)
            is_empty = False
            del batch
            time.sleep(step_s)
            yield
            began_ns = time.monotonic_ns()
        record.add(began_ns, time.monotonic_ns(), 0, None, "end", 0)
    if statistics.epochs == 1:
        raise UsageError("the loader returns no batch")


def _samples_of(batch: Any, batch_size: int) -> int:
    """Return the number of samples of a batch, as its first value shows it, or the batch size."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape = probe(batch, "shape")
    return int(shape[0]) if shape else batch_size


def _print_rounds(rounds: Sequence[Sequence[LoaderStats]]) -> None:
    """Print medians over the rounds, with their ranges, and the ratio of ours to torch's."""

    def rate(stats: LoaderStats) -> float:
        # The first batch of each epoch counts as start-up, which the table above shows.
        steady_s = max(1e-9, stats.elapsed_s - stats.wait.startup_s)
        return max(1e-9, (stats.batches - stats.epochs) / steady_s)

    ours, torchs = ([rate(stats) for stats in column] for column in zip(*rounds, strict=True))
    ratios = [one / other for one, other in zip(ours, torchs, strict=True)]
    print(f"  batches/s: median (range) of {len(rounds)} rounds in turns, in one process")
    for name, values in {"shmloader": ours, "torch": torchs, "ratio": ratios}.items():
        median = f"{statistics.median(values):,.2f}"
        print(f"  {name:<10}{median:>10} ({min(values):,.2f}–{max(values):,.2f})")
