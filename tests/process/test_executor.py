"""Batches that tasks of the user's executor make (``executor=``): beside local workers, and ends.

With a ``ProcessPoolExecutor`` of the standard library. ``tests/cluster`` has Dask and Ray.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import shmloader
from shmloader import (
    DataLoader,
    LoaderTimeoutError,
    ShardedDataLoader,
    SharedMemoryError,
    TooManyFailures,
    WorkerDiedError,
    empty,
    sample_rng,
)
from shmloader.cluster import RayExecutor, _call
from shmloader.insight.verdict import Finding
from shmloader.pools.executor_task import make_batch
from tests.late import to_host
from tests.parity.compare import assert_same
from tests.process.support import Bad, Calls, Gate, only, run_program, wait_until

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:executor= lets any idle worker:UserWarning"),
]

Pool = concurrent.futures.ProcessPoolExecutor


def forked(count: int) -> Pool:
    return Pool(count, multiprocessing.get_context("fork"))


def end(executor: Pool) -> None:
    """Shut an executor down, whatever its processes are at."""
    for process in list((executor._processes or {}).values()):
        process.kill()
    executor.shutdown()


@pytest.fixture
def pool() -> Iterator[Pool]:
    executor = forked(2)
    yield executor
    end(executor)


class Mixed:
    """Samples of several kinds, with random numbers of every generator."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), np.random.rand(), float(torch.rand(())), sample_rng().random()]
        return {
            "image": torch.full((3, 40, 40), index, dtype=torch.float32) + torch.rand(3, 40, 40),
            "array": np.arange(6).reshape(2, 3) * index,
            "drawn": torch.tensor(drawn),
            "text": f"sample {index}",
            "index": index,
        }


def collate_into(samples: list[Any]) -> dict[str, Any]:
    out = empty((len(samples), 3, 40, 40))
    torch.stack([sample["image"] for sample in samples], out=out)
    return {"image": out, "texts": [sample["text"] for sample in samples], "draw": torch.rand(2)}


def ragged(samples: list[Any]) -> list[Any]:
    return [sample["image"][:, : index + 1] for index, sample in enumerate(samples)]


def numbers(executor: Any, function: Any = lambda index: index, length: int = 24, **options: Any):
    given = {"num_workers": 3, "collate_fn": only, **options}
    return DataLoader(Calls(function, length), executor=executor, **given)


# Batches -----------------------------------------------------------------------------------


