"""Workers that are threads (``thread_pool=True``): batches, errors, time, ends; beside torch."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.utils.data
from torch.utils.data import get_worker_info

import shmloader.engine.delivery
import shmloader.engine.engine
import shmloader.loader.iterator
import shmloader.pools.thread
from shmloader import ClosedLoaderError, DataLoader, LoaderTimeoutError, empty, threads
from tests.late import to_host
from tests.parity.compare import assert_same
from tests.process.bytecodes import PACKAGE, interrupt
from tests.process.support import (
    Calls,
    descriptor_count,
    however_late,
    in_thread,
    last_line,
    only,
    outcomes,
    stack_of,
    wait_until,
)

TorchLoader = torch.utils.data.DataLoader


def sample(index: int) -> torch.Tensor:
    return torch.full((17_000,), index, dtype=torch.int32)


def make(dataset: Any = 24, **options: Any) -> DataLoader:
    """A loader on two threads; of numbers, if only their count is given."""
    if isinstance(dataset, int):
        dataset = Calls(int, dataset)
    return DataLoader(
        dataset, **{"num_workers": 2, "collate_fn": only, "thread_pool": True, **options}
    )


def ours() -> list[str]:
    names = sorted(thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("shmloader_") and name[10:].isdigit()]


class Held:
    """A function of an index that waits, for these indices, until it is let go.

    Attributes:
        entered: Set when one of them waits.
        go: Lets all of them go on.
        seen: All indices, in the order in which they were begun.
    """

    def __init__(self, *held: int, make: Any = int) -> None:
        self.held = held
        self.make = make
        self.entered = threading.Event()
        self.go = threading.Event()
        self.seen: list[int] = []

    def __call__(self, index: int) -> Any:
        self.seen.append(index)
        if index in self.held:
            self.wait_here()
        return self.make(index)

    def wait_here(self) -> None:
        self.entered.set()
        assert self.go.wait(30)


@pytest.fixture
def held() -> Any:
    """Makes a :class:`Held`, which is let go at the end at the latest."""
    made: list[Held] = []

    def hold(*indices: int, **options: Any) -> Held:
        made.append(Held(*indices, **options))
        return made[-1]

    yield hold
    for one in made:
        one.go.set()


def mixed(index: int) -> Any:
    return {
        "image": torch.arange(12.0).reshape(3, 4) * index,
        "array": np.full(5, index, dtype=np.int16),
        "pair": (index, float(index)),
        "text": str(index),
    }


class Together(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [torch.tensor([index, len(indices)]) for index in indices]


CASES: dict[str, Any] = {
    "by default": {},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "shuffled": {"shuffle": True, "batch_size": 4},
    "no batching": {"batch_size": None},
    "keys": {"sampler": [3, 1, 2, 3], "batch_size": 3},
    "batch_sampler": {"batch_sampler": [[1, 2], [], [3]], "collate_fn": list},
    "collate_fn": {"batch_size": 3, "collate_fn": lambda samples: samples[::-1]},
    "together": {"dataset": Together(), "batch_size": 4},
    "nothing": {"dataset": Calls(mixed, 0)},
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_torch_s_bit_for_bit(case, workers) -> None:
    found = []
    for loader_type, options in (
        (DataLoader, {"num_workers": workers, "thread_pool": True}),
        (TorchLoader, {"num_workers": 0}),
    ):
        options["generator"] = torch.Generator().manual_seed(3)
        loader = loader_type(**{"dataset": Calls(mixed, 10), **CASES[case], **options})
        found.append([list(loader) for _ in range(2)])
        assert len(found[-1][0]) == len(loader)
    assert_same(found[0], found[1])


def test_nothing_is_seeded() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    assert len(list(make(8, shuffle=True))) == 8
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_batches_are_ordinary_memory_of_this_process(slots) -> None:
    infos = []

    def ask(index: int) -> torch.Tensor:
        infos.append(get_worker_info())
        return sample(index)

    def collate(samples: list[torch.Tensor]) -> Any:
        infos.append(get_worker_info())
        out = empty((len(samples), 17_000), dtype=torch.int32)
        return torch.stack(samples, out=out), torch.utils.data.default_collate(samples)

    descriptors, children = descriptor_count(), psutil.Process().children()
    loader = make(Calls(ask, 12), batch_size=2, collate_fn=collate)
    batches = iter(loader)
    first = next(batches)
    assert (slots.maps(), slots.files()) == ({}, {})
    # A thread at work may just be reading how long it has waited for a core.
    wait_until(lambda: descriptor_count() == descriptors)
    assert psutil.Process().children() == children
    for mine, theirs in [first, *batches]:
        assert torch.equal(mine, theirs)
        assert not mine.is_shared()
        assert not theirs.is_shared()
    assert infos == [None] * 18
    things = [threading.Lock(), object(), lambda: 0, type("Local", (), {})]
    assert list(make(Calls(things.__getitem__, 4))) == things


@pytest.mark.usefixtures("no_collector")
def test_a_batch_is_the_user_s_alone() -> None:
    class Thing:
        """Something that is seen to go."""

    # Without the GIL, CPython leaves it to the thread that made an object to free it, which that
    # thread does when it runs next.
    is_freed_by_its_maker = not getattr(sys, "_is_gil_enabled", lambda: True)()
    loader = make(Calls(lambda index: Thing(), 9), num_workers=1, persistent_workers=True)
    batches = iter(loader)
    things: list[weakref.ref[Thing]] = []
    for number in range(9):
        things.append(weakref.ref(next(batches)))
        if not is_freed_by_its_maker:
            wait_until(lambda: things[-1]() is None)
        elif 0 < number < 7:  # next() has sent the thread another ticket
            wait_until(lambda: things[-2]() is None)
    loader.close()
    assert [thing() for thing in things] == [None] * 9


def test_as_many_threads_load_as_were_asked_for() -> None:
    together = threading.Barrier(5)

    def meet(index: int) -> str:
        together.wait(20)
        return threading.current_thread().name

    loader = make(Calls(meet, 10), num_workers=5)
    batches = iter(loader)
    assert {next(batches) for _ in range(5)} == {f"shmloader_{number}" for number in range(5)}
    for thread in threading.enumerate():
        if thread.name in ours():
            comm = Path(f"/proc/self/task/{thread.native_id}/comm").read_text()
            assert comm == f"{thread.name}\n"
    assert len(list(batches)) == 5


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_is_called_once_in_each_thread_before_its_first_batch(persistent) -> None:
    here = threading.local()
    called = []

    def begin(worker_id: int) -> None:
        called.append(worker_id)
        here.number = worker_id

    def tell(index: int) -> tuple[str, int]:
        return threading.current_thread().name, here.number

    loader = make(Calls(tell, 30), num_workers=3, worker_init_fn=begin,
                  persistent_workers=persistent)  # fmt: skip
    for _ in range(3):
        assert all(name == f"shmloader_{number}" for name, number in loader)
    assert sorted(called) == sorted([0, 1, 2] * (1 if persistent else 3))
    loader.close()

    def fail(worker_id: int) -> None:
        raise OSError(f"no connection for {worker_id + 7}")

    found = map(last_line, outcomes(make(3, num_workers=1, worker_init_fn=fail)))
    assert [*found] == ["OSError OSError: no connection for 7"] * 3


@pytest.mark.parametrize("options", [{}, {"device": "late"}], ids=["plain", "staged"])
def test_a_timeout_names_batch_thread_and_stack_and_loses_nothing(held, options, late) -> None:
    third = held(4, 5, make=torch.tensor)
    batches = iter(make(Calls(third, 12), timeout=0.2, batch_size=2, collate_fn=None, **options))
    found = [to_host(next(batches)).tolist() for _ in range(2)]
    wait_until(lambda: third.entered.is_set() and len(third.seen) > 8)
    for _ in range(2):
        with pytest.raises(LoaderTimeoutError) as caught:
            next(batches)
        head, *lines = str(caught.value).splitlines()
        assert head.startswith(
            "DataLoader timed out after 0.2 seconds, waiting for batch 2 (indices 4 to 5). "
        )
        assert head.endswith("sample_timeout= replaces one whose sample hangs.")
        loading, idle = sorted((line for line in lines if line[0] == "W"), key=len, reverse=True)
        assert "has been loading batch 2 (indices 4 to 5) for " in loading
        assert loading.endswith(" s, the innermost call first:")
        stack = [line for line in lines if line[0] != "W"]
        assert all(line.startswith("  File ") for line in stack)
        names = [line.rpartition(" in ")[2] for line in stack]
        place = names.index("wait_here")
        assert names[place:] == ["wait_here", "__call__", "__getitem__"]
        assert " has been idle for " in idle
    third.go.set()
    found += [to_host(batch).tolist() for batch in islice(however_late(batches), 4)]
    assert found == [[index, index + 1] for index in range(0, 12, 2)]
    with pytest.raises(StopIteration):
        next(batches)


def once_main_is_in(name: str, act: Any) -> Any:
    """Do something, on another thread, once the main thread is in a function of this name."""
    main = threading.main_thread().ident

    def watch() -> None:
        wait_until(lambda: name in stack_of(main))
        act()

    return in_thread(watch)


def test_a_ctrl_c_anywhere_in_a_further_iter_loses_nothing_or_closes() -> None:
    closed, went_on = 0, 0
    for nth in itertools.count(1, 7):
        loader = make(8, num_workers=1, persistent_workers=True)
        batches = iter(loader)
        assert next(batches) == 0
        if interrupt(functools.partial(iter, loader), nth, KeyboardInterrupt).where is None:
            break
        # Whoever goes on with the iterator has all of an epoch, or is told.
        try:
            assert list(batches) in (list(range(8)), list(range(1, 8)))
            went_on += 1
        except ClosedLoaderError:
            closed += 1
        assert list(loader) == list(range(8))
    assert closed > 5
    assert went_on > 3


@pytest.mark.parametrize(("files", "stride"), [(PACKAGE, 11), (threading.__file__, 1)])
def test_a_ctrl_c_anywhere_in_close_lets_the_next_one_end_all(files, stride) -> None:
    for nth in itertools.count(1, stride):
        loader = make(8, num_workers=1)
        batches = iter(loader)
        assert next(batches) == 0
        outcome = interrupt(loader.close, nth, KeyboardInterrupt, (files,))
        with in_thread(loader.close):  # it has 20 s
            pass
        wait_until(lambda: not ours())
        with pytest.raises(ClosedLoaderError):
            next(batches)
        if outcome.where is None:
            break
    assert nth > 20 * stride


def test_persistent_threads_stay_over_epochs_and_others_end_with_theirs() -> None:
    idents: list[int] = []

    def note(index: int) -> int:
        idents.append(threading.get_ident())
        return index

    loader = make(Calls(note, 8), num_workers=1, persistent_workers=True)
    for _ in range(3):
        assert list(loader) == list(range(8))
        assert ours() == ["shmloader_0"]
    assert len(set(idents)) == 1
    loader.close()
    assert ours() == []
    batches = iter(make(8))
    assert list(batches) == list(range(8))
    assert ours() == []  # though the iterator lives
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"device": "late"}], ids=["plain", "staged"])
@pytest.mark.parametrize("what", ["loader", "dataset", "other"])
def test_what_holds_the_loader_holds_no_thread(late, options, what) -> None:
    """Persistent threads live until the loader is closed, or garbage."""

    class Part(Calls):
        """Something of the user's that knows its loader."""

        def collate(self, samples: list[Any]) -> Any:
            return samples[0]

        def begin(self, number: int) -> None:
            """Nothing to do."""

    parts: dict[str, Any] = {name: Part(torch.tensor, 12) for name in ("dataset", "other")}
    parts["loader"] = make(
        parts["dataset"], collate_fn=parts["other"].collate, persistent_workers=True,
        worker_init_fn=parts["other"].begin, **options,
    )  # fmt: skip
    parts[what].loader = parts["loader"]
    next(iter(parts["loader"]))
    assert len(ours()) == 2
    parts.clear()

    def collected() -> bool:
        gc.collect()
        return not ours()

    wait_until(collected)


