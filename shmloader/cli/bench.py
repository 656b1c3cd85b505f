"""``shmloader bench``: runs a loader, and shows where its time goes."""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

from shmloader.cli.measure import Progress, Run
from shmloader.cli.target import UsageError, find, like, make_loader
from shmloader.insight.snapshot import LoaderStats
from shmloader.insight.text import seconds
from shmloader.loader.dataloader import DataLoader


def bench(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: If the arguments name no loader, or there is nothing to compare it with.
        KeyboardInterrupt: After a Ctrl-C, when the measurements so far are printed.
    """
    make = find(options.target)
    loader = make_loader(make, options.target)
    other = like(loader, of_torch=True) if options.vs else None
    if other is not None and not isinstance(loader, DataLoader):
        raise UsageError(f"--vs: {options.target}() already returns a loader of torch's")
    interrupted: KeyboardInterrupt | None = None
    measured: list[LoaderStats] = []
    for name, each in (("bench" if other is None else "shmloader", loader), ("torch", other)):
        if each is None or interrupted is not None:
            continue
        stats, interrupted = _run(name, each, options)
        measured.append(stats)
        if name != "torch":
            print(stats)
    if len(measured) > 1:
        print()
        _print_ratios(*measured)
    if interrupted is not None:
        raise interrupted


def _run(
    name: str, loader: Any, options: argparse.Namespace
) -> tuple[LoaderStats, KeyboardInterrupt | None]:
    interrupted = None
    with Run(loader, options.step_ms / 1e3) as run:
        batches = run.batches()  # `stats` examines its workers, so it is kept until then
        try:
            with Progress(name, options.batches, "batches") as progress:
                for _ in itertools.islice(batches, options.batches):
                    progress.step()
        except KeyboardInterrupt as error:
            interrupted = error
            print(f"interrupted after {run.taken} of {options.batches} batches")
        stats = run.stats()
        batches.close()
    return stats, interrupted


def _print_ratios(ours: LoaderStats, torchs: LoaderStats) -> None:
    def rate(stats: LoaderStats) -> float:
        # The first batch of each epoch counts as start-up, which has a row of its own.
        steady_s = max(1e-9, stats.elapsed_s - stats.wait.startup_s)
        return (stats.batches - stats.epochs) / steady_s

    rows: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("batches/s", rate(ours), rate(torchs), "{:,.1f}".format),
        ("waited", ours.wait.total_s, torchs.wait.total_s, seconds),
        ("start-up", ours.wait.startup_s, torchs.wait.startup_s, seconds),
        ("share waited", ours.wait.share, torchs.wait.share, "{:.0%}".format),
    ]
    print(f"  {'':<14}{'shmloader':>12}{'torch':>12}{'ratio':>10}")
    for name, one, other, write in rows:
        ratio = f"{one / other:.2f}" if other else "–"
        print(f"  {name:<14}{write(one):>12}{write(other):>12}{ratio:>10}")
