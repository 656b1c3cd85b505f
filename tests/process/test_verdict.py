"""Each rule of the verdict, in a loader that is brought into that situation.

Datasets and consumers take time by sleeping, so that the machine's other work changes little. Where
cores are what is missing, this process and its workers are kept on one of them.
``benchmarks/verdicts.py`` runs many loaders of each kind; ``tests/unit/insight/test_verdict.py``
has the rules on written-down measurements.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from shmloader import DataLoader, LoaderStats
from shmloader.insight.stats import Finding
from shmloader.insight.verdict import judged
from tests.late import switched_on
from tests.made_up import System
from tests.process.support import Calls
from tests.process.test_memory_limits import Limited, make_system

pytestmark = pytest.mark.timeout(120)

LONG_S = 0.03
# Long beside what a busy machine takes to wake somebody, which is told as a want of cores.
LONGER_S = 0.1


def slow(index: int) -> int:
    time.sleep(LONGER_S)
    return index


def quick(index: int) -> int:
    return index


def second_epoch(loader: DataLoader, use: Callable[[Any], object] = id) -> LoaderStats:
    """What is said of an epoch that finds its workers ready.

    Samples and consumers that sleep need no cores. What they lack of them is another program's
    doing, such as another test's, and is left out.
    """
    with loader:
        for _ in range(2):
            for batch in loader:
                use(batch)
        stats = loader.stats()
    workers = tuple(dataclasses.replace(worker, stalled_s=0.0) for worker in stats.workers)
    return judged(dataclasses.replace(stats, workers=workers))


def check(stats: LoaderStats, finding: Finding, *words: str) -> None:
    assert stats.finding is finding, str(stats)
    for word in words:
        assert word in stats.verdict


def test_too_few_workers() -> None:
    stats = second_epoch(DataLoader(Calls(slow, 8), num_workers=1, persistent_workers=True))
    check(stats, Finding.TOO_FEW_WORKERS, "in the dataset", "Your loop waited ")
    more = dataclasses.replace(stats, machine=dataclasses.replace(stats.machine, cores=16))
    assert judged(more).verdict.endswith("Raise num_workers above 1: there are 16 cores.")
    # These workers sleep, and leave the cores alone.
    fewer = dataclasses.replace(stats, machine=dataclasses.replace(stats.machine, cores=1))
    assert judged(fewer).verdict.endswith("Raise num_workers above 1.")


class Heavy:
    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def pin_memory(self) -> Heavy:
        time.sleep(LONGER_S)
        return self

    def to(self, device: object, non_blocking: bool = False) -> Heavy:
        time.sleep(LONGER_S)
        return self


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pin_memory": True}, "while a batch was being pinned. Give device="),
        ({"device": "late"}, "while a batch was copied to the device"),
    ],
)
def test_slow_copies(options, words) -> None:
    with switched_on():
        stats = second_epoch(
            DataLoader(
                Calls(quick, 12),
                num_workers=1,
                persistent_workers=True,
                collate_fn=Heavy,
                **options,
            )
        )
    check(stats, Finding.COPYING, words)


def test_start_up() -> None:
    with DataLoader(
        Calls(quick, 8), num_workers=1, worker_init_fn=lambda _: time.sleep(0.3)
    ) as loader:
        list(loader)
        check(loader.stats(), Finding.START_UP, "while workers started or ended.")
        assert "persistent_workers" not in loader.stats().verdict  # it may be the only epoch
        list(loader)
        check(loader.stats(), Finding.START_UP, "Set persistent_workers=True")
    check(loader.stats("total"), Finding.START_UP, "Set persistent_workers=True")


def test_memory_near_the_cap() -> None:
    part = torch.zeros(1_000_000, dtype=torch.uint8)
    with DataLoader(
        Calls(lambda _: part, 8), batch_size=None, num_workers=1, shm_size=6 << 20
    ) as loader:
        for _ in loader:
            pass
    check(loader.stats(), Finding.MEMORY, "1.0 MB of the 1.0 MB that shm_size leaves")


def test_memory_near_the_limit_of_the_control_group(tmp_path) -> None:
    system: System = make_system(tmp_path, 64 << 20)
    with Limited(system, Calls(quick, 8), num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        assert loader.stats().finding is not Finding.MEMORY
        system.group_v2("/job", 1 << 30, (1 << 30) - 4096)
        check(loader.stats(), Finding.MEMORY, "limit of the control group /job")


def test_no_workers() -> None:
    stats = second_epoch(DataLoader(Calls(slow, 4)))
    check(stats, Finding.TOO_FEW_WORKERS, "Raise num_workers above 0: there ", "in the dataset")


def test_handing_over_what_is_drawn_slowly() -> None:
    def draw() -> Iterator[int]:
        for index in range(16):
            time.sleep(LONG_S)
            yield index

    stats = second_epoch(
        DataLoader(Calls(quick, 16), sampler=Drawn(draw), num_workers=2, persistent_workers=True)
    )
    check(stats, Finding.SAMPLER, "batch_sampler")


class Drawn(Sampler[int]):
    def __init__(self, draw: Callable[[], Iterator[int]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        return self._draw()