def _trim_at_once() -> None:
    """Set what Dask sets in the environment of its workers."""
    library = ctypes.CDLL(None)
    assert library.mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
    assert library.mallopt(-1, 64 << 10)  # M_TRIM_THRESHOLD


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_what_samples_free_serves_the_next_ones_though_the_executor_wants_it_given_back():
    def sample(_: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            bytearray(1 << 20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    executor = Pool(1, multiprocessing.get_context("fork"), _trim_at_once)
    try:
        faults = list(numbers(executor, sample, 6, num_workers=1))
    finally:
        end(executor)
    assert max(faults[1:]) < 100, faults  # 8 MiB are 2048 pages


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"collate_fn": collate_into},
        {"collate_fn": ragged, "batch_size": 3},
        {"batch_size": None},
        {"shuffle": True, "drop_last": True},
        {"pin_memory": False, "prefetch_factor": 2},
        {"persistent_workers": True},
        {"fetch_concurrency": 2, "collate_fn": lambda samples: [one["index"] for one in samples]},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_batches_are_those_of_local_workers_to_the_bit(pool, options) -> None:
    given = {"batch_size": 4, "seed": 11, **options}
    with (
        DataLoader(Mixed(), num_workers=2, **given) as local,
        DataLoader(Mixed(), num_workers=4, executor=pool, **given) as there,
    ):
        for _ in range(2):
            assert_same(list(there), list(local))


@pytest.mark.parametrize("options", [{"pin_memory": True}, {"device": "late"}], ids=str)
def test_batches_are_pinned_and_reach_a_device(late, pool, options) -> None:
    given = {"batch_size": 4, "seed": 11, **options}
    with DataLoader(Mixed(), num_workers=4, executor=pool, **given) as there:
        batches = list(there)
    with DataLoader(Mixed(), num_workers=2, **given) as local:
        assert_same([to_host(one) for one in batches], [to_host(one) for one in local])
    assert batches[0]["image"].is_pinned() or batches[0]["image"].device.type == "late"


def test_arrays_and_lists_come_as_from_local_workers(pool) -> None:
    rows = torch.arange(120).reshape(30, 4)
    for dataset in (rows, rows.numpy(), torch.utils.data.TensorDataset(rows), list(range(30))):
        local = list(DataLoader(dataset, 4, num_workers=2))
        assert_same(list(DataLoader(dataset, 4, num_workers=2, executor=pool)), local)


def test_a_sharded_loader_gives_its_steps(pool) -> None:
    options: dict[str, Any] = {"batch_size": 3, "num_shards": 2, "shuffle": True, "num_workers": 2}
    for rank in range(2):
        given = {**options, "rank": rank, "world_size": 2}
        local = list(ShardedDataLoader(Mixed(), **given))
        there = ShardedDataLoader(Mixed(), executor=pool, **given)
        assert_same(list(there), local)


def test_a_state_goes_from_local_workers_to_the_executor_and_back(pool) -> None:
    options: dict[str, Any] = {"batch_size": 2, "seed": 5, "shuffle": True, "num_workers": 2}
    whole = list(DataLoader(Mixed(), **options))
    found, state = [], None
    for executor, count in ((None, 3), (pool, 5), (None, 2), (pool, 3)):
        loader = DataLoader(Mixed(), executor=executor, **options)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        found += [next(iterator) for _ in range(count)]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        loader.close()
    assert_same(found, whole)


def test_a_process_is_a_worker_while_it_makes_a_batch(pool) -> None:
    def look(index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        return os.getpid(), info.id, info.num_workers, type(info.dataset).__name__, called

    called: list[int] = []
    loader = numbers(pool, look, worker_init_fn=called.append)
    found = [*loader, *loader]  # `called` is a copy of each process's own
    assert {one[2:4] for one in found} == {(3, "Calls")}
    ids = {pid: {one[1] for one in found if one[0] == pid} for pid in {one[0] for one in found}}
    assert os.getpid() not in ids
    assert all(len(one) == 1 for one in ids.values()), "a process keeps its number"
    assert len(set.union(*ids.values())) == len(ids), "no two processes have one"
    assert pool.submit(get_worker_info).result() is None


def test_worker_init_fn_is_called_once_in_each_process(pool) -> None:
    calls = Gate()
    loader = numbers(pool, lambda index: os.getpid(), worker_init_fn=lambda _: calls.open())
    pids = {*loader, *loader}  # each call comes before a batch
    for _ in pids:
        calls.wait_until_open(0)
    with pytest.raises(AssertionError):
        calls.wait_until_open(0)
    calls.close()


def test_the_process_s_own_state_is_as_before_a_batch(pool) -> None:
    one = forked(1)
    before = one.submit(_own_state).result()
    list(DataLoader(Mixed(), 4, num_workers=2, seed=1, executor=one))
    assert one.submit(_own_state).result() == before
    end(one)


def _own_state() -> Any:
    return (
        torch.get_num_threads(),
        random.getstate(),
        torch.initial_seed(),
        np.random.get_state()[1][0],
    )


def test_without_a_seed_processes_draw_different_numbers(pool) -> None:
    with pytest.warns(UserWarning, match="executor= lets any idle worker take the next batch"):
        loader = numbers(pool, lambda _: float(torch.rand(())))
    assert len(set(loader)) == 24


# In flight ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}])
def test_no_more_than_the_window_is_in_flight(options) -> None:
    executor = _Counting(2)
    loader = numbers(executor, **options)
    window = 3 * options.get("prefetch_factor", 1)
    iterator = iter(loader)
    for taken in range(5):
        next(iterator)
        wait_until(lambda: executor.done == executor.count)
        assert executor.count == window + taken + 1
    loader.close()
    end(executor)


class _Counting(Pool):
    """Counts what is submitted, and what is done."""

    def __init__(self, count: int) -> None:
        super().__init__(count, multiprocessing.get_context("fork"))
        self.count = self.done = 0

    def submit(self, *args: Any, **named: Any) -> Any:
        self.count += 1
        future = super().submit(*args, **named)
        future.add_done_callback(self._note)
        return future

    def _note(self, _: Any) -> None:
        self.done += 1


def test_closing_cancels_what_is_pending_and_leaves_the_executor(pool) -> None:
    gate, made = Gate(), Gate()

    def make(index: int) -> int:
        made.open()
        gate.pass_through()
        return index

    loader = numbers(pool, make, num_workers=20)
    iterator = iter(loader)
    made.wait_until_open()
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 10
    gate.open(20)
    assert pool.submit(abs, -3).result() == 3
    with pytest.raises(shmloader.ClosedLoaderError):
        next(iterator)
    for each in (gate, made):
        each.close()


def test_a_dropped_iterator_cancels_what_is_pending(pool) -> None:
    gate = Gate()
    iterator = iter(numbers(pool, lambda index: gate.pass_through() or index, num_workers=20))
    submitted = list(iterator._pool._tasks.values())
    del iterator
    wait_until(lambda: any(sent.future.cancelled() for sent in submitted))
    gate.open(20)
    assert pool.submit(abs, -3).result() == 3
    gate.close()


def test_an_epoch_that_is_left_is_not_waited_for(pool) -> None:
    gate = Gate()

    def make(index: int) -> int:
        if index == 2:
            gate.pass_through()
        return index

    loader = numbers(pool, make, num_workers=3, persistent_workers=True)
    assert next(iter(loader)) == 0
    iterator = iter(loader)  # while a process is in batch 2
    assert next(iterator) == 0
    gate.open(4)
    assert list(iterator) == list(range(1, 24))
    loader.close()
    gate.close()


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_epochs_that_are_left_leave_only_what_runs_beside_the_window(persistent_workers) -> None:
    gate, arrived = Gate(), Gate()
    executor = _Keeping(2, multiprocessing.get_context("fork"))
    running = 2 + 3  # one in each process, and those that a process pool sends ahead
    loader = numbers(
        executor,
        lambda index: arrived.open() or gate.pass_through() or index,
        num_workers=20,
        persistent_workers=persistent_workers,
    )
    iterator = iter(loader)
    arrived.pass_through()  # a task that has not come as far fails if its epoch is left
    for _ in range(4):
        del iterator
        iterator = iter(loader)
        wait_until(lambda: len(executor.pending()) <= 20 + running)
    left = [future for future in executor.futures[:-20] if not future.done()]
    assert 0 < len(left) <= running
    gate.open(len(left) + 24)
    assert list(iterator) == list(range(24))
    assert len(executor.futures) == 4 * 20 + 24
    loader.close()
    gate.close()
    arrived.close()
    end(executor)


def test_a_process_whose_first_task_was_given_up_keeps_its_worker_number(tmp_path) -> None:
    gate, arrived, seen = Gate(), Gate(), tmp_path / "seen"

    def number(_: int) -> int:
        if not seen.exists():
            seen.touch()
            arrived.open()
            gate.pass_through()
        return torch.utils.data.get_worker_info().id

    executor = forked(3)
    loader = numbers(executor, number, 2, num_workers=1)
    iterator = iter(loader)
    arrived.pass_through()
    del iterator  # the process stays in the sample, and has taken number 0
    assert 0 not in list(loader)
    gate.open()
    end(executor)
    for each in (gate, arrived):
        each.close()


class _Keeping(Pool):
    """Keeps the futures of what is submitted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.futures: list[concurrent.futures.Future[Any]] = []

    def pending(self) -> list[concurrent.futures.Future[Any]]:
        return [future for future in self.futures if not future.done()]

    def submit(self, *args: Any, **named: Any) -> Any:
        future = super().submit(*args, **named)
        self.futures.append(future)
        return future


def test_a_late_batch_is_named_and_not_lost(pool) -> None:
    gate = Gate()
    loader = numbers(pool, lambda index: gate.pass_through() or index, length=3, timeout=0.2)
    iterator = iter(loader)
    with pytest.raises(LoaderTimeoutError, match=r"Batch 0 \(index 0\)") as caught:
        next(iterator)
    assert "is with worker 0 (of the executor)" in str(caught.value)
    assert "Worker 2 (of the executor) has been loading batch 2 (index 2) for" in str(caught.value)
    assert "raise timeout=" in str(caught.value)
    assert "sample_timeout" not in str(caught.value), "it is refused with executor="
    gate.open(3)
    while True:
        try:
            assert next(iterator) == 0
            break
        except LoaderTimeoutError:
            continue
    loader.close()
    gate.close()


# Errors of the user's code -----------------------------------------------------------------


def test_a_bad_sample_raises_in_its_place_with_where_it_was_made(pool) -> None:
    def make(index: int) -> int:
        if index == 2:
            raise Bad("no 2")
        return index

    iterator = iter(numbers(pool, make, length=4))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(Bad, match="no 2") as caught:
        next(iterator)
    assert f"on {socket.gethostname()})" in str(caught.value)
    assert "was loading batch 2 (index 2)" in "".join(caught.value.__notes__)
    assert list(iterator) == [3]


def test_bad_samples_are_skipped_replaced_and_counted(pool) -> None:
    def make(index: int) -> int:
        if index % 5 == 1:
            raise Bad(f"no {index}")
        return index

    options: dict[str, Any] = {"length": 12, "collate_fn": list, "batch_size": 3}
    local = DataLoader(Calls(make, 12), 3, num_workers=2, collate_fn=list, on_error="skip")
    there = numbers(pool, make, on_error="skip", **options)
    assert list(there) == list(local)
    assert there.failures.total == local.failures.total == 3
    replaced = numbers(pool, make, on_error=lambda index, _: -index, **options)
    assert next(iter(replaced)) == [0, -1, 2]
    with pytest.raises(TooManyFailures):
        list(numbers(pool, make, on_error="skip", max_failures=1, **options))


@pytest.mark.parametrize("part", ["worker_init_fn", "loading"])
def test_what_fails_while_a_process_gets_ready_is_raised(pool, part) -> None:
    function: Any = lambda index: index  # noqa: E731 - or an object that cannot be loaded
    init_fn = _raise_bad if part == "worker_init_fn" else None
    dataset = Calls(function, 3) if init_fn else _Unloadable()
    loader = DataLoader(dataset, num_workers=2, worker_init_fn=init_fn, executor=pool)
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(Bad):
            next(iterator)


def _raise_bad(_: object = None) -> Any:
    raise Bad("not here")


class _Unloadable:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __reduce__(self) -> Any:
        return _raise_bad, ()


def test_a_dataset_that_cannot_be_pickled_names_the_part(pool) -> None:
    with pytest.raises(TypeError, match=r"dataset\.function\S* .*cannot be pickled, so it cannot"):
        iter(numbers(pool, threading.Lock()))
    assert pool.submit(abs, -3).result() == 3


# The executor's own errors -----------------------------------------------------------------


def test_without_ray_its_executor_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        RayExecutor()
    assert "pip install 'shmloader[ray]'" in caught.value.__notes__[0]


def test_a_killed_process_is_one_clear_error(pool) -> None:
    def make(index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    iterator = iter(numbers(pool, make))
    found: list[int] = []
    with pytest.raises(WorkerDiedError) as caught:
        found.extend(iterator)
    assert found == list(range(len(found)))
    assert "the executor lost its task (BrokenProcessPool: " in str(caught.value)
    assert "was loading batch" in str(caught.value)
    with pytest.raises(shmloader.ClosedLoaderError):
        next(iterator)


def test_after_such_an_error_the_state_has_all_the_rest(pool, tmp_path) -> None:
    killed = tmp_path / "killed"

    def make(index: int) -> int:
        if index == 15 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    loader, found = numbers(pool, make, shuffle=True, seed=2), []
    with pytest.raises(WorkerDiedError):
        found.extend(loader)
    state, again = loader.state_dict(), forked(2)
    try:
        resumed = numbers(again, make, shuffle=True, seed=2)
        resumed.load_state_dict(state)
        found += resumed
    finally:
        end(again)
    assert sorted(found) == list(range(24))
    assert found == list(numbers(None, make, shuffle=True, seed=2, num_workers=0))


def test_a_broken_executor_ends_the_epoch_in_spite_of_restarts(pool, caplog) -> None:
    def make(index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    with pytest.raises(WorkerDiedError, match="BrokenProcessPool"):
        list(numbers(pool, make, worker_restarts=1000))
    assert len(caplog.records) <= 3, "it is not submitted a thousand times"


class _Losing(Pool):
    """Loses some batches' first tasks, as a cluster does whose node is lost."""

    lost: tuple[int, ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[int] = []
        self.numbers: dict[bytes, int] = {}

    def submit(self, function: Any, *task: Any) -> Any:
        future = super().submit(function, *task)
        # Each batch has other indices.
        seq = self.numbers.setdefault(task[4], len(self.numbers))
        if self.seen.count(seq) == self.lost.count(seq):
            return future
        self.seen.append(seq)
        outer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.add_done_callback(lambda _: outer.set_exception(ConnectionError("node 7 is gone")))
        return outer


def test_lost_tasks_are_made_again_in_order(caplog) -> None:
    executor = _Losing(2, multiprocessing.get_context("fork"))
    executor.lost = (3, 4, 11)
    loader = DataLoader(Mixed(), 2, num_workers=3, seed=3, executor=executor, worker_restarts=3)
    assert_same(list(loader), list(DataLoader(Mixed(), 2, num_workers=2, seed=3)))
    assert caplog.text.count("ConnectionError: node 7 is gone") == 3
    assert "Batches are made again: 3." in caplog.text
    end(executor)


def test_a_batch_that_is_lost_twice_is_made_again_while_restarts_are_left() -> None:
    executor = _Losing(2, multiprocessing.get_context("fork"))
    executor.lost = (4, 4, 4, 7)
    assert list(numbers(executor, worker_restarts=4)) == list(range(24))
    executor.seen.clear()
    iterator = iter(numbers(executor, worker_restarts=2))
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    text = r"batch 4 .* No restart is left in this epoch \(worker_restarts=2\)"
    with pytest.raises(WorkerDiedError, match=text):
        next(iterator)
    end(executor)


def test_a_lost_task_without_restarts_names_its_batch() -> None:
    executor = _Losing(2, multiprocessing.get_context("fork"))
    executor.lost = (4,)
    iterator = iter(numbers(executor))
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(WorkerDiedError, match=r"node 7 is gone.*was loading batch 4 \(index 4\)"):
        next(iterator)
    end(executor)


def test_an_executor_that_was_shut_down_says_so_at_the_first_batch(pool) -> None:
    loader = numbers(pool)
    pool.shutdown()
    with pytest.raises(WorkerDiedError, match=r"refuses tasks .*cannot schedule new futures"):
        next(iter(loader))


def test_an_executor_of_threads_says_so_at_the_first_batch() -> None:
    class Threads(concurrent.futures.Executor):
        def __init__(self) -> None:
            self._own = concurrent.futures.ThreadPoolExecutor(1)

        def submit(self, *args: Any, **named: Any) -> Any:
            return self._own.submit(*args, **named)

        def shutdown(self, *args: Any, **named: Any) -> None:
            self._own.shutdown()

    executor = Threads()
    with pytest.raises(WorkerDiedError, match="use thread_pool=True"):
        next(iter(numbers(executor)))
    executor.shutdown()


def test_another_version_there_is_named(pool, monkeypatch) -> None:
    monkeypatch.setattr("shmloader.pools.executor.this_version", lambda: "0.0.1")
    with pytest.raises(WorkerDiedError, match=r"the loader has 0\.0\.1: install the same version"):
        next(iter(numbers(pool)))


class _Answering(concurrent.futures.Executor):
    """Answers each call at once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def submit(self, function: Any, /, *args: Any, **named: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(self.answer)
        return future


def test_the_refusal_of_another_version_is_read_whatever_follows_it() -> None:
    executor = _Answering((b"a process", "shmloader 9 is installed there", {}, "more", 7, 8, 9, 10))
    with pytest.raises(WorkerDiedError, match="shmloader 9 is installed there"):
        next(iter(numbers(executor)))


@pytest.mark.parametrize("explains", [False, True])
def test_a_process_that_ray_ends_loses_its_task_whatever_becomes_of_the_exception(explains) -> None:
    def end(*_: object) -> None:
        raise SystemExit(1)

    def load() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            if explains:
                raise ValueError("a sample failed") from error

    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            _call(load)
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_a_task_sets_on_ray_stays() -> None:
    def own(*_: object) -> None:
        pass

    before = signal.getsignal(signal.SIGINT)
    try:
        _call(signal.signal, signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
        _call(list)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


# The dataset's journey ---------------------------------------------------------------------


def test_the_dataset_is_loaded_once_in_each_process_and_again_when_it_changes(pool) -> None:
    class Big:
        """Its data lies beside the pickle."""

        def __init__(self, value: int) -> None:
            self.data = np.full(100_000, value)

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> tuple[int, int, int]:
            return os.getpid(), id(self), int(self.data[index])

    loader = DataLoader(Big(1), num_workers=4, executor=pool, collate_fn=only)
    first = {*loader, *loader}
    assert len(first) == len({pid for pid, *_ in first}), "one dataset in each process"
    loader.dataset.data[:] = 2
    assert {value for *_, value in loader} == {2}


class _Far(Pool):
    """Its processes cannot open this process's memory, as on another machine."""

    def __init__(self) -> None:
        super().__init__(2, multiprocessing.get_context("fork"), _make_far)
        self.carried = 0

    def submit(self, function: Any, /, *args: Any, **named: Any) -> Any:
        if function is make_batch:
            self.carried += args[5] is not None
        return super().submit(function, *args, **named)


def _make_far() -> None:
    from shmloader.memory import segment

    def attach(*_: object) -> Any:
        raise SharedMemoryError("on another machine")  # by the name in that module

    segment._attach.__code__ = attach.__code__


def test_a_process_that_cannot_open_the_payload_is_sent_it() -> None:
    executor = _Far()
    loader = DataLoader(Mixed(), 2, num_workers=3, seed=3, executor=executor)
    local = DataLoader(Mixed(), 2, num_workers=2, seed=3)
    for _ in range(2):
        assert_same(list(loader), list(local))
        assert 1 <= executor.carried <= 2 * 3
    end(executor)


def test_a_task_that_cannot_be_sent_again_with_the_payload_is_lost() -> None:
    executor = _Far()
    loader = DataLoader(range(8), 2, num_workers=1, executor=executor)
    submit, calls = executor.submit, []

    def refuse_the_second(*call: Any) -> Any:
        calls.append(call)
        if len(calls) > 1:
            raise RuntimeError("no further task")
        return submit(*call)

    executor.submit = refuse_the_second
    with pytest.raises(WorkerDiedError, match="no further task"):
        next(iter(loader))
    end(executor)


def load_missing_file(index: int) -> Any:
    return np.load(f"/nowhere/{index}.npy")


def import_missing_module(index: int) -> Any:
    import a_module_that_nobody_has  # type: ignore[import-not-found]

    return a_module_that_nobody_has.samples[index]


@pytest.mark.parametrize(
    ("sample", "kind", "text"),
    [
        (load_missing_file, FileNotFoundError, "it has to exist on each machine"),
        (import_missing_module, ModuleNotFoundError, "it has to be installed there, too"),
    ],
)
def test_what_a_sample_misses_there_is_told(pool, sample, kind, text) -> None:
    with (
        DataLoader(Calls(sample, 4), 2, num_workers=1, executor=pool, seed=1) as loader,
        pytest.raises(kind) as caught,
    ):
        next(iter(loader))
    assert text in str(caught.value)


def test_a_memory_map_whose_file_is_missing_there_is_told(tmp_path) -> None:
    file, away = tmp_path / "rows.npy", tmp_path / "away.npy"
    np.save(file, np.arange(40))

    class Elsewhere(Pool):
        """The file is gone when the first task reaches a process."""

        def submit(self, *args: Any, **named: Any) -> Any:
            if file.exists() and not self.has_file:
                file.rename(away)
            return super().submit(*args, **named)

        has_file = False

    executor = Elsewhere(2, multiprocessing.get_context("fork"))
    loader = DataLoader(np.load(file, mmap_mode="r"), 4, num_workers=2, executor=executor)
    with pytest.raises(FileNotFoundError) as caught:
        next(iter(loader))
    text = "".join([str(caught.value), *caught.value.__notes__])
    assert "in a process of the executor (pid " in text
    assert str(file) in text
    assert "it has to exist on each machine that makes batches" in text
    away.rename(file)
    executor.has_file = True
    assert torch.cat(list(loader)).tolist() == list(range(40))
    loader.close()
    end(executor)


def test_a_store_that_does_not_take_the_dataset_is_one_clear_error() -> None:
    class Full(_Far):
        def share(self, contents: Any) -> Any:
            raise MemoryError(f"{len(contents)} bytes do not fit. " + "By far. " * 100 + "Full.")

    executor = Full()
    loader = DataLoader(Mixed(), 2, num_workers=3, seed=3, executor=executor)
    with pytest.raises(WorkerDiedError, match=r"store refused the dataset \(MemoryError: .*Full\)"):
        next(iter(loader))
    assert executor.submit(abs, -3).result() == 3
    end(executor)


@pytest.mark.slow
@pytest.mark.timeout(150)  # a fresh interpreter imports torch
def test_what_a_program_defines_that_is_no_file_travels_by_value() -> None:
    program = """
import concurrent.futures, multiprocessing, shmloader
class Own:
    def __len__(self): return 8
    def __getitem__(self, index): return Point(index)
class Point:
    def __init__(self, value): self.value = value
context = multiprocessing.get_context("spawn")
with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
    loader = shmloader.DataLoader(
        Own(), num_workers=1, executor=pool, seed=0, collate_fn=lambda samples: samples[0]
    )
    batches = list(loader)
assert all(type(one) is Point for one in batches)
print([one.value for one in batches])
"""
    done = run_program(program, timeout_s=120)
    assert done.out == "[0, 1, 2, 3, 4, 5, 6, 7]\n", done.err


# Arguments ---------------------------------------------------------------------------------


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


class _Client:
    def get_executor(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"executor": 3}, TypeError, "should be a concurrent.futures.Executor, but got executor=3"),
        ({"executor": _Client()}, TypeError, r"give its get_executor\(\)"),
        ({"num_workers": 0}, ValueError, "needs num_workers > 0"),
        ({"num_workers": "auto"}, ValueError, "'auto' cannot be combined with executor"),
        ({"dataset": _Stream()}, ValueError, "needs a map-style dataset"),
        ({"thread_pool": True}, ValueError, "cannot be combined with thread_pool"),
        ({"sample_timeout": 3}, ValueError, "cannot be combined with sample_timeout"),
        ({"shm_size": "64MiB"}, ValueError, "cannot be combined with shm_size"),
        (
            {"multiprocessing_context": "fork"},
            ValueError,
            "cannot be combined with multiprocessing_context",
        ),
    ],
)
def test_wrong_arguments_are_told_when_the_loader_is_made(options, kind, text) -> None:
    with forked(1) as executor:
        given = {"dataset": range(4), "num_workers": 2, "executor": executor, **options}
        with pytest.raises(kind, match=text):
            DataLoader(**given)


