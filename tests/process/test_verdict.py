"""Each rule of the verdict, in a loader that is brought into that situation.

Datasets and consumers take time by sleeping, so that the machine's other work changes little. Where
cores are what is missing, this process and its workers are kept on one of them.
``benchmarks/verdicts.py`` runs many loaders of each kind; ``tests/unit/insight/test_verdict.py``
has the rules on written-down measurements.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler, Subset

from shmloader import DataLoader, LoaderStats
from shmloader.insight.stats import Finding
from shmloader.insight.verdict import judged
from tests.late import switched_on
from tests.process.support import Calls, Streams

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
    # Nothing has to be started or ended here, either.
    wait = dataclasses.replace(stats.wait, causes=stats.wait.causes._replace(start=0.0, end=0.0))
    return judged(dataclasses.replace(stats, workers=workers, wait=wait))


def check(stats: LoaderStats, finding: Finding, *words: str) -> None:
    assert stats.finding is finding, str(stats)
    for word in words:
        assert word in stats.verdict


def test_too_few_workers() -> None:
    stats = second_epoch(DataLoader(Calls(slow, 8), num_workers=1, persistent_workers=True))
    check(stats, Finding.TOO_FEW_WORKERS, "in the dataset", "Your loop waited ")
    more = dataclasses.replace(stats, cores=16)
    assert judged(more).verdict.endswith("Raise num_workers above 1: there are 16 cores.")
    # These workers sleep, and leave the cores alone.
    fewer = dataclasses.replace(stats, cores=1)
    assert judged(fewer).verdict.endswith("above 1, also beyond the cores: waiting needs none.")


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


@pytest.mark.parametrize("options", [{}, {"thread_pool": True}, {"num_workers": "auto", "seed": 1}])
def test_samples_that_wait_may_be_loaded_at_the_same_time(options) -> None:
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, **options}
    stats = second_epoch(DataLoader(Calls(slow, 16), **options))
    check(stats, Finding.TOO_FEW_WORKERS, "waited in the dataset", "Give fetch_concurrency=4, if")
    stats = second_epoch(DataLoader(Calls(slow, 16), fetch_concurrency=4, **options))
    check(stats, Finding.TOO_FEW_WORKERS, "num_workers")
    assert "fetch_concurrency" not in stats.verdict


class InOneCall(Calls):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("dataset", "options", "at_once"),
    [
        (Calls(quick, 4), {}, 1),
        (Calls(quick, 4), {"fetch_concurrency": 2}, 2),
        (Subset(Calls(quick, 4), range(2)), {}, 1),
        (Calls(quick, 4), {"batch_size": None}, 0),
        (Streams(lambda: iter(range(4))), {}, 0),
        (torch.arange(4), {}, 0),
        (InOneCall(quick, 4), {}, 0),
        (Subset(InOneCall(quick, 4), range(2)), {}, 0),
        (InOneCall(quick, 4), {"seed": 1}, 1),
        (Calls(quick, 4), {"num_workers": 0}, 0),
    ],
)
def test_samples_are_loaded_at_once_where_a_worker_loads_them_one_by_one(
    dataset, options, at_once
) -> None:
    with DataLoader(dataset, **{"num_workers": 1, **options}) as loader:
        list(loader)
        assert loader.stats().fetch_concurrency == at_once


@pytest.mark.parametrize("in_order", [True, False])
def test_a_worker_that_has_all_slow_batches(in_order) -> None:
    dataset = Calls(lambda index: time.sleep(LONG_S * (index % 2)) or index, 40)
    options = {"num_workers": 2, "persistent_workers": True, "in_order": in_order}
    stats = second_epoch(DataLoader(dataset, **options))
    if in_order:
        check(stats, Finding.TOO_FEW_AHEAD, "for a slow batch", "Set in_order=False, if the order")
    else:
        check(stats, Finding.TOO_FEW_WORKERS, "Raise num_workers")


class SlowToUnpickle:
    def __reduce__(self) -> tuple[Any, ...]:
        return slow, (0,)


def test_objects_that_are_unpickled_slowly() -> None:
    options = {"num_workers": 2, "persistent_workers": True, "collate_fn": lambda samples: samples}
    stats = second_epoch(DataLoader(Calls(lambda _: SlowToUnpickle(), 8), **options))
    check(stats, Finding.DELIVERY, "handed over. Have collate_fn return few tensors or arrays")


def test_a_slow_transform_on_the_cpu() -> None:
    options = {"num_workers": 2, "persistent_workers": True, "device": "cpu"}
    stats = second_epoch(DataLoader(Calls(quick, 8), device_transform=lambda _: slow(0), **options))
    check(stats, Finding.DELIVERY, "thread called device_transform. Do its work in the dataset")


def burn(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def test_other_threads_of_the_process_are_told_from_the_loops() -> None:
    with DataLoader(Calls(quick, 2), num_workers=1) as loader:
        for _ in loader:
            burn(0.02)
            other = threading.Thread(target=burn, args=(0.05,))
            other.start()
            other.join()
        stats = loader.stats()
    assert stats.consumer_cpu_s >= 0.04
    assert stats.cpu_s - stats.consumer_cpu_s >= 0.1


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
