"""Batches that tasks of the user's executor make (``executor=``): beside local workers, and ends.

With a ``ProcessPoolExecutor`` of the standard library. ``tests/cluster`` has Dask and Ray.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib
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
from torch.utils.data import get_worker_info

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
from shmloader.cluster import RayExecutor
from shmloader.pools.executor_task import make_batch
from tests.late import to_host
from tests.parity.compare import assert_same
from tests.process.support import (
    Bad,
    Calls,
    Gate,
    Numbers,
    Streams,
    however_late,
    only,
    wait_until,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:executor= lets any idle worker:UserWarning"),
]

Pool = concurrent.futures.ProcessPoolExecutor


@pytest.fixture
def futures() -> Iterator[Futures]:
    executor = Futures()
    yield executor
    end(executor)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


arrived = gate  # a second one


def end(executor: Pool) -> None:
    for process in list((executor._processes or {}).values()):
        process.kill()
    executor.shutdown()


class Futures(Pool):
    """Forked processes; the futures of all tasks are kept."""

    def __init__(self, count: int = 2, initializer: Any = None) -> None:
        super().__init__(count, multiprocessing.get_context("fork"), initializer)
        self.futures: list[concurrent.futures.Future[Any]] = []

    def pending(self) -> list[concurrent.futures.Future[Any]]:
        return [future for future in self.futures if not future.done()]

    def submit(self, function: Any, *task: Any) -> Any:
        future = super().submit(function, *task)
        self.futures.append(future)
        return future


@pytest.fixture
def pool() -> Iterator[Pool]:
    executor = Pool(2, multiprocessing.get_context("fork"))
    yield executor
    end(executor)


class Mixed:
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


def numbers(executor: Any, function: Any = int, length: int = 24, **options: Any):
    given = {"num_workers": 3, "collate_fn": only, **options}
    return DataLoader(Calls(function, length), executor=executor, **given)


def failing_at(index: int, fail: Any) -> Any:
    return lambda number: fail() if number == index else number


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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


ROWS = torch.arange(120).reshape(30, 4)

SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "collated into empty()": {"collate_fn": collate_into},
    "ragged": {"collate_fn": ragged, "batch_size": 3},
    "no batching": {"batch_size": None},
    "shuffled": {"shuffle": True, "drop_last": True},
    "two in flight": {"pin_memory": False, "prefetch_factor": 2},
    "persistent": {"persistent_workers": True},
    "several at once": {
        "fetch_concurrency": 2, "collate_fn": lambda samples: [one["index"] for one in samples],
    },
    "pinned": {"pin_memory": True},
    "a device": {"device": "late"},
    "a tensor": {"dataset": ROWS},
    "an array": {"dataset": ROWS.numpy()},
    "tensors": {"dataset": torch.utils.data.TensorDataset(ROWS)},
    "a list": {"dataset": list(range(30))},
    "a rank": {"rank": 1, "world_size": 2, "shuffle": True},
}  # fmt: skip


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("what", SAME)
def test_batches_are_those_of_local_workers_to_the_bit(pool, what) -> None:
    given = {"dataset": Mixed(), "batch_size": 4, "seed": 11, **SAME[what]}
    kind = ShardedDataLoader if "rank" in given else DataLoader
    with kind(num_workers=2, **given) as local, kind(num_workers=4, executor=pool, **given) as far:
        for _ in range(2):
            batches = list(far)
            assert_same(to_host(batches), to_host(list(local)))
    if what == "pinned":
        assert batches[0]["image"].is_pinned()
    if what == "a device":
        assert batches[0]["image"].device.type == "late"


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
        assert called == [info.id]
        return os.getpid(), info.id, info.num_workers, type(info.dataset).__name__

    called: list[int] = []  # a copy of each process's own
    loader = numbers(pool, look, worker_init_fn=called.append)
    pids, ids, *rest = zip(*loader, *loader, strict=True)
    assert [set(one) for one in rest] == [{3}, {"Calls"}]
    assert os.getpid() not in pids
    # A process keeps its number, and no two processes have one.
    assert len({*pids}) == len({*ids}) == len({*zip(pids, ids, strict=True)})


def test_without_a_seed_processes_draw_different_numbers(pool) -> None:
    with pytest.warns(UserWarning, match="executor= lets any idle worker take the next batch"):
        loader = numbers(pool, lambda _: float(torch.rand(())))
    assert len(set(loader)) == 24


@pytest.mark.parametrize(("options", "window"), [({}, 3), ({"prefetch_factor": 2}, 6)])
def test_no_more_than_the_window_is_in_flight(futures, options, window) -> None:
    iterator = iter(numbers(futures, **options))
    for taken in range(5):
        next(iterator)
        wait_until(lambda: not futures.pending())
        assert len(futures.futures) == window + taken + 1


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_an_end_cancels_what_is_pending_and_leaves_the_executor(
    futures, gate, arrived, how
) -> None:
    make = lambda index: arrived.open() or gate.pass_through() or index  # noqa: E731
    loader = numbers(futures, make, num_workers=20)
    iterator = iter(loader)
    arrived.wait_until_open()
    began = time.monotonic()
    if how == "closed":
        loader.close()
        with pytest.raises(shmloader.ClosedLoaderError):
            next(iterator)
    del iterator
    assert time.monotonic() - began < 10
    wait_until(lambda: any(future.cancelled() for future in futures.futures))
    gate.open(20)
    assert futures.submit(abs, -3).result() == 3


def test_a_late_batch_is_named_and_not_lost(pool, gate) -> None:
    make = lambda index: gate.pass_through() or index  # noqa: E731
    iterator = iter(numbers(pool, make, length=3, timeout=0.2))
    with pytest.raises(LoaderTimeoutError, match=r"waiting for batch 0 \(index 0\)") as caught:
        next(iterator)
    text = str(caught.value)
    assert "Worker 0 (of the executor) has been loading batch 0 (index 0) for" in text
    assert "Worker 2 (of the executor) has been loading batch 2 (index 2) for" in text
    assert "raise timeout=" in text
    gate.open(3)
    assert list(however_late(iterator)) == [0, 1, 2]


def _raise_bad(_: object = None) -> Any:
    raise Bad("no 2")


class _Unloadable(Numbers):
    def __reduce__(self) -> Any:
        return _raise_bad, ()


def test_a_bad_sample_raises_in_its_place_with_where_it_was_made(pool) -> None:
    iterator = iter(numbers(pool, failing_at(2, _raise_bad), length=4))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(Bad, match="no 2") as caught:
        next(iterator)
    assert f"on {socket.gethostname()})" in str(caught.value)
    assert "was loading batch 2 (index 2)" in "".join(caught.value.__notes__)
    assert list(iterator) == [3]


def test_bad_samples_are_skipped_replaced_and_counted(pool) -> None:
    def loader(**how: Any) -> DataLoader:
        options = {"collate_fn": list, "batch_size": 3, "num_workers": 3, "executor": pool, **how}
        return DataLoader(Numbers(12, 1, 6, 11), **options)

    there = loader(on_error="skip")
    assert list(there) == list(loader(on_error="skip", executor=None))
    assert there.failures.total == 3
    assert next(iter(loader(on_error=lambda index, _: -index))) == [0, -1, 2]
    with pytest.raises(TooManyFailures):
        list(loader(on_error="skip", max_failures=1))


@pytest.mark.parametrize("options", [{"worker_init_fn": _raise_bad}, {"dataset": _Unloadable(3)}])
def test_what_fails_while_a_process_gets_ready_is_raised(pool, options) -> None:
    iterator = iter(DataLoader(**{"dataset": range(3), "num_workers": 2, **options}, executor=pool))
    for _ in range(2):
        with pytest.raises(Bad):
            next(iterator)


def test_a_dataset_that_cannot_be_pickled_names_the_part(pool) -> None:
    with pytest.raises(TypeError, match=r"dataset\.function\S* .*cannot be pickled, so it cannot"):
        iter(numbers(pool, threading.Lock()))
    assert pool.submit(abs, -3).result() == 3


def test_without_ray_its_executor_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        RayExecutor()
    assert "pip install ray" in caught.value.__notes__[0]


def test_a_killed_process_is_one_clear_error_and_the_state_has_all_the_rest(
    pool, futures, tmp_path
) -> None:
    killed = tmp_path / "killed"

    def kill_once() -> int:
        if not killed.exists():
            killed.touch()
            kill_this_process()
        return 15

    options: dict[str, Any] = {"shuffle": True, "seed": 2}
    make, found = failing_at(15, kill_once), []
    loader = numbers(pool, make, **options)
    iterator = iter(loader)
    with pytest.raises(WorkerDiedError, match="was loading batch") as caught:
        found.extend(iterator)
    assert "the executor lost its task (BrokenProcessPool: " in str(caught.value)
    with pytest.raises(shmloader.ClosedLoaderError):
        next(iterator)
    resumed = numbers(futures, make, **options)
    resumed.load_state_dict(loader.state_dict())
    found += resumed
    assert found == list(numbers(None, num_workers=0, **options))


def test_a_broken_executor_ends_the_epoch_in_spite_of_restarts(pool, caplog) -> None:
    with pytest.raises(WorkerDiedError, match="BrokenProcessPool"):
        list(numbers(pool, failing_at(5, kill_this_process), worker_restarts=1000))
    assert len(caplog.records) <= 3, "it is not submitted a thousand times"


class _Losing(Futures):
    """Loses some batches' first tasks, as a cluster does whose node is lost."""

    def __init__(self, *losses: int) -> None:
        super().__init__()
        self.losses = [*losses]
        self.numbers: dict[bytes, int] = {}

    def submit(self, function: Any, *task: Any) -> Any:
        future = super().submit(function, *task)
        # Each batch has other indices.
        seq = self.numbers.setdefault(task[4], len(self.numbers))
        if seq not in self.losses:
            return future
        self.losses.remove(seq)
        outer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.add_done_callback(lambda _: outer.set_exception(ConnectionError("node 7 is gone")))
        return outer


