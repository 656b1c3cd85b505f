"""``shmloader bench``: runs a loader, and shows where its time goes."""

import argparse
import itertools
import statistics
import time
from collections.abc import Generator, Sequence
from typing import Any

from shmloader.cli.target import UsageError, close, make_loader, on_torch
from shmloader.grammar import counted, described_type, seconds
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader


def bench(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or one that ``--vs`` cannot compare.
        KeyboardInterrupt: After a Ctrl-C. The measurements so far are printed before.
    """
    if options.vs is None:
        print(_run(make_loader(options.target), options)[1])
        return
    rounds, text = list[list[float]](), ""
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
            runs = [_run(one, options) for one in both][::turn]
            rounds.append([rate for rate, _ in runs])
            text = runs[0][1]
    finally:
        if rounds:
            print(f"{text}\n")
            _print_rounds(rounds)


def _run(loader: Any, options: argparse.Namespace) -> tuple[float, str]:
    """Take batches, with a training step after each.

    Returns how many came a second, without the first one of each epoch, and a text, which is
    printed before a Ctrl-C leaves this.
    """
    taken = samples = steady = 0
    start_s = before_s = time.monotonic()
    steady_s, batch_size, batches = 0.0, probe(loader, "batch_size") or 1, _batches(loader)

    def describe() -> str:
        if isinstance(loader, DataLoader):
            return str(loader.stats("total"))  # while the workers live, whose memory is measured
        took_s = max(1e-9, before_s - start_s)
        known = f"{counted(taken, 'batch', 'batches')}, {counted(samples, 'sample')}"
        return f"{known} in {seconds(took_s)}: {samples / took_s:,.0f} samples/s"

    try:
        for is_first, batch in itertools.islice(batches, options.batches):
            samples, taken = samples + _samples_of(batch, batch_size), taken + 1
            time.sleep(options.step_ms / 1e3)
            now_s = time.monotonic()
            if not is_first:
                steady, steady_s = steady + 1, steady_s + now_s - before_s
            before_s = now_s
        if not taken:
            raise UsageError("the loader returns no batch")
        return max(1e-9, steady / max(1e-9, steady_s)), describe()
    except KeyboardInterrupt:
        print(f"interrupted after {taken} of {options.batches} batches\n{describe()}")
        raise
    finally:
        batches.close()
        close(loader)


def _batches(loader: Any) -> Generator[tuple[bool, Any]]:
    """Yield batches, epoch after epoch, and whether each is the first one of its epoch.

    Ends only if the loader cannot be iterated again, such as a generator.
    """
    is_first = False
    while not is_first:
        is_first = True
        for batch in loader:
            yield is_first, batch
            is_first = False


def _samples_of(batch: Any, batch_size: int) -> int:
    """Return the number of samples of a batch, as its first value shows it, or the batch size."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    shape = probe(batch, "shape")
    return int(shape[0]) if shape else batch_size


def _print_rounds(rounds: Sequence[Sequence[float]]) -> None:
    """Print medians over the rounds, with their ranges, and the ratio of ours to torch's."""
    ours, torchs = zip(*rounds, strict=True)
    ratios = [one / other for one, other in zip(ours, torchs, strict=True)]
    print(f"  batches/s: median (range) of {len(rounds)} rounds in turns, in one process")
    for name, values in {"shmloader": ours, "torch": torchs, "ratio": ratios}.items():
        median = f"{statistics.median(values):,.2f}"
        print(f"  {name:<10}{median:>10} ({min(values):,.2f}–{max(values):,.2f})")
