"""Where any worker may make any batch: idle ones take the oldest tasks; workers may be added."""

import multiprocessing
import os
import random
import re
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shmloader.loader.dataloader as dataloader_module
from shmloader import DataLoader, ShardedDataLoader, WorkerDiedError, messages
from shmloader.pools import adapting, process
from shmloader.pools import worker as program
from shmloader.pools.status_page import FIRST_TASK, NO_TASK, RECEIVING
from shmloader.pools.worker import _Client
from tests.process.support import Calls, Gate, Streams, Switch, only, wait_for_end, wait_until


def make(function, length, **options):
    """A loader whose batches do not depend on the worker: each sample has random generators."""
    defaults = {"num_workers": 2, "prefetch_factor": 4, "collate_fn": only, "seed": 0}
    return DataLoader(Calls(function, length), **{**defaults, **options})


class Loads:
    """How often each index was loaded, and by whom last; seen by workers and the test alike."""

    def __init__(self, length: int) -> None:
        self.counts = multiprocessing.RawArray("i", length)
        self.pids = multiprocessing.RawArray("i", length)

    def note(self, index: int) -> None:
        self.counts[index] += 1
        self.pids[index] = os.getpid()

    @property
    def begun(self) -> list[int]:
        return [index for index, count in enumerate(self.counts) if count]


def large(index: int) -> torch.Tensor:
    return torch.full((17_000,), index, dtype=torch.int32)  # lent, not copied out


@pytest.mark.parametrize("in_order", [True, False])
def test_one_slow_sample_holds_up_nobody(in_order) -> None:
    gate, loads = Gate(), Loads(20)

    def sample(index):
        loads.note(index)
        if index == 0:
            gate.pass_through()
        return index

    batches = iter(make(sample, 20, in_order=in_order))
    wait_until(lambda: len(loads.begun) == 8)  # the whole window
    slow, *others = loads.pids[:8]
    assert slow not in others
    assert len(set(others)) == 1
    if not in_order:
        assert [next(batches) for _ in range(19)] == list(range(1, 20))
        gate.open()
        assert list(batches) == [0]
    else:
        gate.open()
        assert list(batches) == list(range(20))
    assert list(loads.counts) == [1] * 20


@pytest.mark.parametrize("in_order", [True, False])
def test_workers_go_on_while_the_user_does_not_ask(in_order) -> None:
    loads = Loads(40)

    def sample(index):
        loads.note(index)
        return large(index)

    batches = iter(make(sample, 40, in_order=in_order))
    wait_until(lambda: loads.begun == list(range(8)))
    first = next(batches)
    wait_until(lambda: loads.begun == list(range(9)))
    assert len(batches._engine.scheduler.slots.lent_ids) == 1, "the one in hand, and no more"
    seen = [int(first[0])]
    del first
    seen.extend(int(batch[0]) for batch in batches)
    assert sorted(seen) == list(range(40))
    assert not in_order or seen == sorted(seen)


def test_an_idle_worker_finds_a_task_for_which_another_was_woken(monkeypatch) -> None:
    monkeypatch.setattr(program, "watch_queue", lambda *_: None)  # no wake-up reaches these workers
    batches = iter(make(int, 20, timeout=30))
    page = batches._pool._page
    for index in range(20):
        if index == 1:
            wait_until(lambda: all(page.held(worker) == NO_TASK for worker in range(2)))
        assert next(batches) == index


def test_no_thread_of_ours_runs() -> None:
    before = threading.enumerate()
    iterators = [
        iter(DataLoader(Calls(int, 8), num_workers=2)),
        iter(DataLoader(Calls(int, 8), num_workers=2, in_order=False, sample_timeout=60)),
    ]
    assert threading.enumerate() == before
    for iterator in iterators:
        assert len(list(iterator)) == 8


@pytest.mark.parametrize("in_order", [True, False])
def test_more_tasks_than_the_kernel_takes_wait_and_are_made(in_order) -> None:
    options = {"prefetch_factor": 200, "batch_size": 300, "collate_fn": torch.tensor}
    gate = Gate()

    def sample(index):
        if index < 600:
            gate.pass_through()
        return index

    batches = iter(make(sample, 300 * 400, in_order=in_order, **options))
    gate.open(600)
    seen = [int(batch[0]) for batch in batches]
    assert sorted(seen) == list(range(0, 300 * 400, 300))
    assert not in_order or seen == sorted(seen)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_replaced_worker_gets_what_the_lost_one_had_begun_and_nothing_else(
    in_order, caplog
) -> None:
    switch, gate, loads = Switch(is_on=True), Gate(), Loads(20)

    def sample(index):
        loads.note(index)
        if index == 0 and switch:
            gate.pass_through()
            os._exit(3)
        return index

    loader = make(sample, 20, worker_restarts=1, in_order=in_order)
    batches = iter(loader)
    wait_until(lambda: len(loads.begun) == 8)
    gate.open()
    wait_for_end(loads.pids[0])
    switch.turn(on=False)
    seen = list(batches)
    assert sorted(seen) == list(range(20))
    assert not in_order or seen == sorted(seen)
    assert list(loads.counts) == [2] + [1] * 19
    (text,) = [record.getMessage() for record in caplog.records if record.name == "shmloader"]
    assert re.search(r"Worker [01] is replaced\. Batches loaded again: 0", text)


