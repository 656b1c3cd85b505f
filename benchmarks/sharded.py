"""What does cutting cost: a rank's part, and an order of 100 million samples?

Compares a ``DataLoader`` with a ``ShardedDataLoader`` that is one rank of one (*rank*). A sharded
loader always has a seed, and so random streams for each sample, which these samples do not use. So
the cost of cutting is the ratio to a ``DataLoader`` with ``seed=0`` (*seeded*); the other ratio is
to one without a seed (*plain*). Each run is a fresh process. Kinds take turns within a round, and a
round's ratio compares runs that lie next to each other in time. The consumer touches every tensor.

Finally, one epoch of 100 million shuffled samples is drawn as one rank of eight, without any data.
The time and the memory that this takes are printed.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from _fresh import in_turn, run_anew
from _machine import describe_machine
from _spread import with_spread
from _workloads import WORKLOADS, Samples, Workload, smallest, touch

import shmloader
from shmloader.sampling.arguments import Ranks
from shmloader.sampling.seeded_order import SeededOrder

KINDS = ("plain", "seeded", "rank")
_WORKLOADS = ("a", "c", "d")
_WARMUP_STEPS = 12
_RUN_LIMIT_S = 180.0

_ORDER_LENGTH = 100_000_000
_ORDER_RANKS = 8
_ORDER_BATCH = 256


def _consume(steps: Iterator[object], seconds: float, at_least: int, stride: int) -> float:
    """Touch at least so many steps, for at least so many seconds; return steps a second."""
    began = time.perf_counter()
    for count, step in enumerate(steps, 1):
        touch(step)
        elapsed_s = time.perf_counter() - began
        if count >= at_least and count % stride == 0 and elapsed_s >= seconds:
            return count / elapsed_s
    raise RuntimeError("the loader has ended")


def run_loader(kind: str, work: Workload, workers: int, seconds: float) -> dict[str, float]:
    """Measure one loader in this process."""
    dataset = Samples(work)
    options = {"num_workers": workers, "multiprocessing_context": "fork"}
    if kind == "plain":
        loader = shmloader.DataLoader(dataset, work.batch_size, **options)
    elif kind == "seeded":
        loader = shmloader.DataLoader(dataset, work.batch_size, seed=0, **options)
    else:
        loader = shmloader.ShardedDataLoader(dataset, work.batch_size, **options)
    with loader:
        steps = iter(loader)
        _consume(steps, 0.3, _WARMUP_STEPS, work.clock_stride)
        return {"steps_per_s": _consume(steps, seconds, 1, work.clock_stride)}


def run_order(length: int) -> dict[str, float]:
    """Draw one epoch of a long order in this process."""
    ranks = Ranks(0, _ORDER_RANKS)
    plan = SeededOrder(_ORDER_BATCH, "pad", 0, length=length, shuffle=True, ranks=ranks)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    steps = iter(plan)
    next(steps)
    first_s = time.perf_counter() - began
    for _ in steps:
        pass
    elapsed_s = time.perf_counter() - began
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "first_s": first_s,
        "elapsed_s": elapsed_s,
        "steps": len(plan),
        "grown_mb": grown_kib * 1024 / 1e6,
    }


def _measure(arguments: Sequence[str]) -> dict[str, float]:
    return run_anew(__file__, arguments, _RUN_LIMIT_S)


def _compare(options: argparse.Namespace, works: Sequence[Workload]) -> None:
    speeds: dict[tuple[str, str], list[float]] = {}
    total = options.rounds * len(works) * len(KINDS)
    began = time.monotonic()
    done = 0
    for round_ in range(options.rounds):
        for work in works:
            for kind in in_turn(KINDS, round_):
                figures = _measure(
                    [
                        f"--run={kind}",
                        f"--workload={work.key}",
                        f"--workers={options.workers}",
                        f"--seconds={options.seconds}",
                        *(["--smallest"] if options.smallest else []),
                    ]
                )
                speeds.setdefault((work.key, kind), []).append(figures["steps_per_s"])
                done += 1
                print(
                    f"[{done}/{total}, {time.monotonic() - began:.0f} s] round {round_ + 1} "
                    f"({work.key}) {kind}: {figures['steps_per_s']:,.0f} steps/s",
                    file=sys.stderr,
                    flush=True,
                )
    print("| workload | loader | steps/s | to seeded | to plain |")
    print("|---|---|---|---|---|")
    for work in works:
        for kind in KINDS:
            own = speeds[work.key, kind]
            cells = [with_spread(own, ",.0f")]
            for base in ("seeded", "plain"):
                others = speeds[work.key, base]
                ratios = [one / other for one, other in zip(own, others, strict=True)]
                is_base = kind in {base, "plain"}
                cells.append("" if is_base else with_spread(ratios, ".2f"))
            print(f"| ({work.key}) {work.title} | {kind} | {' | '.join(cells)} |")


def main() -> None:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="timed part of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=[*KINDS, "order"], help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=_WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest:
        options.rounds, options.seconds = 1, 0.05

    works = [WORKLOADS[key] for key in _WORKLOADS]
    if options.smallest:
        works = [replace(smallest(work), key=work.key) for work in works[:1]]
    length = _ORDER_LENGTH // (1000 if options.smallest else 1)
    if options.run == "order":
        print(json.dumps(run_order(length)))
        return
    if options.run:
        work = next(work for work in works if work.key == options.workload)
        print(json.dumps(run_loader(options.run, work, options.workers, options.seconds)))
        return
    print(describe_machine())
    print(f"{options.workers} workers, {options.rounds} rounds\n")
    _compare(options, works)
    order = _measure(["--run=order", *(["--smallest"] if options.smallest else [])])
    steps, elapsed_s = order["steps"], order["elapsed_s"]
    print(
        f"\norder of {length:,} samples, batch {_ORDER_BATCH}, rank 0 of {_ORDER_RANKS}: first "
        f"step after {order['first_s'] * 1e3:.1f} ms, epoch of {steps:,.0f} steps drawn in "
        f"{elapsed_s:.1f} s, {elapsed_s / steps * 1e6:.0f} µs a step, "
        f"{order['grown_mb']:.1f} MB of memory"
    )


if __name__ == "__main__":
    main()
