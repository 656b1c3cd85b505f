"""Runs the cells of the fault campaign, prints each verdict, and counts the failures."""

from __future__ import annotations

import argparse
import fnmatch
import json
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults import docs
from tests.faults.cells import Cell, all_cells, cell_of, pairwise
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
        running = jobs
        while running:
            verdict = verdicts.get()
            if verdict is None:
                running -= 1
            else:
                yield verdict
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
    parser.add_argument("--record", metavar="FILE", help="append verdicts; run what it lacks")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("-x", action="store_true", help="stop at the first failure")
    return parser.parse_args()


def _read_record(record: Path | None) -> dict[str, bool]:
    """Return the cells that were run before, and whether each was always right."""
    known: dict[str, bool] = {}
    if record is not None and record.exists():
        for line in record.read_text().splitlines():
            name, problems, _ = json.loads(line)
            known[name] = known.get(name, True) and not problems
    return known


def main() -> None:
    """Run what the command line names; exit with 1 if anything fails."""
    options = _arguments()
    cells = all_cells()
    if options.sample:
        cells = list(pairwise(cells, COST))
    if options.patterns:
        cells = [c for c in cells if any(fnmatch.fnmatch(c.id, p) for p in options.patterns)]
    record = Path(options.record) if options.record else None
    known = _read_record(record)
    cells = [cell for cell in cells if cell.id not in known] * options.repeat
    if options.minutes:
        cells.sort(key=lambda cell: cell.lot)
    if options.list:
        print(*[cell.id for cell in cells], sep="\n")
        return
    began = time.monotonic()
    failed = 0
    stopping = threading.Event()
    if options.minutes:
        timer = threading.Timer(options.minutes * 60, stopping.set)
        timer.daemon = True
        timer.start()
    for number, verdict in enumerate(
        run_cells(cells, jobs=options.jobs, is_fresh=not options.template, stopping=stopping), 1
    ):
        failed += bool(verdict.problems)
        known[verdict.cell.id] = not verdict.problems and known.get(verdict.cell.id, True)
        if record is not None:
            with record.open("a") as file:
                line = [verdict.cell.id, verdict.problems, round(verdict.elapsed_s, 2)]
                print(json.dumps(line), file=file)
        mark = "FAILED" if verdict.problems else "right"
        print(
            f"{number}/{len(cells)} {time.monotonic() - began:.0f} s  {verdict.cell.id}: {mark} "
            f"in {verdict.elapsed_s:.1f} s {verdict.measured or ''}",
            flush=True,
        )
        for problem in verdict.problems:
            print("   ", problem.replace("\n", "\n      "), flush=True)
        if failed and options.x:
            stopping.set()
    print(f"{failed} failed")
    if options.docs:
        docs.write_campaign([(cell_of(name), right) for name, right in known.items()])
    sys.exit(bool(failed))