def test_closing_waits_for_one_batch(held) -> None:
    first = held(0)
    loader = make(Calls(first, 1000), batch_size=10, num_workers=1)
    batches = iter(loader)
    assert first.entered.wait(20)
    with once_main_is_in("join", first.go.set):
        loader.close()
        assert ours() == []
    assert first.seen == [*range(10)]
    del batches


def test_a_thread_that_is_stuck_is_left_behind_and_ends_later(held, monkeypatch) -> None:
    monkeypatch.setattr(shmloader.pools.thread, "_JOIN_S", 0.1)
    second = held(1, make=lambda index: made.append(index) or sample(index))
    made: list[int] = []
    loader = make(Calls(second, 8))
    batches = iter(loader)
    assert int(next(batches)[0]) == 0
    assert second.entered.wait(20)
    began = time.monotonic()
    loader.close()
    assert 0.1 <= time.monotonic() - began < 20  # what is held would give up later
    assert len(ours()) == 1
    loader.close()
    second.go.set()
    wait_until(lambda: not ours())
    assert 1 in made
    with pytest.raises(ClosedLoaderError):
        next(batches)
    assert not batches._engine.scheduler.tickets


def test_an_impatient_ctrl_c_ends_the_wait_of_close(held, monkeypatch) -> None:
    monkeypatch.setattr(shmloader.pools.thread, "_JOIN_S", 60)
    second = held(1)
    loader = make(Calls(second, 8))
    batches = iter(loader)
    assert second.entered.wait(20)
    began = time.monotonic()
    main = threading.main_thread().ident
    press = functools.partial(signal.pthread_kill, main, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), once_main_is_in("join", press):
        loader.close()
    assert time.monotonic() - began < 20  # what is held would give up later
    second.go.set()
    wait_until(lambda: not ours())
    del batches


