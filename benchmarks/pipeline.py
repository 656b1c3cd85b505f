"""What does it cost to pass an item through stages that do nothing, beside SPDL?

Both have the same stages with the same concurrency (``pip install spdl``; without it, ours alone is
measured). Each run is a fresh process; the two take turns, and each round's ratio compares runs
that lie next to each other in time. Wall time counts, since items pass from thread to thread; CPU
time of the whole process is printed beside it. The consumer adds up all items, which shows that
both saw the same.

Exit code: 0; 2 if a run failed. No figure is a pass or a fail.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence

from _fresh import run_anew
from _machine import describe_machine
from _spread import with_spread

_RUN_LIMIT_S = 300.0
_WARMUP_ITEMS = 64  # whole lists of 8
_SINK = 3
_THREADS = 4
_LIST = 8


def same(item):
    return item


async def same_soon(item):
    return item


def each(item):
    yield item


class _Case:
    """Stages after a source of numbers: (op, concurrency), or the length of a list."""

    def __init__(self, *stages: tuple[object, int] | int) -> None:
        self.stages = stages

    def build(self, module: str, item_count: int):
        builder = importlib.import_module(module).PipelineBuilder().add_source(range(item_count))
        for stage in self.stages:
            if isinstance(stage, int):
                builder = builder.aggregate(stage)
            else:
                builder = builder.pipe(stage[0], concurrency=stage[1])
        return builder.add_sink(_SINK).build(num_threads=_THREADS)


CASES = {
    "a source alone": _Case(),
    "3 functions, 1 at once": _Case(*[(same, 1)] * 3),
    "3 functions, 4 at once": _Case(*[(same, 4)] * 3),
    "3 coroutines, 1 at once": _Case(*[(same_soon, 1)] * 3),
    "3 coroutines, 64 at once": _Case(*[(same_soon, 64)] * 3),
    "3 generators, 1 at once": _Case(*[(each, 1)] * 3),
    "a coroutine, 64 at once; a function, 4; lists of 8; a function, 4": _Case(
        (same_soon, 64), (same, 4), _LIST, (same, 4)
    ),
}
MODULES = {"shmloader": "shmloader", "SPDL": "spdl.pipeline"}


def _count(item) -> tuple[int, int]:
    """Return the number of items in a result, and their sum."""
    return (len(item), sum(item)) if isinstance(item, list) else (1, item)


def run(name: str, case: str, item_count: int) -> dict[str, float]:
    """Measure one pipeline, after a warm-up, in µs an item."""
    total_count = item_count + _WARMUP_ITEMS
    pipeline = CASES[case].build(MODULES[name], total_count)
    with pipeline.auto_stop():
        items = iter(pipeline)
        seen_count = seen_sum = 0
        while seen_count < _WARMUP_ITEMS:
            count, total = _count(next(items))
            seen_count, seen_sum = seen_count + count, seen_sum + total
        timed_count = total_count - seen_count
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for item in items:
            count, total = _count(item)
            seen_count, seen_sum = seen_count + count, seen_sum + total
        wall_s = time.perf_counter() - began_s
        cpu_s = time.process_time() - began_cpu_s
    if (seen_count, seen_sum) != (total_count, total_count * (total_count - 1) // 2):
        raise RuntimeError(f"{name} gave other items")
    return {"wall": wall_s / timed_count * 1e6, "cpu": cpu_s / timed_count * 1e6}


def compare(names: Sequence[str], case: str, rounds: int, item_count: int) -> str:
    """Measure a case, and return its row of the table."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            arguments = [f"--run={name}", f"--case={case}", f"--items={item_count}"]
            figures = run_anew(__file__, arguments, _RUN_LIMIT_S)
            runs[name].append(figures)
            print(f"round {round_ + 1} {case}, {name}: {figures}", file=sys.stderr)
    cells = [case]
    for name in names:
        cells += [
            with_spread([figures[kind] for figures in runs[name]], ".0f")
            for kind in ("wall", "cpu")
        ]
    if len(names) > 1:
        ours, theirs = (runs[name] for name in names)
        ratios = [b["wall"] / a["wall"] for a, b in zip(ours, theirs, strict=True)]
        cells.append(with_spread(ratios, ".1f"))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Compare, or do one run for a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=MODULES, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.case, options.items)))
        return
    cases = list(CASES)
    if options.smallest:
        options.rounds, options.items, cases = 1, 80, cases[-1:]
    names = list(MODULES)
    if importlib.util.find_spec("spdl") is None:
        names.remove("SPDL")
        print("SPDL is not installed: ours alone is measured.")
    for what, value in describe_machine().items():
        print(f"{what}: {value}")
    print(f"{options.items:,} items, {options.rounds} rounds; µs an item\n")
    heads = [f"{name}, {kind}" for name in names for kind in ("wall", "CPU")]
    heads += ["SPDL to ours, wall"] * (len(names) > 1)
    print(f"| stages | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for case in cases:
        print(compare(names, case, options.rounds, options.items), flush=True)


if __name__ == "__main__":
    main()
