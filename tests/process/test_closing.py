"""Ends that the user makes: break, del, close, with, exhaustion; and what remains (I8)."""

import gc
import multiprocessing
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from shmloader import ClosedLoaderError, DataLoader, WorkerDiedError, threads
from shmloader.pools import thread as thread_pool
from tests.late import to_host
from tests.process.support import (
    TOLD_S,
    Calls,
    Gate,
    Streams,
    in_thread,
    only,
    outcomes,
    stack_of,
    wait_for_end,
    wait_until,
)


def large(index: int) -> torch.Tensor:
    return torch.full((50_000,), float(index))


def numbers(batch: torch.Tensor) -> list[int]:
    assert all(len(row.unique()) == 1 for row in batch)
    return [int(row[0]) for row in batch]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", range(1, 8))
def test_break_and_start_again_with_streams_about_to_end(length) -> None:
    loader = DataLoader(
        Streams(lambda: iter(range(length))), num_workers=2, collate_fn=only,
        persistent_workers=True,
    )  # fmt: skip
    whole = [n for n in range(length) for _ in range(2)]
    for stop in range(length):
        for place, _ in enumerate(loader):
            if place == stop:
                break
        assert list(loader) == whole


# How batches are made → options of the loader.
KINDS: dict[str, dict[str, Any]] = {
    "processes": {},
    "a queue": {"in_order": False},
    "threads": {"thread_pool": True},
    "pinned": {"pin_memory": True},
    "a device": {"device": "late"},
}


def ours() -> list[str]:
    threads = [one.name for one in threading.enumerate()]
    names = [name for name in threads if name.startswith(("shmloader", "pt_data_pin"))]
    return [*names, *(one.name for one in multiprocessing.active_children())]


@pytest.mark.usefixtures("late", "no_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_dropping_the_iterator_ends_all_that_it_has_started(kind, slots) -> None:
    batches = iter(DataLoader(Calls(large, 100), num_workers=2, **KINDS[kind]))
    next(batches)
    assert len(ours()) >= 2
    del batches
    wait_until(lambda: not ours())
    assert slots.maps() == {}


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", KINDS)
def test_close_may_be_called_again_and_ends_everything(kind) -> None:
    loader = DataLoader(Calls(large, 100), num_workers=2, **KINDS[kind])
    first, second = iter(loader), iter(loader)
    kept = [next(first), next(second), next(second)]
    for _ in range(3):
        loader.close()
        assert ours() == []
    for batches in (first, second):
        for _ in range(10):
            with pytest.raises(ClosedLoaderError):
                next(batches)
    with pytest.raises(ClosedLoaderError):
        iter(loader)
    numbers_kept = [numbers(to_host(batch)) for batch in kept]
    assert numbers_kept == [[0], [0], [1]] or kind in ("a queue", "threads")


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "seed": 0}])
def test_what_is_closed_says_so_and_what_to_do(options) -> None:
    loader = DataLoader(Calls(int, 8), **options)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(ClosedLoaderError) as caught:
        next(iterator)
    assert str(caught.value) == (
        "the iterator is closed: close() was called on it or on its loader. Begin a new epoch with "
        "iter(loader), or create a new loader if that is closed as well."
    )
    for use in (iter, lambda loader: loader.load_state_dict(loader.state_dict())):
        with pytest.raises(ClosedLoaderError) as caught:
            use(loader)
        assert str(caught.value) == (
            "the loader is closed: close() was called, or its with block has ended. Create a new "
            "loader."
        )


def test_with_closes_the_loader_also_when_the_block_raises() -> None:
    loader = DataLoader(Calls(large, 9), num_workers=2)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match="invalid for input"), loader:
        next(batches).view(3)
    with pytest.raises(ClosedLoaderError):
        next(batches)
    with pytest.raises(ClosedLoaderError):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("in_order", [False, True])
def test_batches_that_are_ready_are_not_given_out_after_close(workers, in_order, slots) -> None:
    loader = DataLoader(
        Calls(large, 20), num_workers=workers, in_order=in_order,
        **({"prefetch_factor": 4} if workers else {}),
    )  # fmt: skip
    batches = iter(loader)
    next(batches)
    if workers:
        engine = batches._engine
        wait_until(lambda: _take_all(engine) == 4 * workers)
    assert bool(slots.maps()) == bool(workers)
    loader.close()
    assert slots.maps() == {}  # though the iterator lives
    for _ in range(20):
        with pytest.raises(ClosedLoaderError):
            next(batches)


def _take_all(engine: Any) -> int:
    engine._pool.wait(0, engine)
    return sum(ticket.answer is not None for ticket in engine.scheduler.tickets)


