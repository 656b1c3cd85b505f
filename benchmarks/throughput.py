"""How many batches a second, and at what cost, beside torch's loader and the ceiling?

Runs three things on the same resident samples, with the same number of processes:
``shmloader.DataLoader``, ``torch.utils.data.DataLoader`` and a *ceiling*, processes
that run ``torch.stack(samples, out=resident buffer)`` and nothing else. Each run is a
fresh process (``_measure.py``); the loaders take turns within a round, and a round's
ratio compares runs that lie next to each other in time. The consumer touches every
tensor of every batch. A hash over the first batches' bytes must be the same for all.

Exit code: 0; 1 if two loaders gave different content; 2 if a run failed.
No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _fresh import in_turn, try_anew
from _machine import describe_machine
from _measure import LOADERS, Figures
from _spread import with_spread_if_any
from _workloads import WORKLOADS, Workload, smallest

# Beyond the timed part a run imports torch, makes samples and hashes, in 2 s or so.
_RUN_MARGIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what was asked, and its figures or what went wrong."""

    round: int
    workload: str
    loader: str
    figures: Figures | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the table: its heading, how to get it from a run, its format."""

    heading: str
    value: Callable[[Figures], float | None]
    spec: str


def _per_batch(amount: float | None, figures: Figures, scale: float = 1.0) -> float | None:
    return None if amount is None else amount / figures.batches * scale


def _batches_per_s(figures: Figures) -> float:
    return figures.batches / figures.elapsed_s


def _gb(figures: Figures) -> float:
    return figures.batches * figures.batch_bytes / 1e9


COLUMNS = (
    Column("batches/s", _batches_per_s, ",.0f"),
    Column("GB/s", lambda f: _gb(f) / f.elapsed_s, ".3g"),
    Column("CPU s/GB", lambda f: (f.workers_cpu_s + (f.main_cpu_s or 0.0)) / _gb(f), ".3g"),
    Column("faults/batch", lambda f: _per_batch(f.minor_faults, f), ",.1f"),
    Column("main µs/batch", lambda f: _per_batch(f.main_cpu_s, f, 1e6), ",.0f"),
    Column("first batch ms", lambda f: f.first_batch_s and f.first_batch_s * 1e3, ",.0f"),
)


def measure(options: argparse.Namespace, round_: int, workload: str, loader: str) -> Run:
    """Run one loader once in a fresh process.

    A failure is a result too: the run then carries the last line of its stderr.
    """
    arguments = [
        loader,
        workload,
        f"--workers={options.workers}",
        f"--seconds={options.seconds}",
        *([f"--samples={options.samples}"] if options.samples else []),
        *(["--smallest"] if options.smallest else []),
    ]
    file = str(Path(__file__).with_name("_measure.py"))
    found = try_anew(file, arguments, options.seconds + _RUN_MARGIN_S)
    if isinstance(found, str):
        return Run(round_, workload, loader, None, found)
    return Run(round_, workload, loader, Figures(**found))


def measure_all(options: argparse.Namespace) -> list[Run]:
    """Run everything, interleaved: each round takes every workload and every loader."""
    runs: list[Run] = []
    start = time.monotonic()
    total = options.rounds * len(options.workloads) * len(options.loaders)
    for round_ in range(options.rounds):
        for workload in options.workloads:
            for loader in in_turn(options.loaders, round_):
                run = measure(options, round_, workload, loader)
                runs.append(run)
                result = run.error
                if run.figures is not None:
                    result = f"{_batches_per_s(run.figures):,.0f} batches/s"
                print(
                    f"[{len(runs)}/{total}, {time.monotonic() - start:.0f} s] "
                    f"round {round_ + 1} ({workload}) {loader}: {result}",
                    file=sys.stderr,
                    flush=True,
                )
    return runs


def _select(runs: Iterable[Run], workload: str, loader: str) -> list[Run]:
    return [run for run in runs if (run.workload, run.loader) == (workload, loader)]


def _cell(figures: Sequence[Figures], column: Column) -> str:
    values = [value for one in figures if (value := column.value(one)) is not None]
    return with_spread_if_any(values, column.spec) if values else "–"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows, the first of them the heading, as an aligned Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(cells)} |")
        if number == 0:
            print(f"|{'|'.join('-' * (width + 2) for width in widths)}|")


def print_figures(runs: Sequence[Run], works: Sequence[Workload], loaders: Sequence[str]) -> None:
    """Print the table of figures: median and, in brackets, least and most."""
    rows = [["workload", "loader", *(column.heading for column in COLUMNS)]]
    for work in works:
        for loader in loaders:
            chosen = _select(runs, work.key, loader)
            figures = [run.figures for run in chosen if run.figures is not None]
            errors = [run.error for run in chosen if run.error is not None]
            head = [f"({work.key}) {work.title}", loader]
            if figures:
                rows.append([*head, *(_cell(figures, column) for column in COLUMNS)])
            if errors:
                what = f"ERROR in {len(errors)} of {len(chosen)} runs"
                rows.append([*head, what, *[""] * (len(COLUMNS) - 1)])
    _print_table(rows)
    for message in dict.fromkeys(
        f"ERROR ({run.workload}) {run.loader}: {run.error}" for run in runs if run.error
    ):
        print(message)
    touches = [
        f"({work.key}) {min(costs):.1f}"
        for work in works
        if (
            costs := [
                run.figures.touch_us
                for run in runs
                if run.workload == work.key and run.figures and run.figures.touch_us
            ]
        )
    ]
    if touches:
        print(f"of main µs/batch, the consumer's own touch of every tensor: {', '.join(touches)}")


def ratios(runs: Sequence[Run], workload: str, loader: str, peer: str) -> list[float]:
    """Divide batches/s of the two loaders, once for each round that has both."""
    speed = {
        (run.round, run.loader): _batches_per_s(run.figures)
        for run in runs
        if run.workload == workload and run.figures is not None
    }
    return [
        value / speed[round_, peer]
        for (round_, name), value in speed.items()
        if name == loader and (round_, peer) in speed
    ]


def print_ratios(runs: Sequence[Run], works: Sequence[Workload]) -> None:
    """Print ratios of batches/s beside their goals, for what was run."""
    heading = ["ratio of batches/s", "shmloader/torch", "goal"]
    heading += ["shmloader/ceiling", "goal", "ceiling/torch"]
    rows = [heading]
    for work in works:
        to_torch, to_ceiling, room = (
            with_spread_if_any(values, spec) if (values := ratios(runs, work.key, *pair)) else "–"
            for pair, spec in (
                (("shmloader", "torch"), ".1f"),
                (("shmloader", "ceiling"), ".2f"),
                (("ceiling", "torch"), ".1f"),
            )
        )
        wanted = "–" if work.goal_to_ceiling is None else f"≥ {work.goal_to_ceiling:g}"
        row = [f"({work.key}) {work.title}", to_torch, f"≥ {work.goal_to_torch:g}"]
        rows.append([*row, to_ceiling, wanted, room])
    _print_table(rows)


def print_content_hashes(runs: Sequence[Run], works: Sequence[Workload]) -> bool:
    """Print each workload's content hash; return whether all loaders agree."""
    all_same = True
    for work in works:
        by_hash: dict[str, list[str]] = {}
        for run in runs:
            if run.workload == work.key and run.figures is not None:
                names = by_hash.setdefault(run.figures.content_hash, [])
                if run.loader not in names:
                    names.append(run.loader)
        same = len(by_hash) <= 1
        all_same = all_same and same
        seen = "; ".join(f"{digest} {' = '.join(names)}" for digest, names in by_hash.items())
        verdict = "" if same else "DIFFERENT CONTENT: "
        print(
            f"content hash ({work.key}), first {work.hash_batches} batches: "
            f"{verdict}{seen or 'no run'}"
        )
    return all_same


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="default: 5, or 1 with --smallest")
    parser.add_argument(
        "--seconds", type=float, help="timed part of a run; default: 1.5, or 0.1 with --smallest"
    )
    parser.add_argument(
        "--workloads", default="".join(WORKLOADS), help="letters, default: %(default)s"
    )
    parser.add_argument("--loaders", default=",".join(LOADERS), help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--samples", type=int, help="different samples held, for all workloads")
    parser.add_argument("--smallest", action="store_true", help="tiny batches, as CI runs it")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every run there")
    options = parser.parse_args(arguments)
    options.loaders = options.loaders.split(",")
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workloads {sorted(unknown)}, choose from {''.join(WORKLOADS)}")
    if unknown := set(options.loaders) - set(LOADERS):
        parser.error(f"unknown loaders {sorted(unknown)}, choose from {','.join(LOADERS)}")
    if options.rounds is None:
        options.rounds = 1 if options.smallest else 5
    if options.seconds is None:
        options.seconds = 0.1 if options.smallest else 1.5
    return options


def main() -> int:
    """Run, print, and return the exit code."""
    options = parse_options()
    machine = describe_machine()
    works = [WORKLOADS[key] for key in options.workloads]
    if options.smallest:
        works = [smallest(work) for work in works]

    for name, value in machine.items():
        print(f"{name}: {value}")
    print(
        f"options: {options.workers} workers, {options.rounds} rounds of {options.seconds:g} s, "
        "fork, persistent workers, default prefetch and collate"
        + (f", {options.samples} samples" if options.samples else "")
        + (", smallest size" if options.smallest else "")
    )
    print(flush=True)

    runs = measure_all(options)
    print("median (least–most) of the rounds")
    print_figures(runs, works, options.loaders)
    print()
    print_ratios(runs, works)
    print()
    same_content = print_content_hashes(runs, works)
    others = [run.figures.others_cpu_s / run.figures.elapsed_s for run in runs if run.figures]
    if others:
        print(f"cores that other processes used meanwhile: {with_spread_if_any(others, '.2f')}")
    if options.json is not None:
        chosen = {key: value for key, value in vars(options).items() if key != "json"}
        result = {"machine": machine, "options": chosen, "runs": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not same_content:
        return 1
    return 2 if any(run.error for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
