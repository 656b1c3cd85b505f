"""``num_workers="auto"``: workers come and go, and the batches stay the same."""

import multiprocessing
import os
import random
import time
import warnings
from typing import Any

import pytest
import torch

import shmloader.loader.dataloader as dataloader_module
from shmloader import DataLoader, ShardedDataLoader
from shmloader.pools import adapting
from tests.process.support import Calls, Streams, wait_until

pytestmark = pytest.mark.timeout(120)


def drawn(index: int) -> torch.Tensor:
    return torch.tensor([index, random.randrange(1 << 30), int(torch.randint(1 << 30, ()))])


def auto(length: int = 60, **options: Any) -> DataLoader:
    return DataLoader(
        Calls(drawn, length), batch_size=2, shuffle=True, num_workers="auto", seed=5, **options
    )


def contents(batches: Any) -> list[list[list[int]]]:
    return [batch.tolist() for batch in batches]


@pytest.fixture(autouse=True)
def _cores(monkeypatch) -> None:
    """Four, whatever the machine has: two workers at first, eight at most.

    Their number changes only where a test says so, or sets a shorter period.
    """
    monkeypatch.setattr(dataloader_module, "usable_cores", lambda _: 4)
    monkeypatch.setattr(adapting, "PERIOD_NS", 10**12)


@pytest.fixture
def expected() -> list[list[list[int]]]:
    return contents(DataLoader(Calls(drawn, 60), batch_size=2, shuffle=True, num_workers=3, seed=5))


def workers_alive() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"in_order": True}])
def test_batches_are_the_same_whatever_the_number(expected, options) -> None:
    before = workers_alive()
    with auto(**options) as loader:
        assert loader.num_workers == 2
        assert contents(loader) == expected
        loader.set_epoch(0)
        batches = iter(loader)
        given = []
        for count in (5, 8, 1, 1, 3, 2):
            loader._adapter.count = count
            given += [next(batches).tolist() for _ in range(4)]
            assert workers_alive() - before <= max(count, 8)
        given += contents(batches)
        assert given == expected


def test_workers_that_are_not_wanted_end_and_come_back() -> None:
    before = workers_alive()
    with auto(100_000) as loader:
        batches = iter(loader)
        for count in (6, 1, 4):
            loader._adapter.count = count

            def has_so_many(count: int = count) -> bool:
                next(batches)
                return workers_alive() - before == count

            wait_until(has_so_many)
        stats = loader.stats()
        assert stats.restarts == 0


def test_it_goes_up_for_slow_samples_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(adapting, "PERIOD_NS", 40_000_000)

    def slow(index: int) -> int:
        time.sleep(0.02)
        return index

    with DataLoader(Calls(slow, 100_000), num_workers="auto", seed=0) as loader:
        batches = iter(loader)
        given = []

        def has_more() -> bool:
            given.append(int(next(batches)))
            return loader.num_workers > 2

        wait_until(has_more, 30)
        assert loader.stats().num_workers == loader.num_workers
        assert given == list(range(len(given)))


def test_a_number_that_it_has_found_is_not_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with auto(persistent_workers=True) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        iter(loader)


def test_it_goes_down_where_workers_are_idle(monkeypatch) -> None:
    monkeypatch.setattr(adapting, "PERIOD_NS", 100_000_000)
    # On a busy machine even a batch that is ready takes its time to be handed over.
    monkeypatch.setattr(adapting, "_NEVER_WAITS", 0.3)
    with DataLoader(list(range(100_000)), num_workers="auto") as loader:
        batches = iter(loader)

        def has_fewer() -> bool:
            next(batches)
            time.sleep(0.01)
            return loader.num_workers == 1

        wait_until(has_fewer, 30)


def test_a_warning_where_content_may_depend_on_the_worker() -> None:
    with pytest.warns(UserWarning, match="num_workers='auto' lets any idle worker") as found:
        DataLoader(Calls(drawn, 4), num_workers="auto")
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(Calls(drawn, 4), num_workers="auto", seed=1)
        DataLoader(torch.arange(4), num_workers="auto")
        ShardedDataLoader(torch.arange(4), 1, num_workers="auto")


def test_a_sharded_loader_takes_it() -> None:
    loader = ShardedDataLoader(torch.arange(40), 2, num_workers="auto", num_shards=2)
    with loader:
        batches = iter(loader)
        next(batches)
        loader._adapter.count = 5
        assert len(list(batches)) == 9


def test_what_it_is_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers='auto' needs a map-style dataset"):
        DataLoader(Streams(lambda: iter(())), num_workers="auto")
    with pytest.raises(ValueError, match="num_workers='auto' cannot be combined with thread_pool"):
        DataLoader([1], num_workers="auto", thread_pool=True)