def test_an_iterator_whose_worker_died_is_garbage_when_it_is_dropped() -> None:
    class Model:
        """Something of the user's that the traceback of the error holds."""

    def train(model: Model) -> None:
        list(DataLoader(Calls(lambda n: os._exit(1), 4), num_workers=1))

    model = Model()
    reference = weakref.ref(model)
    with pytest.raises(WorkerDiedError):
        train(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_closed_loader_that_is_kept_does_not_take_descriptors_from_new_workers() -> None:
    """A closed loader's descriptor numbers belong to somebody else by now."""
    first = DataLoader(Calls(large, 8), num_workers=4)
    batches = iter(first)
    next(batches)
    pool = batches._pool
    numbers_before = {worker.pidfd for worker in pool.handles}
    first.close()
    theirs = []
    while not numbers_before <= set(theirs):
        theirs.append(os.memfd_create("users"))
    expected = {fd: os.fstat(fd).st_ino for fd in theirs}

    def sample(index: int) -> int:
        assert {fd: os.fstat(fd).st_ino for fd in theirs} == expected
        return index

    try:
        assert list(DataLoader(Calls(sample, 4), num_workers=2, collate_fn=only)) == [0, 1, 2, 3]
    finally:
        for fd in theirs:
            os.close(fd)


def test_one_of_several_iterators_may_be_dropped() -> None:
    loader = DataLoader(Calls(large, 8), batch_size=2, num_workers=2)
    first, second, third = iter(loader), iter(loader), iter(loader)
    assert numbers(next(first)) == numbers(next(second)) == numbers(next(third)) == [0, 1]
    second._shutdown_workers()
    assert numbers(next(first)) == [2, 3]
    del first
    assert [numbers(batch) for batch in third] == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(ClosedLoaderError):
        next(second)


@pytest.mark.filterwarnings("ignore:.*datapipes.*")
@pytest.mark.parametrize("persists", [False, True])
def test_torchs_workers_for_a_data_pipe_end_with_the_loader(persists) -> None:
    loader = DataLoader(IterableWrapper(range(6)), num_workers=1, persistent_workers=persists)
    assert [int(batch) for batch in loader] == list(range(6))
    iterator = iter(loader)
    assert next(iterator) == 0
    (worker,) = iterator._workers
    loader.close()
    assert not worker.is_alive()


def test_a_second_loader_does_not_hold_the_memory_of_the_first(slots) -> None:
    first = DataLoader(Calls(large, 40), num_workers=2)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    foreign = set(slots.maps())
    assert foreign
    second = DataLoader(Calls(large, 40), num_workers=2)
    others = iter(second)
    for worker in others._workers:
        next(others)  # this worker's: it has come to its loop
        assert not foreign & set(slots.maps(worker.pid))
    first.close()
    second.close()


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", KINDS)
def test_close_from_another_thread_ends_a_next_that_waits(kind, monkeypatch) -> None:
    monkeypatch.setattr(thread_pool, "_JOIN_S", 0.1)
    gate, main = Gate(), threading.main_thread()

    def sample(index: int) -> torch.Tensor:
        if index:
            gate.pass_through()
        return large(index)

    loader = DataLoader(Calls(sample, 6), num_workers=1, **KINDS[kind])
    batches = iter(loader)
    assert numbers(to_host(next(batches))) == [0]

    def close() -> None:
        waits = {"_wait_for_result", "wait"}
        wait_until(lambda: waits & {*stack_of(main.ident)})
        loader.close()

    began = time.monotonic()
    with in_thread(close), pytest.raises(ClosedLoaderError):
        next(batches)
    assert time.monotonic() - began < 2 * TOLD_S
    gate.open(5)
    wait_until(lambda: threading.active_count() == 1)


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("what", ["drop", "close", "next", "iter"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_leaves_its_parent_s_loader_alone(kind, what, monkeypatch) -> None:
    """It would take answers that the parent waits for, and wait for threads that it has not."""
    monkeypatch.setattr(thread_pool, "_JOIN_S", 60)
    loader = DataLoader(
        Calls(large, 12), batch_size=2, num_workers=2, persistent_workers=True, **KINDS[kind]
    )
    batches = iter(loader)
    seen = [numbers(to_host(next(batches)))]
    with threads.all_parked():  # the stage's thread: here, the fork is not to meet it in a call
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if what == "close":
                    loader.close()
                elif what != "drop":
                    with pytest.raises(ClosedLoaderError, match="process that made it"):
                        next(batches) if what == "next" else iter(loader)
                del batches, loader
                gc.collect()
                code = 0
            finally:
                os._exit(code)
    wait_for_end(pid, 20)
    assert os.waitpid(pid, 0)[1] == 0
    seen += [numbers(to_host(batch)) for batch in batches]
    assert sorted(seen) == [[n, n + 1] for n in range(0, 12, 2)]


def test_close_ends_workers_at_once_though_a_forked_child_holds_their_sockets() -> None:
    gate = Gate()
    loader = DataLoader(Calls(large, 12), num_workers=2)
    batches = iter(loader)
    next(batches)
    batches._pool._grace_s = 30  # until they are told by a signal
    pid = os.fork()
    if pid == 0:
        try:
            gate.pass_through()
        finally:
            os._exit(0)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 20
    gate.open()
    os.waitpid(pid, 0)


def test_a_key_that_cannot_be_pickled_in_mid_epoch_raises_and_the_rest_does_not_hang() -> None:
    keys: list[Any] = [0, 1, 2, 3, 4, threading.Lock(), 6, 7]
    loader = DataLoader(Calls(lambda key: key, 8), sampler=keys, batch_size=None, num_workers=2)
    seen = outcomes(loader, most=12)
    assert TypeError in map(type, seen)
