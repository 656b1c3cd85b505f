"""Runs the cells of the fault campaign, prints each verdict, and counts the failures."""

import argparse
import fnmatch
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults import docs
from tests.faults.cells import FAULTS, METHODS, MODES, POINTS, Cell, all_cells, cell_of, pairwise
from tests.faults.harness import Starter, Verdict, run_trial

# Rough cost of a trial in seconds of CPU time, by start method, to choose the sample.
COST = {"fork": 1, "spawn": 8, "forkserver": 5}


def run_cells(
    cells: Iterable[Cell], *, jobs: int, is_fresh: bool, stopping: threading.Event | None = None
) -> Iterator[Verdict]:
    """Run cells, several at a time; yield each verdict when it is ready.

    Args:
        cells: The cells to run.
        jobs: How many run at a time.
        is_fresh: Whether each trial is a new interpreter, rather than a fork of a template.
        stopping: Once it is set, no further cell begins.
    """
    stopping = stopping or threading.Event()
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    # None means that a job has ended.
    verdicts: queue.SimpleQueue[Verdict | None] = queue.SimpleQueue()

    def work() -> None:
        starter = Starter(is_fresh=is_fresh)
        try:
            while not stopping.is_set():
                cell = waiting.get_nowait()
                try:
                    verdicts.put(run_trial(cell, starter))
                except Exception as error:
                    verdicts.put(Verdict(cell, [f"the harness failed: {error!r}"], 0, {}))
        except queue.Empty:
            pass
        finally:
            starter.close()
            verdicts.put(None)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            yield from iter(verdicts.get, None)
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("patterns", nargs="*", metavar="CELL", help="ids, * allowed; default: all")
    parser.add_argument("--sample", action="store_true", help="only the pairwise sample")
    parser.add_argument("--list", action="store_true", help="print the ids, run none")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each cell N times")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="trials at a time")
    parser.add_argument("--template", action="store_true", help="fork trials from a template")
    parser.add_argument(
        "--minutes", type=float, default=0, help="start none after so long; in mixed order"
    )
    parser.add_argument(
        "--record", metavar="FILE", type=Path, help="append verdicts; run what it lacks"
    )
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("-x", action="store_true", help="stop at the first failure")
    return parser.parse_args()


def main() -> None:
    """Run what the command line names; exit with 1 if anything fails."""
    options = _arguments()
    cells = list(pairwise(all_cells(), COST)) if options.sample else all_cells()
    if options.patterns:
        cells = [c for c in cells if any(fnmatch.fnmatch(c.id, p) for p in options.patterns)]
    # The cells that were run, and whether each was always right.
    known: dict[str, bool] = {}
    if options.record and options.record.exists():
        for line in options.record.read_text().splitlines():
            name, problems, _ = json.loads(line)
            known[name] = known.get(name, True) and not problems
    cells = [cell for cell in cells if cell.id not in known] * options.repeat
    if options.minutes:
        cells.sort(key=lambda cell: cell.lot)
    if options.list:
        print(*[cell.id for cell in cells], sep="\n")
        return
    began = time.monotonic()
    # What to print of each failure, once more at the end: a log may keep only its last lines.
    failures: list[str] = []
    stopping = threading.Event()
    if options.minutes:
        timer = threading.Timer(options.minutes * 60, stopping.set)
        timer.daemon = True
        timer.start()
    verdicts = run_cells(cells, jobs=options.jobs, is_fresh=not options.template, stopping=stopping)
    for number, verdict in enumerate(verdicts, 1):
        name, problems = verdict.cell.id, verdict.problems
        known[name] = not problems and known.get(name, True)
        if options.record:
            with options.record.open("a") as file:
                print(json.dumps([name, problems, round(verdict.elapsed_s, 2)]), file=file)
        outcome = "FAILED" if problems else "right"
        text = f"{name}: {outcome} in {verdict.elapsed_s:.1f} s {verdict.measured or ''}"
        for problem in problems:
            text += "\n    " + problem.replace("\n", "\n      ")
        print(f"{number}/{len(cells)} {time.monotonic() - began:.0f} s  {text}", flush=True)
        if problems:
            failures.append(text)
        if failures and options.x:
            stopping.set()
    print(*failures, f"{len(failures)} failed", sep="\n")
    if options.docs:
        _write_docs({cell_of(name): is_right for name, is_right in known.items()})
    sys.exit(bool(failures))


def _write_docs(results: dict[Cell, bool]) -> None:
    """Write the table of faults and points into the docs; ``results``: whether each was right."""
    counts = Counter((cell.fault.name, cell.point.name) for cell in results)
    right = Counter((cell.fault.name, cell.point.name) for cell, good in results.items() if good)
    parts = Counter(part for cell in results for part in (cell.method, cell.mode.name))

    def listed(order: Iterable[str]) -> str:
        return ", ".join(f"{name} {parts[name]}" for name in order if parts[name])

    def field(fault: str, point: str) -> str:
        good, count = right[fault, point], counts[fault, point]
        return f"{good} / {count}" if good < count else str(count or "")

    faults = [name for name in FAULTS if any(fault == name for fault, _ in counts)]
    points = [name for name in POINTS if any(point == name for _, point in counts)]
    docs.write(
        "campaign",
        f"{docs.where_and_when()}. **{len(results)} of {len(all_cells())} cells were run: "
        f"{right.total()} right, {len(results) - right.total()} not.**",
        "",
        f"By start method: {listed(METHODS)}. By mode: {listed(MODES)}.",
        "",
        "A number is how many trials of this fault at this point were right, over all start "
        "methods and modes. Where some were not, the field has two numbers: right / all. In an "
        "empty field, the fault and the point do not combine.",
        "",
        *docs.table(
            ["fault", *points],
            [[fault, *[field(fault, point) for point in points]] for fault in faults],
        ),
    )
