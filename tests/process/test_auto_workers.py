"""``num_workers="auto"``: workers are added, and the batches stay the same."""

import contextlib
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
        for count in (3, 5, 4, 8):
            loader._adapter.count = count
            given += [next(batches).tolist() for _ in range(4)]
            assert workers_alive() - before <= 8
        given += contents(batches)
        assert given == expected


@pytest.mark.parametrize("is_persistent", [False, True])
def test_the_next_epoch_begins_with_those_that_helped(is_persistent) -> None:
    before = workers_alive()
    with auto(100_000, persistent_workers=is_persistent) as loader:
        batches = iter(loader)
        for wanted, present in ((5, 5), (4, 5)):
            loader._adapter.count = wanted

            def has_so_many(wanted: int = wanted, present: int = present) -> bool:
                next(batches)
                counts = loader.num_workers, loader.stats().num_workers, workers_alive() - before
                return counts == (wanted, present, present)

            wait_until(has_so_many)
        batches = None
        batches = iter(loader)
        next(batches)
        kept = 5 if is_persistent else 4
        assert (workers_alive() - before, loader.num_workers) == (kept, kept)
        assert loader.stats().restarts == 0


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


@pytest.mark.parametrize("step_s", [0, 0.005])
def test_it_finds_about_as_many_as_help(monkeypatch, step_s) -> None:
    """One sample at a time is loaded, or two suffice: more workers make nothing faster."""
    monkeypatch.setattr(adapting, "PERIOD_NS", 100_000_000)
    lock = multiprocessing.get_context("fork").Lock()

    def sample(index: int) -> int:
        with lock if not step_s else contextlib.nullcontext():
            time.sleep(0.005)
        return index

    with DataLoader(Calls(sample, 400), num_workers="auto", seed=0) as loader:
        for _ in loader:
            time.sleep(step_s)
        assert loader.num_workers <= 3


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
    loader = ShardedDataLoader(torch.arange(40), 4, num_workers="auto")
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
