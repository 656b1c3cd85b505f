"""Workers that are started one after the other, as each is ready.

Most of it under fork, where starting is quick, with the rule replaced that all start at once there.
"""

from __future__ import annotations

import gc
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import shmloader.fronts.iterator
import shmloader.fronts.recipe
from shmloader import ClosedLoaderError, DataLoader, WorkerDiedError
from tests.process.support import Calls, Streams, descriptor_count, only, wait_until

pytestmark = pytest.mark.timeout(90)

STAGES = pytest.mark.parametrize("staged", [False, True], ids=["plain", "staged"])


@pytest.fixture
def one_first(monkeypatch) -> None:
    """One worker is started; the others when another one is ready."""
    monkeypatch.setattr(shmloader.fronts.iterator, "first_workers", lambda *_: 1)


def drawn(index: int) -> tuple[int, int, float]:
    """What torch's and random's streams of the worker give."""
    return index, int(torch.randint(1 << 30, ())), random.random()


def counted() -> Iterator[str]:
    worker_id = torch.utils.data.get_worker_info().id
    return (f"{worker_id}: {n}" for n in range(5))


def pids(batches: Any) -> list[int]:
    return [process.pid for process in batches._workers]


def run(loader_type: Any, takes: list[int], **options: Any) -> list[list[Any]]:
    torch.manual_seed(5)
    loader = loader_type(
        Calls(drawn, 20), num_workers=4, persistent_workers=True, collate_fn=only, **options
    )
    found = []
    for take in takes:
        batches = iter(loader)
        found.append([next(batches) for _ in range(take)])
    del batches
    return found


@pytest.mark.usefixtures("one_first")
@STAGES
def test_batches_are_torch_s_though_workers_come_one_by_one(kind, staged) -> None:
    """Left after one batch, when most have not come: they still load what they were to load."""
    takes = [1, 20, 3, 20]
    expected = run(torch.utils.data.DataLoader, takes)
    assert run(DataLoader, takes, **(kind.options if staged else {})) == expected


@pytest.mark.usefixtures("one_first")
@pytest.mark.parametrize("any_worker", [False, True])
def test_each_is_started_when_the_one_before_is_ready(any_worker) -> None:
    seed = {"seed": 1} if any_worker else {}
    loader = DataLoader(Calls(lambda n: n, 40), num_workers=4, collate_fn=only, **seed)
    batches = iter(loader)
    assert len(pids(batches)) == 1
    assert next(batches) == 0
    assert list(batches) == list(range(1, 40))
    assert len(set(pids(batches))) == 4


@pytest.mark.usefixtures("one_first")
@pytest.mark.parametrize("in_order", [False, True])
def test_a_stream_goes_on_in_workers_that_come_later(in_order) -> None:
    def make(state: dict[str, Any] | None = None) -> DataLoader[Any]:
        loader = DataLoader(Streams(counted), num_workers=3, collate_fn=only, in_order=in_order)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    expected = list(make())
    loader = make()
    batches = iter(loader)
    begun = [next(batches) for _ in range(4)]
    rest = list(make(loader.state_dict()))
    order = list if in_order else sorted
    assert order(begun + rest) == order(expected)


@pytest.mark.usefixtures("one_first")
def test_what_starts_a_worker_is_let_go_with_the_last_start() -> None:
    loader = DataLoader(Calls(lambda n: n, 40), num_workers=3, collate_fn=only)
    batches = iter(loader)
    assert batches._pool._payload is not None
    assert sum(1 for _ in batches) == 40
    assert batches._pool._payload is None


@pytest.mark.usefixtures("one_first")
@STAGES
def test_a_worker_that_cannot_be_started_later_is_an_error_of_next(kind, staged) -> None:
    before = descriptor_count()
    options = kind.options if staged else {}
    loader = DataLoader(Calls(lambda n: n, 40), num_workers=3, collate_fn=only, **options)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    batches = iter(loader)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
        with pytest.raises(OSError, match=r"no worker process could be started.*ulimit -n"):
            list(batches)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(ClosedLoaderError):
        next(batches)
    del batches, loader
    gc.collect()  # the error's traceback, too
    wait_until(lambda: descriptor_count() <= before)


@pytest.mark.usefixtures("one_first")
def test_closing_while_workers_wait_to_be_started() -> None:
    before = descriptor_count()
    loader = DataLoader(Calls(lambda n: n, 40), num_workers=3, collate_fn=only)
    batches = iter(loader)
    [pid] = pids(batches)
    loader.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ClosedLoaderError):
        next(batches)
    del batches, loader
    assert descriptor_count() == before


@pytest.mark.usefixtures("one_first")
@pytest.mark.parametrize("restarts", [0, 1])
def test_the_death_of_one_that_gets_ready(restarts, tmp_path) -> None:
    """It is told at once; or replaced, and the others are started."""
    mark = tmp_path / "died"

    def die_once(worker_id: int) -> None:
        if worker_id == 0 and not mark.exists():
            mark.touch()
            os._exit(3)

    loader = DataLoader(
        Calls(lambda n: n, 12), num_workers=3, collate_fn=only, worker_init_fn=die_once,
        worker_restarts=restarts,
    )  # fmt: skip
    batches = iter(loader)
    if not restarts:
        with pytest.raises(WorkerDiedError, match="exit code 3"):
            list(batches)
        return
    assert list(batches) == list(range(12))


def test_the_rule(monkeypatch) -> None:
    monkeypatch.setattr(shmloader.fronts.recipe, "usable_cores", lambda _: 2)
    expected = {("fork", 0): 5, ("spawn", 0): 2, ("forkserver", 0): 2, ("spawn", 9): 5}
    for (method, timeout), count in expected.items():
        loader = DataLoader(
            Calls(lambda n: n, 8), num_workers=5, multiprocessing_context=method, timeout=timeout
        )
        assert shmloader.fronts.recipe.first_workers(loader, Path("/")) == count


def test_under_spawn_there_are_batches_before_all_workers_are_there(monkeypatch) -> None:
    monkeypatch.setattr(shmloader.fronts.recipe, "usable_cores", lambda _: 1)
    loader = DataLoader(
        Calls(abs, 6), num_workers=3, collate_fn=only, multiprocessing_context="spawn"
    )
    batches = iter(loader)
    assert len(pids(batches)) == 1
    assert next(batches) == 0
    assert len(pids(batches)) == 2
    assert list(batches) == [1, 2, 3, 4, 5]
    assert len(pids(batches)) == 3
