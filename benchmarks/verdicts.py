"""Does ``stats().verdict`` name the limit that an epoch really has, run after run?

Runs twelve kinds of loaders, each of which has one known limit. Samples, samplers and training
steps sleep, so that the limit is the same on any machine. Where the limit is missing cores, the
loader is kept on one core that other processes use as well. From run to run, all durations vary at
random by up to a fifth. Each kind has a process of its own, and each run in it has a fresh loader.
A kind is right if at least 19 in 20 runs are, and if no two of its verdicts contradict each other.

Exit code: 0; 1 if a kind is not right; 2 if a run failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _fresh import run_anew
from _machine import describe_machine
from torch.utils.data import Dataset, Sampler

import shmloader
from shmloader.insight.stats import Finding

_RIGHT_SHARE = 0.95
_RUN_LIMIT_S = 600.0

#: Findings whose remedies are the opposite of each other.
CONTRADICTIONS = (
    {Finding.NOTHING_TO_GAIN, Finding.TOO_FEW_WORKERS},
    {Finding.CORES_BUSY, Finding.TOO_FEW_WORKERS},
    {Finding.INTERPRETER_LOCK, Finding.TOO_FEW_WORKERS},
)


class Samples(Dataset):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self._make = make
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class SlowSampler(Sampler[int]):
    """A sampler that sleeps before each index."""

    def __init__(self, length: int, each_s: float) -> None:
        self._length = length
        self._each_s = each_s

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for index in range(self._length):
            time.sleep(self._each_s)
            yield index


class SlowToPin:
    """A batch that sleeps when it is pinned."""

    def __init__(self, samples: list[int], pin_s: float) -> None:
        self._samples = samples
        self._pin_s = pin_s

    def pin_memory(self) -> SlowToPin:
        time.sleep(self._pin_s)
        return self


def take_epoch(
    dataset: Dataset,
    use: Callable[[Any], object] = id,
    *,
    epochs: int = 2,
    **arguments: Any,
) -> shmloader.LoaderStats:
    """Return the statistics of the last epoch. In a second epoch, workers run already."""
    arguments = {"num_workers": 2, "persistent_workers": epochs > 1, **arguments}
    with shmloader.DataLoader(dataset, **arguments) as loader:
        for _ in range(epochs):
            for batch in loader:
                use(batch)
                del batch
        return loader.stats()


def sleeping(seconds: float) -> Callable[[int], int]:
    """Return a function that makes a sample in so many seconds."""

    def make(index: int) -> int:
        time.sleep(seconds)
        return index

    return make


def quick(index: int) -> int:
    """Make a sample in no time."""
    return index


def run_too_few(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """Two workers, each sample takes 10 ms, and the training step is short."""
    step_s = vary(0.002)
    return take_epoch(Samples(sleeping(vary(0.01)), 80), lambda _: time.sleep(step_s))


def run_slow_collate(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """``collate_fn`` takes 20 ms."""
    collate_s = vary(0.02)

    def collate(samples: list[int]) -> torch.Tensor:
        time.sleep(collate_s)
        return torch.tensor(samples)

    dataset = Samples(sleeping(vary(0.001)), 100)
    return take_epoch(dataset, batch_size=4, collate_fn=collate)


def run_stragglers(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """One sample in sixteen takes 200 ms, the others 5 ms."""
    slow_s, others_s = vary(0.2), vary(0.005)

    def make(index: int) -> int:
        time.sleep(slow_s if index % 16 == 7 else others_s)
        return index

    return take_epoch(Samples(make, 64), num_workers=3)


def run_cores_taken(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """One worker computes on a core that two other processes use."""
    with one_core_with_others(2):
        return take_epoch(Samples(burning(vary(0.005)), 60), batch_size=2, num_workers=1)


def burning(seconds: float) -> Callable[[int], int]:
    """Return a function that makes a sample in so many seconds of Python code."""

    def make(index: int) -> int:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return index

    return make


def run_threads(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """Three threads run Python code, 10 ms for each sample."""
    return take_epoch(Samples(burning(vary(0.01)), 90), num_workers=3, thread_pool=True)


def run_waiting_threads(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """Eight threads wait, 4 ms for each sample."""
    dataset = Samples(sleeping(vary(0.004)), 1_280)
    return take_epoch(dataset, batch_size=16, num_workers=8, thread_pool=True)


@contextlib.contextmanager
def one_core_with_others(count: int) -> Iterator[None]:
    """Keep this process on one core on which other processes compute."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, before)