def test_a_worker_says_that_it_may_receive_a_task_and_then_which_it_has(monkeypatch) -> None:
    is_silent, gate, serve = Switch(is_on=False), Gate(), _Client.serve

    def look(client: _Client, data: bytes) -> None:
        if data[0] == messages.TASK and client.line.held[0] != RECEIVING:
            is_silent.turn(on=True)
        serve(client, data)

    def sample(index):
        gate.pass_through()
        return index

    monkeypatch.setattr(_Client, "serve", look)
    batches = iter(make(sample, 8))
    page = batches._pool._page
    wait_until(lambda: {page.held(0), page.held(1)} == {FIRST_TASK, FIRST_TASK + 1})
    gate.open(8)
    assert list(batches) == list(range(8))
    assert not is_silent


def test_a_worker_that_dies_while_it_receives_loses_nothing(monkeypatch) -> None:
    """Whether it has received a task cannot be seen, so it is found out."""
    switch = Switch(is_on=True)
    take = _Client.serve

    def die(client: _Client, data: bytes) -> None:
        if client._sockets[1:] and switch:
            switch.turn(on=False)
            client.line.held[0] = RECEIVING
            os._exit(3)
        take(client, data)

    monkeypatch.setattr(_Client, "serve", die)
    assert list(make(int, 20, worker_restarts=1)) == list(range(20))


def test_a_worker_that_is_stopped_while_it_receives_is_replaced(monkeypatch) -> None:
    monkeypatch.setattr(process, "_RECEIVING_S", 0.1)
    stops, dies = Switch(is_on=True), Switch(is_on=True)
    take = _Client.serve

    def stop(client: _Client, data: bytes) -> None:
        if client._sockets[1:] and stops:
            stops.turn(on=False)
            client.line.held[0] = RECEIVING
            os.kill(os.getpid(), signal.SIGSTOP)
        take(client, data)

    def sample(index):
        wait_until(lambda: not stops)
        if dies:
            dies.turn(on=False)
            os._exit(3)
        return index

    monkeypatch.setattr(_Client, "serve", stop)
    assert list(make(sample, 20, worker_restarts=2)) == list(range(20))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_worker_without_a_task_that_dies_for_good_is_reported(in_order) -> None:
    batches = iter(make(int, 100, prefetch_factor=1, in_order=in_order))
    next(batches)
    wait_until(lambda: batches._pool.wait(0, batches._engine) or True)
    os.kill(batches._workers[1].pid, signal.SIGKILL)
    wait_for_end(batches._workers[1].pid)
    with pytest.raises(WorkerDiedError, match="Killed"):
        list(batches)


@pytest.mark.parametrize("in_order", [True, False])
def test_when_all_workers_die_nobody_waits(in_order) -> None:
    batches = iter(make(lambda index: os._exit(3), 20, in_order=in_order))
    for worker in batches._workers:
        wait_for_end(worker.pid)
    with pytest.raises(WorkerDiedError, match=r"was loading batch [01] "):
        next(batches)


class Drawn(TensorDataset):
    """May draw."""


def set_nothing(worker_id: int) -> None:
    """May make the workers' arrays differ."""


def to_list(samples: list[tuple[torch.Tensor]]) -> list[tuple[torch.Tensor]]:
    """May draw."""
    return samples


ARRAYS = TensorDataset(torch.arange(20))


@pytest.mark.parametrize(
    ("dataset", "options", "is_queued"),
    [
        (ARRAYS, {}, True),
        (torch.arange(20), {"shuffle": True}, True),
        (Drawn(torch.arange(20)), {}, False),
        (ARRAYS, {"worker_init_fn": set_nothing}, False),
        (ARRAYS, {"collate_fn": to_list}, False),
        (ARRAYS, {"num_workers": 1}, False),
    ],
)
def test_batches_of_arrays_are_made_by_any_worker(dataset, options, is_queued) -> None:
    with DataLoader(dataset, 3, **{"num_workers": 2, **options}) as loader:
        batches = iter(loader)
        assert batches._pool.has_queue is is_queued
        assert sum(1 for _ in batches) == len(loader)


def test_arrays_whose_indexing_was_replaced_are_not(monkeypatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: torch.rand(1))
    with DataLoader(ARRAYS, 3, num_workers=2) as loader:
        assert not iter(loader)._pool.has_queue


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
