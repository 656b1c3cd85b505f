"""Where the time goes: what loaders say of real epochs, with workers of every kind and in ranks."""

import dataclasses
import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from shmloader import DataLoader, LoaderStats, LoaderTimeoutError, ShardedDataLoader
from shmloader.insight import measurements
from shmloader.insight.ranks import RankStats
from shmloader.insight.stats import WaitStats
from tests.late import switched_on
from tests.process.support import Calls, Numbers, Streams, wait_until

pytestmark = pytest.mark.timeout(120)

KINDS: dict[str, dict[str, Any]] = {
    "in-process": {},
    "processes": {"num_workers": 2},
    "processes, any worker": {"num_workers": 2, "seed": 0, "in_order": False},
    "threads": {"num_workers": 2, "thread_pool": True},
}
SIZE = 40_000  # floats: large enough to be lent


def sample(index: int) -> torch.Tensor:
    return torch.full((SIZE,), float(index))


def loader_of(length: int = 21, **options: Any) -> DataLoader:
    return DataLoader(Calls(sample, length), batch_size=4, **options)


def at_work(stats: LoaderStats) -> list[int]:
    return [worker.batches for worker in stats.workers]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_counts_what_was_given(kind) -> None:
    with loader_of(**KINDS[kind]) as loader:
        given = [batch.sum().item() for batch in loader]
    assert len(given) == 6
    stats = loader.stats()
    assert (stats.batches, stats.samples, stats.epoch, stats.is_over) == (6, 21, 0, True)
    assert stats.kind == kind.split(",")[0]
    assert 21 * SIZE * 4 <= stats.nbytes <= 21 * SIZE * 4 + 6 * 4096
    assert stats.samples_per_s == pytest.approx(21 / stats.elapsed_s)
    assert 0 < stats.wait.total_s <= stats.elapsed_s
    assert stats.wait.share == pytest.approx(stats.wait.total_s / stats.elapsed_s)
    assert 0 < stats.wait.p50_s <= stats.wait.p99_s <= stats.wait.max_s
    assert stats.stages.fetch > 0
    assert stats.stages.collate > 0
    if stats.num_workers:
        assert sum(at_work(stats)) == 6
        assert len(stats.workers) == 2
        assert all(0 < worker.busy_share <= 1 for worker in stats.workers if worker.batches)
        assert sum(worker.cpu_s for worker in stats.workers) > 0
        spent_s = sum(worker.busy_s for worker in stats.workers)
        assert spent_s == pytest.approx(sum(stats.stages[4:7]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_epoch_and_all_of_them(kind) -> None:
    loader = loader_of(**KINDS[kind])
    assert loader.stats().batches == loader.stats("total").batches == 0
    with loader:
        for _ in loader:
            pass
        batches = iter(loader)
        next(batches)
        next(batches)
        running, total = loader.stats(), loader.stats("total")
        assert (running.batches, running.samples, running.epoch) == (2, 8, 1)
        assert not running.is_over
        assert (total.batches, total.samples, total.epoch, total.epochs) == (8, 29, None, 2)
        # One that was left early counts with what it gave.
        del batches
        for _ in loader:
            pass
        assert loader.stats().samples == 21
        assert loader.stats("total").samples == 50
    assert loader.stats().samples == 21
    after = loader.stats("total")
    assert (after.samples, after.epochs) == (50, 3)
    assert after.elapsed_s >= sum([loader.stats().elapsed_s, running.elapsed_s])
    assert sum(at_work(after)) == (after.batches if after.num_workers else 0)


def test_persistent_workers_are_the_same_over_all_epochs() -> None:
    with loader_of(num_workers=2, persistent_workers=True) as loader:
        pids = []
        for epoch in range(3):
            for _ in loader:
                pass
            stats = loader.stats()
            assert (stats.epoch, stats.batches, stats.samples) == (epoch, 6, 21)
            pids.append([worker.pid for worker in stats.workers])
        assert pids[0] == pids[1] == pids[2]
        total = loader.stats("total")
        for _ in range(3):
            next(iter(loader))  # an epoch that is left
        assert loader.stats("total").batches == 21
    assert total.batches == 18
    assert total.slots.lent + total.slots.copied == 18


@pytest.mark.parametrize("is_persistent", [False, True])
def test_memory_of_workers_is_known_while_they_live_and_after_a_long_epoch(
    monkeypatch, is_persistent
) -> None:
    def check() -> None:
        for worker in loader.stats().workers:
            assert (worker.pss_bytes or 0) > 1 << 20
            assert worker.pid not in (None, os.getpid())

    with loader_of(num_workers=2, persistent_workers=is_persistent) as loader:
        batches = iter(loader)
        next(batches)
        check()
        monkeypatch.setattr(measurements, "LONG_NS", 0)
        list(batches)
        check()


def test_a_worker_that_waits_is_not_busy() -> None:
    """While its batches are queued behind others, and while the consumer is away."""
    made = multiprocessing.RawValue("i", 0)

    def sample(index: int) -> int:
        time.sleep(0.01)
        made.value += 1
        return index

    began = time.monotonic()
    with DataLoader(Calls(sample, 32), num_workers=1, prefetch_factor=8) as loader:
        batches = iter(loader)
        for _ in range(16):
            next(batches)
        wait_until(lambda: made.value == 24)
        time.sleep(0.6)
        assert len(list(batches)) == 16
    elapsed_s = time.monotonic() - began
    (worker,) = loader.stats().workers
    assert 32 * 0.01 <= worker.busy_s < elapsed_s - 0.2
    assert worker.idle_s > 0.2


def test_slots_that_the_consumer_holds_are_copied_out() -> None:
    with loader_of(64, num_workers=2) as loader:
        kept = list(loader)
    assert len(kept) == 16
    slots = loader.stats().slots
    assert (slots.lent, slots.copied) == (4, 12)
    assert slots.count == 8
    assert slots.nbytes >= 5 * 4 * SIZE * 4


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("device", {"device": "late", "num_workers": 2}),
        ("device", {"device": "late", "num_workers": 2, "thread_pool": True}),
        ("pin", {"pin_memory": True, "num_workers": 2}),
        ("pin", {"pin_memory": True}),
    ],
)
def test_copies_are_a_stage(stage, options) -> None:
    with switched_on(), loader_of(**options) as loader:
        assert sum(1 for _ in loader) == 6
    stages = loader.stats().stages
    assert [stages.device > 0, stages.pin > 0] == [stage == "device", stage == "pin"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_start_up_is_a_part_of_the_wait(kind) -> None:
    """What the consumer does between ``iter()`` and its first ``next()`` is its own."""
    with loader_of(**KINDS[kind]) as loader:
        began_s = time.monotonic()
        batches = iter(loader)
        time.sleep(0.3)
        next(batches)
        elapsed_s = time.monotonic() - began_s
        wait = loader.stats().wait
        assert wait.total_s <= elapsed_s - 0.3
        assert 0 < wait.startup_s == pytest.approx(wait.total_s)
        list(batches)
        assert loader.stats().wait.startup_s == wait.startup_s


def test_an_iterable_dataset_counts_the_samples_that_came() -> None:
    loader = DataLoader(Streams(lambda: iter(range(10))), batch_size=4, num_workers=2)
    with loader:
        assert sum(len(batch) for batch in loader) == 20
    assert (loader.stats().batches, loader.stats().samples) == (6, 20)
    with DataLoader(Calls(lambda index: [index] * 3, 5), batch_size=None, num_workers=1) as loader:
        assert len(list(loader)) == 5
    assert loader.stats().samples == 5  # without batching, each item is a sample


@pytest.mark.parametrize("kind", ["in-process", "processes", "threads"])
def test_failures_are_counted(kind) -> None:
    with DataLoader(Numbers(20, 3, 5), batch_size=5, on_error="skip", **KINDS[kind]) as loader:
        assert sum(len(batch) for batch in loader) == 18
    assert (loader.stats().failures, loader.stats().samples) == (2, 18)
    with DataLoader(Numbers(20, 3), batch_size=5, **KINDS[kind]) as loader:
        batches = iter(loader)
        with pytest.raises(LookupError):
            next(batches)
        assert len(list(batches)) == 3
    assert (loader.stats().failures, loader.stats().batches) == (1, 3)


def test_statistics_are_frozen_and_travel() -> None:
    with loader_of() as loader:
        for _ in loader:
            pass
    stats = loader.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.batches = 7  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(stats)) == stats
    with pytest.raises(ValueError, match="epoch' or 'total', but got of='all'"):
        loader.stats("all")  # type: ignore[arg-type]


