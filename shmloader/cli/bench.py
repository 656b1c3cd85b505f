"""``shmloader bench``: runs a loader, and shows where its time goes."""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

from shmloader.cli.target import UsageError, close, make_loader, on_torch
from shmloader.grammar import counted, described_type, seconds
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader


def bench(options: argparse.Namespace) -> None:
    """Run the command. With ``--json``, the result is left in ``options.result``.

    Raises:
        UsageError: If the arguments name no loader, or one that ``--vs`` cannot compare.
        KeyboardInterrupt: After a Ctrl-C. The measurements so far are printed before.
    """
    if options.vs is None:
        _, text, options.result = _run(make_loader(options.target), options)
        if not options.json:
            print(text)
        return
    rounds, text, facts = list[list[float]](), "", dict[str, Any]()
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
            rounds.append([rate for rate, _, _ in runs])
            _, text, facts = runs[0]
    finally:
        if rounds and options.json:
            is_interrupted = isinstance(sys.exception(), KeyboardInterrupt)
            options.result = {**facts, "is_interrupted": is_interrupted, "vs": _facts_of(rounds)}
        elif rounds:
            print(f"{text}\n")
            _print_rounds(_facts_of(rounds))


def _run(loader: Any, options: argparse.Namespace) -> tuple[float, str, dict[str, Any]]:
    """Take batches, with a training step after each.

    Returns how many came a second, without the first one of each epoch, a text, and the same for
    ``--json``. One of these is given out before a Ctrl-C leaves this.
    """
    taken = samples = steady = 0
    start_s = before_s = time.monotonic()
    steady_s, batch_size, batches = 0.0, probe(loader, "batch_size") or 1, _batches(loader)

    def describe(*, is_interrupted: bool = False) -> tuple[float, str, dict[str, Any]]:
        took_s, rate = max(1e-9, before_s - start_s), max(1e-9, steady / max(1e-9, steady_s))
        facts = {
            "target": options.target,
            "is_interrupted": is_interrupted,
            "batches": taken,
            "samples": samples,
            "elapsed_s": took_s,
            "batches_per_s": rate,
            "stats": None,
            "vs": None,
        }
        if isinstance(loader, DataLoader):
            stats = loader.stats("total")  # while the workers live, whose memory is measured
            return rate, str(stats), facts | {"stats": stats.to_dict()}
        known = f"{counted(taken, 'batch', 'batches')}, {counted(samples, 'sample')}"
        return rate, f"{known} in {seconds(took_s)}: {samples / took_s:,.0f} samples/s", facts

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
        return describe()
    except KeyboardInterrupt:
        _, text, options.result = describe(is_interrupted=True)
        if not options.json:
            print(f"interrupted after {taken} of {options.batches} batches\n{text}")
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


def _facts_of(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the rates of all rounds, and the ratios of ours to torch's, with their median."""
    ours, torchs = zip(*rounds, strict=True)
    ratios = [one / other for one, other in rounds]
    return {
        "batches_per_s": {"shmloader": [*ours], "torch": [*torchs]},
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
    }


def _print_rounds(facts: dict[str, Any]) -> None:
    """Print medians over the rounds, with their ranges, and the ratio of ours to torch's."""
    count = len(facts["ratios"])
    print(f"  batches/s: median (range) of {count} rounds in turns, in one process")
    for name, values in {**facts["batches_per_s"], "ratio": facts["ratios"]}.items():
        median = f"{statistics.median(values):,.2f}"
        print(f"  {name:<10}{median:>10} ({min(values):,.2f}–{max(values):,.2f})")
