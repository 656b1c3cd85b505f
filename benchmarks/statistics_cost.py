"""What do the statistics cost the main process for each batch?

First, it measures all that is done for the statistics of one batch: the readings of the clock, the
part of the answer that has the worker's times, and the additions. This is repeated in short runs of
a few hundred batches, of which the least is taken, which is the cost when no other process wants
the core. Then it measures an epoch of tiny batches with one worker, in CPU time of the main
process: with the statistics, and without the recording of times. Whatever else the machine does
disturbs these figures. Each run is a fresh process; the kinds take turns, and a round's difference
compares runs that lie next to each other in time. A checksum shows that the consumer saw all
samples.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit
from collections.abc import Callable

from _fresh import in_turn, run_anew
from _machine import describe_machine
from _spread import with_spread
from _workloads import Nothing

import shmloader
from shmloader.insight.measurements import pack_batch, pack_work
from shmloader.insight.record import Record
from shmloader.messages import DONE, DONE_HEAD

_RUN_LIMIT_S = 180.0
_SHORT, _SHORT_RUNS = 300, 400


def run_alone() -> dict[str, float]:
    """Measure what is done for the statistics of one batch, in µs."""
    record = Record(0, "processes", 1)
    now = time.monotonic_ns
    work = pack_work(now(), 20_000, 5_000, 10_000, 16)
    done = DONE_HEAD.pack(DONE, 1, 2, 3, 640) + work

    def note() -> None:
        began_ns = now()
        looked_ns, offered_ns, seen_ns, handed_ns = now(), now(), now(), now()
        times = pack_batch(0, offered_ns, offered_ns, looked_ns, seen_ns, handed_ns, 4096, 1) + work
        record.add(began_ns, now(), 0, times, None)

    def least(function: Callable[[], object]) -> float:
        return min(timeit.repeat(function, number=_SHORT, repeat=_SHORT_RUNS)) / _SHORT * 1e6

    return {"alone": least(note) + least(lambda: done[DONE_HEAD.size :])}


def run_loader(kind: str, batches: int) -> dict[str, float]:
    """Measure the main process's CPU time in a second epoch, in µs a batch."""
    if kind == "off":
        Record.add = lambda *_: None
    with shmloader.DataLoader(
        Nothing(batches),
        1,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    ) as loader:
        for _ in range(2):
            began_s = time.process_time()
            total = sum(int(batch) for batch in loader)
            spent_s = time.process_time() - began_s
            if total != batches * (batches - 1) // 2:
                raise RuntimeError("the loader gave other samples")
        return {kind: spent_s / batches * 1e6}


def main() -> None:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=20_000, help="in an epoch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=["alone", "on", "off"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.batches = 1, 100
    if options.run:
        run = run_alone() if options.run == "alone" else None
        print(json.dumps(run or run_loader(options.run, options.batches)))
        return
    print(describe_machine())
    print(f"{options.batches:,} batches of one int, 1 worker, {options.rounds} rounds\n")
    figures: dict[str, list[float]] = {"alone": [], "on": [], "off": []}
    for round_ in range(options.rounds):
        kinds = list(figures)
        for kind in in_turn(kinds, round_):
            arguments = [f"--run={kind}", f"--batches={options.batches}"]
            figures[kind] += run_anew(__file__, arguments, _RUN_LIMIT_S).values()
            print(f"round {round_ + 1} {kind}: {figures[kind][-1]:.2f} µs", file=sys.stderr)
    more = [on - off for on, off in zip(figures["on"], figures["off"], strict=True)]
    print("| CPU of the main process | µs a batch |")
    print("|---|---|")
    rows = {
        "what is noted of a batch, alone": figures["alone"],
        "a batch, with statistics": figures["on"],
        "a batch, without": figures["off"],
        "the difference": more,
    }
    for name, values in rows.items():
        print(f"| {name} | {with_spread(values, '.2f')} |")


if __name__ == "__main__":
    main()