def test_lost_tasks_are_made_again_in_order(caplog) -> None:
    executor = _Losing(3, 4, 11)
    loader = DataLoader(Mixed(), 2, num_workers=3, seed=3, executor=executor, worker_restarts=3)
    assert_same(list(loader), list(DataLoader(Mixed(), 2, num_workers=2, seed=3)))
    assert caplog.text.count("ConnectionError: node 7 is gone") == 3
    assert "Batches loaded again: 3." in caplog.text
    executor.losses = [4, 4, 4, 7]
    executor.numbers.clear()
    assert list(numbers(executor, worker_restarts=4)) == list(range(24))
    end(executor)


@pytest.mark.parametrize(
    ("restarts", "text"),
    [
        (0, r"node 7 is gone.*was loading batch 4 \(index 4\)"),
        (2, r"batch 4 .* No restart is left in this epoch \(worker_restarts=2\)"),
    ],
)
def test_a_lost_task_without_restarts_left_names_its_batch(restarts, text) -> None:
    executor = _Losing(4, 4, 4)
    iterator = iter(numbers(executor, worker_restarts=restarts))
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(WorkerDiedError, match=text):
        next(iterator)
    end(executor)


def test_an_executor_that_was_shut_down_says_so_at_the_first_batch(pool) -> None:
    loader = numbers(pool)
    pool.shutdown()
    with pytest.raises(WorkerDiedError, match=r"refuses tasks .*cannot schedule new futures"):
        next(iter(loader))


