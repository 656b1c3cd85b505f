"""How fast is shmloader beside other loaders, on the same work?

Runs the workloads of ``_rows.py`` through each loader of ``_peers.py``, and measures the bare work
where there is such a ceiling. Each run is a fresh process with a time limit, so a loader that hangs
is a result, too. Loaders take turns within a round. Every run is recorded at once, and a campaign
that was interrupted continues where it was. The tables and plots are made of what is recorded.

A loader that cannot be imported is absent, with the reason; ``make bench-peers`` installs them all.

Exit code: 0; 1 if two loaders gave different content; 2 if a run of ours failed; 130 if it was
interrupted. No figure is a pass or a fail, nor is a failure of another loader.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from _fresh import in_turn, try_anew
from _machine import describe_machine, find_commit
from _peers import PEERS
from _record import Record, Run
from _report import BARES, OURS, ROWS, contents, draw, report, table
from _rows import CASES, Case, Settings, names_of
from _sections import find_sections

_HERE = Path(__file__).parent
_PARTIAL = _HERE.parent / "build" / "peers"  # records, and results of partial comparisons
_FULL_ROUNDS = 5
_IMPORT_LIMIT_S = 300.0

# Their versions are in the heading. A campaign continues only if they are the same.
_DISTRIBUTIONS = (
    "torchdata", "spdl", "SeqTools", "grain", "pillow", "transformers", "datasets", "webdataset",
    "mosaicml-streaming", "pyarrow",
)  # fmt: skip


def find_absent(names: Sequence[str]) -> dict[str, str]:
    """Find out which peers cannot be imported, and why."""
    reasons = {module: _why_absent(module) for module in {PEERS[name].module for name in names}}
    return {
        name: "; ".join([reason, *_told_by_pip(PEERS[name].distribution)])
        for name in names
        if (reason := reasons[PEERS[name].module]) is not None
    }


def _why_absent(module: str) -> str | None:
    """Return why a module cannot be imported; None if it can."""
    if module in sys.modules:
        return None
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False, cwd=_HERE,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["cannot be imported"])[-1]


def _told_by_pip(distribution: str) -> list[str]:
    """Return pip's last error, if it could not install a distribution."""
    try:
        lines = (Path(sys.prefix) / f"{distribution}.log").read_text().splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.startswith("ERROR:")][-1:]


def cells(
    cases: Sequence[Case], chosen: Sequence[str], rounds: int
) -> Iterator[tuple[int, Case, str]]:
    """Yield all runs in order. Each round begins with the next loader."""
    for round_ in range(rounds):
        for case in cases:
            names = [name for name in names_of(case) if name in (*chosen, *BARES)]
            for name in in_turn(names, round_):
                yield round_, case, name