RANKS = 3


def run_rank(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    loader = ShardedDataLoader(torch.arange(RANKS * 8 * 2), 2, timeout=0)
    for epoch in range(2):
        for step, _ in enumerate(loader):
            if step == rank:
                break  # so that ranks differ
        found = loader.stats(ranks=True)
        assert [one.batches for one in found.ranks] == [1, 2, 3]
        assert [one.epoch for one in found.ranks] == [epoch] * RANKS
        assert found.ranks[rank].wait == loader.stats().wait
    total = loader.stats("total", ranks=True)
    assert [one.batches for one in total.ranks] == [2, 4, 6]
    (folder / f"rank{rank}.json").write_text(json.dumps(total.to_dict()))
    dist.barrier()
    dist.destroy_process_group()


def test_each_rank_gets_the_statistics_of_all(tmp_path) -> None:
    torch.multiprocessing.start_processes(run_rank, (tmp_path,), RANKS, start_method="fork")
    found = [(tmp_path / f"rank{rank}.json").read_text() for rank in range(RANKS)]
    assert found[0] == found[1] == found[2]
    assert json.loads(found[0])["ranks"][2]["samples"] == 12


def wait_alone(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    loader = ShardedDataLoader(Calls(int, 8), num_workers=1, timeout=0.2)
    if rank == 0:
        with pytest.raises(LoaderTimeoutError, match=r"rank 0 waits until all ranks call stats"):
            loader.stats(ranks=True)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_does_not_call_is_a_timeout(tmp_path) -> None:
    torch.multiprocessing.start_processes(wait_alone, (tmp_path,), 2, start_method="fork")


def test_without_a_group_there_is_an_error_or_one_rank() -> None:
    loader = ShardedDataLoader([0, 1], rank=1, world_size=2)
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group\(\) before"):
        loader.stats(ranks=True)
    alone = ShardedDataLoader([0, 1])
    list(alone)
    found = alone.stats(ranks=True)
    assert (len(found.ranks), found.slowest, found.waited_most) == (1, None, 0)


def stats_of(*waits_s: float, elapsed_s: float = 10.0) -> RankStats:
    def one(wait_s: float) -> Any:
        return LoaderStats(batches=5, elapsed_s=elapsed_s, wait=WaitStats(total_s=wait_s))

    return RankStats(tuple(map(one, waits_s)))


@pytest.mark.parametrize(
    ("waits_s", "waited_most", "slowest"),
    [((0.1, 4.0), 1, 1), ((2.0, 2.4), 1, None), ((1, 9, 1, 8), 1, 1), ((3, 3, 3), 0, None)],
)
def test_the_others_wait_for_a_rank_whose_wait_stands_out(waits_s, waited_most, slowest) -> None:
    found = stats_of(*waits_s)
    assert (found.waited_most, found.slowest) == (waited_most, slowest)
    held_up = f"The others waited for rank {slowest}, which" if slowest else "No rank held up"
    assert found.verdict.startswith(held_up)
    assert str(found).endswith(found.verdict)
    assert str(found).count("\n") == len(waits_s) + 4