def run_pinning(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """Pinning a batch takes 20 ms."""
    pin_s = vary(0.02)
    return take_epoch(
        Samples(quick, 25),
        pin_memory=True,
        collate_fn=lambda samples: SlowToPin(samples, pin_s),
    )


def run_start_up(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """Workers take 300 ms to start, and twenty batches 2 ms each."""
    start_s = vary(0.3)
    return take_epoch(
        Samples(sleeping(vary(0.002)), 20), epochs=1, worker_init_fn=lambda _: time.sleep(start_s)
    )


def run_bursts(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """The consumer takes twelve batches, and then works for as long as these take."""
    each_s = vary(0.02)
    taken = itertools.count(1)
    return take_epoch(
        Samples(sleeping(each_s), 36),
        lambda _: time.sleep(12 * each_s if next(taken) % 12 == 6 else 0),
    )


def run_sampler(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """The sampler takes 10 ms for each index."""
    return take_epoch(Samples(quick, 40), sampler=SlowSampler(40, vary(0.01)))


def run_held_slots(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """The consumer keeps the last 24 batches of 16 MiB each, which are left unfilled."""
    kept: collections.deque[torch.Tensor] = collections.deque(maxlen=24)
    floats = int(vary(1 << 22))
    return take_epoch(Samples(lambda _: shmloader.empty(floats), 80), kept.append, batch_size=None)


def run_none(vary: Callable[[float], float]) -> shmloader.LoaderStats:
    """The training step takes 40 ms, and a batch 2 ms."""
    step_s = vary(0.04)
    return take_epoch(Samples(sleeping(vary(0.002)), 40), lambda _: time.sleep(step_s))


KINDS: dict[str, tuple[Callable[[Callable[[float], float]], shmloader.LoaderStats], Finding]] = {
    "too few workers": (run_too_few, Finding.TOO_FEW_WORKERS),
    "slow collate": (run_slow_collate, Finding.TOO_FEW_WORKERS),
    "stragglers": (run_stragglers, Finding.TOO_FEW_AHEAD),
    "cores taken by others": (run_cores_taken, Finding.CORES_BUSY),
    "threads": (run_threads, Finding.INTERPRETER_LOCK),
    "waiting threads": (run_waiting_threads, Finding.TOO_FEW_WORKERS),
    "pinning": (run_pinning, Finding.COPYING),
    "start-up": (run_start_up, Finding.START_UP),
    "bursts": (run_bursts, Finding.TOO_FEW_AHEAD),
    "sampler": (run_sampler, Finding.SAMPLER),
    "held slots": (run_held_slots, Finding.SLOTS_HELD),
    "none": (run_none, Finding.NOTHING_TO_GAIN),
}


def run_kind(kind: str, runs: int) -> dict[str, list[str]]:
    """Run loaders of one kind, and return the name of what was found in each run."""
    run, right = KINDS[kind]
    if kind == "pinning" and not torch.accelerator.is_available():
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.late import switch_on  # noqa: PLC0415 - a device for machines without one

        switch_on()
    found = []
    for number in range(runs):
        chance = random.Random(number)
        stats = run(lambda value, chance=chance: value * chance.uniform(0.8, 1.2))
        found.append(stats.finding.name)
        if stats.finding is not right:
            print(f"{kind}, run {number}:\n{stats}\n", file=sys.stderr)
    return {"found": found}


def main() -> int:
    """Run all kinds and print a table, or run one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--smallest", action="store_true", help="only check that it runs")
    parser.add_argument("--run", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_kind(options.run, options.runs)))
        return 0
    runs = 1 if options.smallest else options.runs
    print(describe_machine())
    print("\n| limit | right | verdicts | load before → after |\n|---|---|---|---|")
    all_right = True
    for kind in options.kinds:
        load = os.getloadavg()[0]
        arguments = [f"--run={kind}", f"--runs={runs}"]
        names = run_anew(__file__, arguments, _RUN_LIMIT_S)["found"]
        counts = collections.Counter(Finding[name] for name in names)
        right = counts[KINDS[kind][1]]
        contradicts = any(pair <= set(counts) for pair in CONTRADICTIONS)
        all_right &= right >= _RIGHT_SHARE * runs and not contradicts
        given = ", ".join(f"{finding.value}: {count}" for finding, count in counts.most_common())
        given += " (a contradiction)" if contradicts else ""
        print(
            f"| {kind} | {right} of {runs} | {given} | {load:.1f} → {os.getloadavg()[0]:.1f} |",
            flush=True,
        )
    return 0 if all_right or options.smallest else 1


if __name__ == "__main__":
    sys.exit(main())