class _Hides(concurrent.futures.Executor):
    """Runs each task on a thread, and does not tell that it does."""

    def submit(self, function: Any, /, *args: Any, **named: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            return threads.submit(function, *args)


def test_an_executor_of_threads_says_so_at_the_first_batch() -> None:
    with pytest.raises(WorkerDiedError, match="use thread_pool=True"):
        next(iter(numbers(_Hides())))


def test_another_version_there_is_named(pool, monkeypatch) -> None:
    monkeypatch.setattr("shmloader.pools.executor.this_version", lambda: "0.0.1")
    with pytest.raises(WorkerDiedError, match=r"the loader has 0\.0\.1: install the same version"):
        next(iter(numbers(pool)))


def test_a_task_that_ends_its_process_is_lost_and_no_answer(pool) -> None:
    with pytest.raises(WorkerDiedError, match="SystemExit"):
        next(iter(DataLoader(Calls(sys.exit, 4), num_workers=1, executor=pool)))


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


class _Far(Futures):
    """Its processes cannot open this process's memory, as on another machine."""

    def __init__(self) -> None:
        super().__init__(initializer=_make_far)
        self.carried = 0

    def submit(self, function: Any, *args: Any) -> Any:
        if function is make_batch:
            self.carried += args[5] is not None
        return super().submit(function, *args)


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


@pytest.mark.parametrize(
    ("sample", "kind"),
    [
        (lambda index: np.load(f"/nowhere/{index}.npy"), FileNotFoundError),
        (lambda _: importlib.import_module("a_module_that_nobody_has"), ModuleNotFoundError),
    ],
)
def test_what_a_sample_misses_there_is_told(pool, sample, kind) -> None:
    loader = numbers(pool, sample, num_workers=1)
    with pytest.raises(kind, match="this has to exist on each machine"):
        next(iter(loader))


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_workers": 0}, "needs num_workers > 0"),
        ({"num_workers": "auto"}, "'auto' cannot be combined with executor"),
        ({"dataset": Streams(list)}, "needs a map-style dataset"),
        ({"thread_pool": True}, "cannot be combined with thread_pool"),
        ({"sample_timeout": 3}, "cannot be combined with sample_timeout"),
        ({"shm_size": "64MiB"}, "cannot be combined with shm_size"),
        ({"multiprocessing_context": "fork"}, "cannot be combined with multiprocessing_context"),
    ],
)
def test_wrong_arguments_are_told_when_the_loader_is_made(options, text) -> None:
    with Futures() as executor, pytest.raises(ValueError, match=text):
        DataLoader(**{"dataset": range(4), "num_workers": 2, "executor": executor, **options})


def test_statistics_name_the_executor(pool) -> None:
    loader = numbers(pool, num_workers=2)
    list(loader)
    stats = loader.stats()
    assert stats.kind == "executor"
    assert "executor, 2 workers" in str(stats)
    assert stats.batches == stats.samples == 24