@pytest.mark.usefixtures("no_collector")
def test_an_iterator_that_is_collected_on_its_own_thread_ends(held, monkeypatch) -> None:
    monkeypatch.setattr(shmloader.pools.thread, "_JOIN_S", 60)  # if it waited for itself

    def collect(index: int) -> int:
        hold.wait_here()
        gc.collect()
        return index

    hold = held()
    batches = iter(make(Calls(collect, 100), num_workers=1))
    cycle = [batches]
    cycle.append(cycle)
    gone = weakref.ref(batches)
    assert hold.entered.wait(20)
    del batches, cycle
    hold.go.set()
    wait_until(lambda: not ours(), 20)
    assert gone() is None


def test_a_thread_that_cannot_be_started_leaves_none(monkeypatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "shmloader_2":
            raise RuntimeError("can't start new thread")
        start(thread)

    loader = make(8, num_workers=4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            iter(loader)
        assert ours() == []
    assert list(loader) == list(range(8))


def test_a_slow_sample_does_not_hold_up_who_forks(held, monkeypatch) -> None:
    monkeypatch.setattr(threads, "_PARK_S", 60)
    first = held(0)
    batches = iter(make(Calls(first, 8), num_workers=1))
    assert first.entered.wait(20)
    began = time.monotonic()
    assert list(make(3, thread_pool=False)) == [0, 1, 2]
    assert time.monotonic() - began < 20  # what is held would give up later
    first.go.set()
    assert list(batches) == list(range(8))


def test_inside_a_worker_process_and_inside_a_thread_threads_load(slots) -> None:
    def nested(index: int) -> torch.Tensor:
        inner = DataLoader(
            [torch.full((20_000,), n) for n in range(index, index + 6)],
            batch_size=2, num_workers=2, thread_pool=True,
        )  # fmt: skip
        return torch.cat(list(inner))

    want = [list(range(index, index + 6)) for index in range(4)]
    for options in ({"thread_pool": True}, {"thread_pool": False}):
        for batching in ({"batch_size": None, "collate_fn": None}, {}):
            loader = make(Calls(nested, 4), **options, **batching)
            assert [batch[:, 0].tolist() for batch in loader] == want


def test_threads_compute_on_one_core_each_and_others_as_before() -> None:
    def count(_: int = 0) -> int:
        return torch.get_num_threads()

    def elsewhere() -> int:
        found: list[int] = []
        with in_thread(lambda: found.append(count())):
            pass
        return found[0]

    here = count()
    try:
        torch.set_num_threads(3)
        assert list(make(Calls(count, 4))) == [1] * 4
        assert (count(), elsewhere()) == (3, 3)
        # An epoch that begins on a thread that has computed nothing so far.
        with in_thread(lambda: list(make(4))):
            pass
        assert (count(), elsewhere()) == (3, 3)
    finally:
        torch.set_num_threads(here)


def test_on_the_cpu_a_transform_runs_on_the_user_s_thread() -> None:
    transform = lambda batch: (batch, threading.current_thread().name)  # noqa: E731
    loader = make(4, device="cpu", device_transform=transform)
    assert list(loader) == [(index, "MainThread") for index in range(4)]


def test_more_threads_than_cores_are_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(make(8, num_workers=100)) == list(range(8))
    with pytest.warns(UserWarning, match="will create 100 worker processes"):
        make(8, num_workers=100, thread_pool=False)