def test_threads_have_an_argument_of_their_own() -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1) as executor,
        pytest.raises(ValueError, match="thread_pool=True"),
    ):
        DataLoader(range(4), num_workers=2, executor=executor)


def test_statistics_name_the_executor(pool) -> None:
    loader = numbers(pool, num_workers=2)
    list(loader)
    stats = loader.stats()
    assert stats.kind == "executor"
    assert "an executor with 2 batches in flight" in str(stats)
    assert stats.batches == stats.samples == 24


def test_time_that_is_not_work_counts_as_waiting_for_the_executor() -> None:
    class Distant(concurrent.futures.ProcessPoolExecutor):
        """A network that takes 0.1 s each way."""

        def submit(self, function, /, *arguments):
            future = concurrent.futures.Future()
            there = super().submit

            def send():
                there(function, *arguments).add_done_callback(
                    lambda done: threading.Timer(0.1, future.set_result, [done.result()]).start()
                )

            threading.Timer(0.1, send).start()
            return future

    with Distant(1) as executor:
        loader = numbers(executor, num_workers=1)
        list(loader)
        stats = loader.stats()
    assert 0.2 <= stats.stages.queue.mean_s < 1
    assert stats.stages.transport.mean_s < 0.1
    assert stats.finding is Finding.EXECUTOR_BUSY
