"""An engine has a thread of its own only while tickets may have to wait for a worker."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from shmloader import ClosedLoaderError, DataLoader, PipelineBuilder
from shmloader.device.thread import EngineThread
from shmloader.engine import routing
from tests.process.support import (
    Bad,
    Gate,
    Numbers,
    Switch,
    assert_refused_in_child,
    only,
    wait_for_end,
    wait_until,
)
from tests.process.test_dynamic_dispatch import AnyWorker, large, make

SHORT, LONG = 10**18, 0


@pytest.fixture(autouse=True)
def pace(monkeypatch) -> Callable[[int], None]:
    """Sets up to which time a batch is short: at first, all are."""

    def set_pace(limit_ns: int) -> None:
        monkeypatch.setattr(routing, "_SHORT_NS", limit_ns)

    set_pace(SHORT)
    return set_pace


def has_thread(batches: Any) -> bool:
    is_on_thread = batches._source is not batches._engine
    assert is_on_thread == (batches._staged.owner.thread is not None)
    return is_on_thread


def take(batches: Any, count: int) -> list[int]:
    return [int(next(batches)[0]) for _ in range(count)]


@pytest.mark.parametrize("in_order", [True, False])
def test_while_batches_are_short_there_is_none(in_order) -> None:
    batches = iter(make(large, 60, prefetch_factor=2, in_order=in_order))
    assert has_thread(batches), "the time for a batch is not known yet"
    seen = take(batches, 20)
    assert not has_thread(batches)
    seen += take(batches, 40)
    assert sorted(seen) == list(range(60))
    assert not in_order or seen == sorted(seen)
    assert next(batches, None) is None
    assert next(batches, None) is None


def test_it_stays_where_the_workers_have_no_room_for_all_tickets() -> None:
    batches = iter(make(large, 60, prefetch_factor=4))
    assert take(batches, 30) == list(range(30))
    assert has_thread(batches)
    assert take(batches, 30) == list(range(30, 60))


@pytest.mark.parametrize("in_order", [True, False])
def test_it_comes_back_when_batches_become_long_and_stays_for_the_epoch(in_order, pace) -> None:
    loader = make(large, 60, prefetch_factor=2, in_order=in_order, persistent_workers=True)
    for _ in range(2):
        pace(SHORT)
        batches = iter(loader)
        seen = take(batches, 20)
        assert not has_thread(batches)
        pace(LONG)
        seen += take(batches, 10)
        assert has_thread(batches)
        pace(SHORT)
        seen += take(batches, 20)
        assert has_thread(batches)
        seen += take(batches, 10)
        assert sorted(seen) == list(range(60))
        assert not in_order or seen == sorted(seen)
        assert next(batches, None) is None
    loader.close()


def test_what_is_ready_comes_first(monkeypatch) -> None:
    """The thread ends while it has a batch, which it has built when it was told to end."""
    stop, stopped = EngineThread.stop, []

    def stop_late(thread: EngineThread, timeout_s: float | None) -> bool:
        if not stopped:
            stopped.append(thread)
            wait_until(lambda: thread.results.first)
        return stop(thread, timeout_s)

    batches = iter(make(large, 60, prefetch_factor=2))
    monkeypatch.setattr(EngineThread, "stop", stop_late)
    assert take(batches, 60) == list(range(60))
    assert stopped
    assert next(batches, None) is None


def test_as_long_as_one_is_ready_it_stays() -> None:
    batches = iter(make(large, 60, prefetch_factor=2))
    seen = []
    for _ in range(10):
        wait_until(lambda: batches._staged.owner.thread.results.first)
        seen += take(batches, 1)
        assert has_thread(batches)
    seen += take(batches, 50)
    assert seen == list(range(60))


@pytest.mark.parametrize("in_order", [True, False])
def test_epochs_of_the_same_workers_begun_anew_at_any_place(in_order) -> None:
    loader = make(large, 30, prefetch_factor=2, persistent_workers=True, in_order=in_order)
    for count in (30, 3, 0, 30, 1, 12, 30):
        batches = iter(loader)
        seen = take(batches, count)
        if count == 30:
            assert next(batches, None) is None
            assert sorted(seen) == list(range(30))
        assert not in_order or seen == list(range(count))
    loader.close()


class Raises:
    """A sampler that raises at one place, and goes on."""

    def __init__(self, length: int, at: int) -> None:
        self.length, self.at = length, at

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return RaisesOnce(self.length, self.at)


class RaisesOnce:
    def __init__(self, length: int, at: int) -> None:
        self.numbers, self.left = iter(range(length)), at

    def __iter__(self) -> RaisesOnce:
        return self

    def __next__(self) -> int:
        self.left -= 1
        if self.left == -1:
            raise Bad("of the sampler")
        return next(self.numbers)


def read_on(batches: Any) -> list[object]:
    """What comes, and what is raised in between."""
    found: list[object] = []
    while True:
        try:
            found.append(int(next(batches)))
        except StopIteration:
            return found
        except Bad as error:
            found.append(str(error))


@pytest.mark.parametrize("at", range(4, 12))
def test_what_the_sampler_raises_comes_where_it_does_without_a_thread(at) -> None:
    options = {"num_workers": 2, "sampler": Raises(20, at), "collate_fn": only}
    found = read_on(iter(AnyWorker(Numbers(20), **options)))
    assert found == read_on(iter(DataLoader(Numbers(20), **options)))
    assert "of the sampler" in found


@pytest.mark.parametrize("in_order", [True, False])
def test_tickets_in_place_of_batches_that_are_left_out(in_order) -> None:
    bad = [1, 2, 3, 4, 5, 6, 11, 12, 13, 29]
    options = {"num_workers": 2, "on_error": "skip", "collate_fn": only, "in_order": in_order}
    found = read_on(iter(AnyWorker(Numbers(30, *bad), **options)))
    assert sorted(found) == [number for number in range(30) if number not in bad]


def test_an_iterator_that_is_dropped_ends_though_the_sampler_holds_the_loader() -> None:
    class Sampler:
        loader = None

        def __iter__(self) -> Any:
            return iter(range(1000))

    sampler = Sampler()
    options = {"sampler": sampler, "persistent_workers": True, "prefetch_factor": 2}
    loader = sampler.loader = make(large, 1000, **options)
    batches = iter(loader)
    take(batches, 20)
    assert not has_thread(batches)
    workers, seen = [worker.pid for worker in batches._workers], weakref.ref(batches)
    del loader, batches, sampler, options
    gc.collect()
    assert seen() is None
    for pid in workers:
        wait_for_end(pid)


@pytest.mark.parametrize("taken", [1, 20])
def test_an_iterator_that_is_dropped_ends_without_the_collector(taken) -> None:
    gc.collect()
    gc.disable()
    try:
        batches = iter(make(large, 1000, prefetch_factor=2))
        take(batches, taken)
        workers = [worker.pid for worker in batches._workers]
        del batches
        for pid in workers:
            wait_for_end(pid)
    finally:
        gc.enable()


def test_a_source_of_a_pipeline_keeps_its_thread() -> None:
    """A background thread, which runs the pipeline, waits for no other one."""
    loader = AnyWorker(Numbers(200), num_workers=2, collate_fn=only)
    pipeline = PipelineBuilder().add_source(loader).add_sink(4).build(num_threads=1)
    with pipeline.auto_stop():
        assert list(pipeline) == list(range(200))


def test_where_the_system_refuses_a_thread_the_user_s_goes_on(pace, monkeypatch) -> None:
    batches = iter(make(large, 60, prefetch_factor=2))
    seen = take(batches, 20)
    assert not has_thread(batches)

    def refuse(thread: EngineThread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(EngineThread, "start", refuse)
    pace(LONG)
    seen += take(batches, 40)
    assert not has_thread(batches)
    assert seen == list(range(60))
    assert next(batches, None) is None


def test_in_a_forked_child_the_iterator_belongs_to_another_process(pace) -> None:
    batches = iter(make(large, 60, prefetch_factor=2))
    take(batches, 20)
    for limit_ns in (SHORT, LONG):  # in the second child, there should be a thread
        pace(limit_ns)
        batches._engine._scheduler.task_limit = 1 if limit_ns == LONG else 2
        assert_refused_in_child(batches)
    assert take(batches, 40) == list(range(20, 60))


def test_a_worker_that_dies_meanwhile_is_replaced() -> None:
    batches = iter(make(large, 60, prefetch_factor=2, worker_restarts=1))
    seen = take(batches, 20)
    assert not has_thread(batches)
    victim = psutil.Process(batches._workers[0].pid)
    victim.kill()
    seen += take(batches, 40)
    assert seen == list(range(60))


def test_close_from_another_thread_ends_a_next_that_waits() -> None:
    gate, waits = Gate(), Switch(is_on=False)

    def sample(index: int) -> Any:
        if index == 30:
            waits.turn(on=True)
            gate.pass_through()
        return large(index)

    loader = make(sample, 60, prefetch_factor=2)
    batches = iter(loader)
    take(batches, 25)
    assert not has_thread(batches)

    def close() -> None:
        wait_until(lambda: waits)
        loader.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(ClosedLoaderError):
        take(batches, 10)
    closer.join()
    gate.close()
