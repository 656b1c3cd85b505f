"""Where any worker will do, an idle one takes the oldest ticket, also while the user trains."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from shmloader import (
    DataLoader,
    LoaderTimeoutError,
    WorkerDiedError,
)
from shmloader.device import staged_engine
from shmloader.engine import routing
from shmloader.pools import waker, worker_channels
from shmloader.pools import worker_processes as processes
from tests.process.support import (
    Calls,
    Gate,
    Switch,
    only,
    wait_for_end,
    wait_until,
)


class AnyWorker(DataLoader):
    """A loader whose batches do not depend on the worker, as with random streams per sample."""

    _dispatches_dynamically = True


def make(function, length, **options):
    defaults = {"num_workers": 2, "prefetch_factor": 4, "collate_fn": only}
    return AnyWorker(Calls(function, length), **{**defaults, **options})


@pytest.fixture(autouse=True)
def one_task(monkeypatch) -> None:
    """A worker holds one task, however short the batches are."""
    monkeypatch.setattr(routing, "_SHORT_NS", 0)


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


# Who gets what ----------------------------------------------------------------------------


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
    gate.close()


def test_while_batches_are_short_one_more_waits_behind_a_slow_one(monkeypatch) -> None:
    monkeypatch.setattr(routing, "_SHORT_NS", 10**18)
    gate, loads = Gate(), Loads(20)

    def sample(index):
        loads.note(index)
        if index == 0:
            gate.pass_through()
        return index

    batches = iter(make(sample, 20))
    wait_until(lambda: len(loads.begun) == 7)
    scheduler = batches._engine._scheduler
    wait_until(lambda: [scheduler.workers[worker].in_flight for worker in (0, 1)] == [2, 0])
    gate.open()
    assert list(batches) == list(range(20))
    gate.close()


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
    scheduler = batches._engine._scheduler
    wait_until(lambda: [ticket.answer is None for ticket in scheduler.tickets] == [False] * 7)
    assert scheduler.slots.lent_count == 2, "the one in hand, one that is built ahead, and no more"
    seen = [int(first[0])]
    del first
    seen.extend(int(batch[0]) for batch in batches)
    assert sorted(seen) == list(range(40))
    assert not in_order or seen == sorted(seen)


def test_a_wake_is_not_lost_that_comes_before_the_wait() -> None:
    gate = Gate()
    dataset = Calls(lambda index: gate.pass_through(), 4)
    with DataLoader(dataset, num_workers=1, collate_fn=only) as loader:
        batches = iter(loader)
        pool = batches._pool._workers
        pool.enable_wake()
        pool.wake()
        began = time.monotonic()
        assert pool.wait(20) == []
        assert time.monotonic() - began < 10
        gate.open(4)
        assert len(list(batches)) == 4
    gate.close()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("num_workers", "prefetch_factor"), [(2, 4), (1, 1)])
def test_whoever_takes_a_batch_wakes_the_engine_if_it_has_use_for_what_that_brings(
    num_workers, prefetch_factor, in_order, monkeypatch
) -> None:
    monkeypatch.setattr(worker_channels, "SIGNAL_S", 1e3)  # else it looks about by itself
    loads = Loads(60)

    def sample(index):
        loads.note(index)
        return index

    options = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
    batches = iter(make(sample, 60, in_order=in_order, **options))
    seen = []
    for taken in range(52):
        window = num_workers * prefetch_factor
        wait_until(lambda count=window + taken: len(loads.begun) == count)
        seen.append(next(batches))  # all workers are idle
    seen.extend(batches)
    assert sorted(seen) == list(range(60))


def test_whoever_takes_a_batch_wakes_nobody_while_all_workers_have_their_tasks(
    monkeypatch,
) -> None:
    monkeypatch.setattr(worker_channels, "SIGNAL_S", 1e3)
    first, second, loads, wakes = Gate(), Gate(), Loads(20), []
    for name in ("wake", "wake_soon"):
        wake = getattr(processes.WorkerProcesses, name)
        monkeypatch.setattr(
            processes.WorkerProcesses, name, lambda pool, wake=wake: wakes.append(1) or wake(pool)
        )

    def sample(index):
        loads.note(index)
        if index in (0, 3):
            (second if index else first).pass_through()
        return index

    batches = iter(make(sample, 20, in_order=False))
    wait_until(lambda: loads.begun == [0, 1, 2, 3])
    assert next(batches) == 1
    inbox = batches._source.owner.thread.inbox
    wait_until(lambda: not inbox.is_awaited and batches._source.owner.thread.results)
    count = len(wakes)
    assert next(batches) == 2
    assert inbox, "nobody has looked for it"
    assert len(wakes) == count
    first.open()
    second.open()
    assert sorted(batches) == [0, *range(3, 20)]
    first.close()
    second.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_while_the_user_is_away_the_engine_is_woken_in_a_moment(in_order, monkeypatch) -> None:
    monkeypatch.setattr(worker_channels, "SIGNAL_S", 1e3)
    monkeypatch.setattr(staged_engine, "_STEP_NS", -1)  # as if each step were long
    monkeypatch.setattr(waker, "_SOON_NS", 10**15)  # and the moment never came
    loads = Loads(40)

    def sample(index):
        loads.note(index)
        return index

    batches = iter(make(sample, 40, in_order=in_order, timeout=10))
    wait_until(lambda: len(loads.begun) == 8)
    pool, scheduler = batches._pool, batches._engine._scheduler
    # The engine's thread has taken all answers, and waits: nothing but a ticket can wake it.
    wait_until(lambda: all(ticket.answer is not None for ticket in scheduler.tickets))
    wait_until(lambda: batches._source.owner.thread.results and pool.waiter.is_waiting)
    seen = [next(batches)]
    pool = batches._pool._workers
    assert pool._waker.is_due
    assert len(loads.begun) == 8, "the engine's thread was not woken"
    # Whoever has to wait for a batch wakes it at once.
    seen.extend(batches)
    assert sorted(seen) == list(range(40))
    assert not in_order or seen == sorted(seen)


def test_round_robin_has_no_thread() -> None:
    loaders = [
        DataLoader(Calls(int, 8), num_workers=2),
        DataLoader(Calls(int, 8), num_workers=1, in_order=False),
    ]
    iterators = [iter(loader) for loader in loaders]
    names = [thread.name for thread in threading.enumerate()]
    assert "shmloader_engine" not in names
    iterators.append(iter(DataLoader(Calls(int, 8), num_workers=2, in_order=False)))
    assert "shmloader_engine" in [thread.name for thread in threading.enumerate()]
    for iterator in iterators:
        assert len(list(iterator)) == 8


# Deaths -----------------------------------------------------------------------------------


def dying(at, switch, gate=None):
    """Index `at` kills its worker for as long as the switch is on."""

    def sample(index):
        if index == at and switch:
            if gate is not None:
                gate.pass_through()
            os._exit(3)
        return index

    return sample


@pytest.mark.parametrize("in_order", [True, False])
def test_a_replaced_worker_gets_what_the_lost_one_had_begun_and_nothing_else(
    in_order, caplog
) -> None:
    switch, gate, loads = Switch(is_on=True), Gate(), Loads(20)
    die = dying(0, switch, gate)

    def sample(index):
        loads.note(index)
        return die(index)

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
    assert "replaces worker 0 and loads its unfinished batches again: 0" in text
    gate.close()


def test_what_waited_behind_the_batch_that_killed_goes_to_those_who_live(monkeypatch) -> None:
    monkeypatch.setattr(routing, "_SHORT_NS", 10**18)
    switch, gate, loads = Switch(is_on=True), Gate(), Loads(20)
    die = dying(0, switch, gate)

    def sample(index):
        loads.note(index)
        return die(index)

    loader = make(sample, 20, worker_restarts=1)
    batches = iter(loader)
    scheduler = batches._engine._scheduler
    wait_until(lambda: len(loads.begun) == 7)  # of 8: one waits behind the first
    wait_until(lambda: [scheduler.workers[worker].in_flight for worker in (0, 1)] == [2, 0])
    (behind,) = set(range(8)) - set(loads.begun)
    killed, survivor = loads.pids[0], loads.pids[1]
    gate.open()
    wait_for_end(killed)
    # The user's thread has not replaced anybody yet.
    wait_until(lambda: loads.counts[behind] == 1)
    assert loads.pids[behind] == survivor
    switch.turn(on=False)
    assert list(batches) == list(range(20))
    gate.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_when_all_workers_die_nobody_waits(in_order) -> None:
    batches = iter(make(lambda index: os._exit(3), 20, in_order=in_order))
    for worker in batches._workers:
        wait_for_end(worker.pid)
    with pytest.raises(WorkerDiedError, match=r"was loading batch [01] "):
        next(batches)


def test_a_replacement_takes_its_part_of_the_rest() -> None:
    """Both are lost and replaced, so that nobody else could."""
    switches, loads = [Switch(is_on=True), Switch(is_on=True)], Loads(20)

    def sample(index):
        loads.note(index)
        if index < 2 and switches[index]:
            switches[index].turn(on=False)
            os._exit(3)
        return index

    assert list(make(sample, 20, worker_restarts=2)) == list(range(20))
    assert list(loads.counts) == [2, 2] + [1] * 18


# Ends and epochs --------------------------------------------------------------------------


def test_tickets_without_a_worker_are_dropped_with_their_epoch() -> None:
    gate, loads, epochs = Gate(), Loads(40), iter([range(20), range(20, 40)])

    class Sampler:
        def __iter__(self):
            return iter(next(epochs))

    def sample(index):
        loads.note(index)
        if index < 2:
            gate.pass_through()
        return index

    loader = make(sample, 40, sampler=Sampler(), persistent_workers=True)
    scheduler = iter(loader)._engine._scheduler
    wait_until(lambda: loads.begun == [0, 1])
    assert len(scheduler._waiting) == 6

    def open_when_the_epoch_is_left() -> None:
        with contextlib.suppress(AssertionError):  # what is loaded tells
            wait_until(lambda: not scheduler._waiting)
        gate.open(2)

    opening = threading.Thread(target=open_when_the_epoch_is_left)
    opening.start()
    assert list(loader) == list(range(20, 40))
    opening.join()
    assert loads.begun == [0, 1, *range(20, 40)]
    loader.close()
    gate.close()


# Timeouts and Ctrl-C ----------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
def test_a_timeout_says_what_waits_for_a_worker(in_order) -> None:
    gate, loads = Gate(), Loads(8)

    def sample(index):
        loads.note(index)
        gate.pass_through()
        return index

    batches = iter(make(sample, 8, prefetch_factor=2, timeout=0.2, in_order=in_order))
    wait_until(lambda: loads.begun == [0, 1])
    with pytest.raises(LoaderTimeoutError) as raised:
        next(batches)
    head, *work = [line for line in str(raised.value).splitlines() if line[0] != " "]
    assert "Batch 0 (index 0) is with worker 0 (pid " in head
    assert [line[:8] for line in work] == ["Worker 0", "Worker 1"]
    for seq in (2, 3):
        assert (f"Batch {seq} (index {seq}) waits for a worker." in head) == (not in_order)
    gate.open(8)
    seen: list[int] = []
    while len(seen) < 8:
        with contextlib.suppress(LoaderTimeoutError):
            seen.append(next(batches))
    assert sorted(seen) == list(range(8))
    gate.close()


def test_a_stopped_worker_that_has_nothing_in_hand_holds_up_nobody() -> None:
    loads, seen = Loads(12), []

    def sample(index):
        loads.note(index)
        return index

    def all_is_loaded() -> bool:
        is_begun = len(loads.begun) == min(12, 8 + len(seen))  # the window
        return is_begun and all(ticket.answer is not None for ticket in scheduler.tickets)

    batches = iter(make(sample, 12, timeout=0.5))
    scheduler = batches._engine._scheduler
    wait_until(all_is_loaded)
    pid = batches._workers[1].pid
    os.kill(pid, signal.SIGSTOP)
    while len(seen) < 12:
        seen.append(next(batches))
        wait_until(all_is_loaded)
    assert seen == list(range(12))
    os.kill(pid, signal.SIGCONT)
    assert next(batches, None) is None