def why_not(
    cases: Sequence[Case], names: Sequence[str], absent: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """Return why loaders are not run on a case, by case and loader."""
    reasons = {}
    for case in cases:
        for name in names:
            if name in absent:
                reasons[case.key, name] = f"absent: {absent[name]}"
            elif case.method is not None and case.method not in PEERS[name].methods:
                reasons[case.key, name] = PEERS[name].instead
    return reasons


def measure(case: Case, name: str, round_: int, options: argparse.Namespace) -> Run:
    """Do one run in a fresh process."""
    arguments = [
        case.key, name, f"--workers={options.workers}", f"--seconds={options.seconds}",
        *(["--smallest"] if options.smallest else []),
    ]  # fmt: skip
    limit_s = options.limit or case.limit_s + 4 * options.seconds
    found = try_anew(str(_HERE / "_peer_run.py"), arguments, limit_s)
    if isinstance(found, str):
        return Run(case.key, name, round_, None, found)
    return Run(case.key, name, round_, found)


def measure_all(
    options: argparse.Namespace,
    cases: Sequence[Case],
    reasons: Mapping[tuple[str, str], str],
    record: Record,
) -> None:
    """Do the runs that are not recorded yet, and print the progress."""
    todo = [
        (round_, case, name)
        for round_, case, name in cells(cases, options.peers, options.runs)
        if (case.key, name) not in reasons and not record.has(round_, case.key, name)
    ]
    if record.runs:
        told = f"{len(record.runs)} runs are recorded already (--anew discards them)"
        print(told, file=sys.stderr)
    began = time.monotonic()
    for number, (round_, case, name) in enumerate(todo, 1):
        gone_s = time.monotonic() - began
        left_s = gone_s / (number - 1) * (len(todo) - number + 1) if number > 1 else None
        left = "" if left_s is None else f", about {_clock(left_s)} left"
        head = (
            f"[{number}/{len(todo)}, {_clock(gone_s)}{left}] round {round_ + 1} {case.key}, {name}"
        )
        if record.is_hopeless(case.key, name):
            print(f"{head}: has failed twice, not run again", file=sys.stderr, flush=True)
            continue
        print(head, end=": ", file=sys.stderr, flush=True)
        run = measure(case, name, round_, options)
        record.add(run)
        print(run.error or _headline(run), file=sys.stderr, flush=True)


def _headline(run: Run) -> str:
    figure = ROWS[run.case[0]].figures[0]
    assert run.figures is not None
    return f"{run.figures[figure.key] * figure.scale:{figure.spec}} {figure.heading}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _lines(case: Case, options: argparse.Namespace) -> list[str]:
    """Return the loaders that have a line in a case's table."""
    return [name for name in names_of(case) if name in (*options.peers, *BARES)]


def write(
    options: argparse.Namespace,
    cases: Sequence[Case],
    machine: Mapping[str, str],
    reasons: Mapping[tuple[str, str], str],
    runs: Sequence[Run],
) -> None:
    """Write the tables and, with matplotlib, the plots beside them."""
    path: Path = options.results
    path.parent.mkdir(parents=True, exist_ok=True)
    of_cases = {case.key: _lines(case, options) for case in cases}
    pictures = {}
    if importlib.util.find_spec("matplotlib") is None:
        print("No plots: they need matplotlib.", file=sys.stderr)
    else:
        folder = path.parent / "results"
        folder.mkdir(exist_ok=True)
        for letter in dict.fromkeys(case.key[0] for case in cases):
            picture = folder / f"{letter}.svg"
            draw(letter, runs, of_cases, picture)
            pictures[letter] = str(picture.relative_to(path.parent))
    notes = {name: PEERS[name].note for name in options.peers}
    sections = find_sections(path)
    path.write_text(report(runs, of_cases, machine, reasons, notes, pictures) + sections)
    print(f"{path}: {len(runs)} runs", file=sys.stderr)


def _matching(part: str) -> list[str]:
    """Return the peer of this name, or else those whose names contain it."""
    names = [name for name in PEERS if part in name.lower()]
    return [name for name in names if name.lower() == part] or names


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", default="".join(ROWS), help="letters of rows, default: %(default)s")
    add("--peers", help=f"separated by commas; parts of names suffice; default: {'; '.join(PEERS)}")
    add("--runs", type=int, help=f"runs of each, default: {_FULL_ROUNDS}, or 1 with --smallest")
    add("--seconds", type=float, help="timed part of a run; default: 1.5, or 0.1 with --smallest")
    add("--workers", type=int, help="default: as many as cores, but at least 2")
    add("--limit", type=float, metavar="SECONDS", help="limit of a run; default: minutes, by row")
    add("--smallest", action="store_true", help="only check that it runs")
    add("--anew", action="store_true", help="discard what is recorded")
    add("--record", type=Path, metavar="PATH",
        help="where runs are recorded; default: build/peers, a file for each commit")  # fmt: skip
    add("--results", type=Path, metavar="PATH",
        help="page for the tables; plots go beside it; default: benchmarks/RESULTS.md for all rows "
        "and peers, else build/peers/RESULTS.md")  # fmt: skip
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"unknown rows {sorted(unknown)}, choose from {''.join(ROWS)}")
    wanted = set(PEERS)
    if options.peers:
        asked = [part.strip().lower() for part in options.peers.split(",")]
        wanted = {name for part in asked for name in _matching(part)}
        if unknown := [part for part in asked if not _matching(part)]:
            parser.error(f"no peers match {unknown}, choose from {'; '.join(PEERS)}")
    if options.runs is None:
        options.runs = 1 if options.smallest else _FULL_ROUNDS
    is_full = (
        len(options.rows) == len(ROWS)
        and len(wanted) == len(PEERS)
        and options.runs >= _FULL_ROUNDS
        and not options.smallest
    )
    # Ours is what the others are compared with.
    options.peers = [name for name in PEERS if name in wanted or name in OURS]
    if options.seconds is None:
        options.seconds = 0.1 if options.smallest else 1.5
    if options.workers is None:
        options.workers = max(2, len(os.sched_getaffinity(0)))
    kind = "smallest" if options.smallest else "full"
    options.record = options.record or _PARTIAL / f"{kind}-{find_commit()}.jsonl"
    options.results = options.results or (_HERE if is_full else _PARTIAL) / "RESULTS.md"
    return options


def main() -> int:
    """Run, write, and return the exit code."""
    options = parse_options()
    cases = [case for case in CASES.values() if case.key[0] in options.rows]
    absent = find_absent(options.peers)
    machine = describe_machine()
    machine["commit"] = find_commit()
    for distribution in _DISTRIBUTIONS:
        try:
            machine[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            machine[distribution] = "not installed"
    machine["options"] = (
        f"{options.workers} workers, {options.runs} runs of {options.seconds:g} s"
        + (", smallest size" if options.smallest else "")
    )
    passing = ("date", "load before", "options")
    about = {key: value for key, value in machine.items() if key not in passing}
    about |= asdict(Settings(options.workers, options.seconds, options.smallest))
    for name, value in machine.items():
        print(f"{name}: {value}")
    for name, reason in absent.items():
        print(f"{name} is absent: {reason}")
    if options.anew:
        options.record.unlink(missing_ok=True)
    record = Record(options.record, about)
    print(flush=True)
    reasons = why_not(cases, options.peers, absent)
    try:
        measure_all(options, cases, reasons, record)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues from {options.record}", file=sys.stderr)
        return 130
    runs = [run for run in record.runs if run.case in {case.key for case in cases}]
    write(options, cases, machine, reasons, runs)
    for case in cases:
        print(f"\n{case.key}: {ROWS[case.key[0]].title}")
        print("\n".join(table(runs, case.key, _lines(case, options), reasons)))
        for digest, found in contents(runs, case.key).items():
            print(f"content {digest}: {', '.join(found)}")
    if any(len(contents(runs, case.key)) > 1 for case in cases):
        return 1
    return 2 if any(run.error and run.peer in OURS for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
