"""Batches made on a cluster of Dask's, with processes.

Where the scheduler or the workers are gone, there is one clear error, or a wait that says so. In
these tests they are processes of their own, which the tests kill.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import cloudpickle
import pytest

from shmloader import DataLoader, LoaderTimeoutError, ShardedDataLoader, WorkerDiedError
from shmloader.cluster import DaskExecutor
from tests.cluster import datasets
from tests.cluster.datasets import OPTIONS, Hungry, Large, Mixed, Pids, local
from tests.cluster.needed import needed
from tests.parity.compare import assert_same
from tests.process.support import ROOT, in_thread, wait_until

dask = needed("dask")
distributed = needed("distributed")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:executor= lets any:UserWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
]

cloudpickle.register_pickle_by_value(datasets)


@pytest.fixture
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster) -> Iterator[Any]:
    with distributed.Client(cluster) as client:
        yield client


def test_batches_are_those_of_local_workers(client) -> None:
    executor = DaskExecutor(client)
    options: dict[str, Any] = {"batch_size": 3, "seed": 3, "shuffle": True}
    expected = local(Mixed(), **options)
    loader = DataLoader(Mixed(), num_workers=4, executor=executor, **options)
    assert_same(list(loader), expected)
    sharded: dict[str, Any] = {"batch_size": 4, "num_workers": 3}
    steps = list(ShardedDataLoader(Mixed(), **sharded))
    assert_same(list(ShardedDataLoader(Mixed(), executor=executor, **sharded)), steps)
    assert client.submit(abs, -3).result() == 3


def test_workers_that_cannot_open_the_payload_get_it_from_dask(client) -> None:
    client.run(_make_far)
    loader = DataLoader(Mixed(), num_workers=4, executor=DaskExecutor(client), **OPTIONS)
    here = DataLoader(Mixed(), num_workers=2, **OPTIONS)
    for _ in range(2):
        assert_same(list(loader), list(here))


def _make_far() -> None:
    import pickle

    from shmloader.batch import payload
    from shmloader.errors import SharedMemoryError

    class Far:
        HIGHEST_PROTOCOL = pickle.HIGHEST_PROTOCOL
        dumps = staticmethod(pickle.dumps)

        @staticmethod
        def loads(data: Any, **_: Any) -> Any:
            if type(data) is bytes and b"_attach" in data:
                raise SharedMemoryError("on another machine")
            return pickle.loads(data)

    payload.pickle = Far  # type: ignore[attr-defined]


def test_the_payload_goes_out_again_if_all_workers_that_had_it_are_lost(cluster, client) -> None:
    client.run(_make_far)
    dataset = Mixed(60, wait_s=0.02)
    loader = DataLoader(
        dataset, num_workers=2, executor=DaskExecutor(client), worker_restarts=16, **OPTIONS
    )
    iterator = iter(loader)
    found = [next(iterator) for _ in range(4)]
    pids = client.run(os.getpid)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not set(client.scheduler_info()["workers"]) & set(pids), 60)
    client.wait_for_workers(2, timeout=60)
    client.run(_make_far)
    found += iterator
    assert_same(found, local(dataset))


def test_a_killed_worker_s_batches_are_made_again(cluster, client) -> None:
    dataset = Mixed(60, wait_s=0.02)
    loader = DataLoader(dataset, num_workers=4, executor=DaskExecutor(client), **OPTIONS)
    iterator = iter(loader)
    found = [next(iterator) for _ in range(4)]
    victim = next(iter(cluster.workers.values()))
    victim.process.process._process.kill()
    found += list(iterator)
    assert_same(found, local(dataset))


def test_a_cluster_that_is_gone_is_one_error(cluster, client) -> None:
    loader = DataLoader(Pids(400, 0.02), None, num_workers=4, executor=DaskExecutor(client))
    iterator = iter(loader)
    next(iterator)
    client.close()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="the executor "):
        list(iterator)
    assert time.monotonic() - began < 60


def test_a_worker_killed_for_its_memory_is_one_clear_error() -> None:
    limit_bytes = 900_000_000
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),  # once, not four times
        distributed.LocalCluster(
            n_workers=1, memory_limit=limit_bytes, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        dataset = Hungry(limit_bytes)
        executor = DaskExecutor(client)
        iterator, found = iter(DataLoader(dataset, None, num_workers=1, executor=executor)), []
        with pytest.raises(WorkerDiedError, match=r"KilledWorker: .*loading batch 5 \(index 5\)"):
            found.extend(iterator)
        assert found == list(range(5))


def test_a_client_in_whose_event_loop_the_program_runs_is_refused(cluster) -> None:
    async def load() -> None:
        async with distributed.Client(cluster.scheduler_address, asynchronous=True) as client:
            with pytest.raises(ValueError, match="block its event loop"):
                DaskExecutor(client)
            with pytest.raises(ValueError, match=r"for Dask, .*DaskExecutor\(client\)"):
                DataLoader(Mixed(), num_workers=2, executor=client.get_executor())

    asyncio.run(load())


def test_threads_of_this_process_are_refused() -> None:
    with distributed.Client(processes=False, dashboard_address=None) as client:
        loader = DataLoader(Mixed(), num_workers=2, executor=DaskExecutor(client))
        with pytest.raises(WorkerDiedError, match="use thread_pool=True"):
            next(iter(loader))


# How long a client tries to reach a scheduler that it has lost, in seconds: 30 by default.
RECONNECT_S = 4
# An error comes within this time; the machine is busy.
TOLD_S = 20.0
STARTED_S = 60


class Cluster:
    """A scheduler and workers, each a process of its own that only a test ends."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def start_scheduler(self) -> None:
        port = self.address.rpartition(":")[2]
        self.scheduler = _start("scheduler", "--host=127.0.0.1", f"--port={port}")

    def start_workers(self, count: int) -> None:
        options = ("--nthreads=1", "--no-nanny", "--host=127.0.0.1")
        self.workers += [_start("worker", self.address, *options) for _ in range(count)]

    def kill_workers(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.workers.clear()

    def kill_scheduler(self) -> None:
        self.scheduler.kill()
        self.scheduler.wait()


def _start(kind: str, *arguments: str) -> subprocess.Popen[bytes]:
    module = f"distributed.cli.dask_{kind}"
    return subprocess.Popen(
        [sys.executable, "-m", module, "--no-dashboard", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture
def killable() -> Iterator[Cluster]:
    cluster = Cluster()
    with ExitStack() as stack:
        stack.callback(cluster.kill_scheduler)
        stack.callback(cluster.kill_workers)
        cluster.start_workers(2)
        yield cluster


@pytest.fixture
def its_client(killable) -> Iterator[Any]:
    with distributed.Client(killable.address, timeout=STARTED_S) as client:
        client.wait_for_workers(2, timeout=STARTED_S)
        client._timeout = RECONNECT_S
        yield client


def test_a_killed_scheduler_is_one_error_at_once_or_when_the_client_gives_up(
    killable, its_client
) -> None:
    """At all times some of the results, which are large, are on their way."""
    options = {**OPTIONS, "num_workers": 4}
    executor = DaskExecutor(its_client)
    loader = DataLoader(Large(24), executor=executor, **options)
    patient = DataLoader(Large(400), executor=executor, worker_restarts=1000, **options)
    iterator, waiting = iter(loader), iter(patient)
    found = [next(iterator) for _ in range(3)]
    next(waiting)
    killable.kill_scheduler()

    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"the executor lost its task \("):
        found.extend(iterator)
    assert time.monotonic() - began < TOLD_S
    with pytest.raises(WorkerDiedError, match="closed, or it has lost its scheduler for good"):
        list(waiting)
    assert time.monotonic() - began < RECONNECT_S + TOLD_S
    wait_until(lambda: its_client.status == "closed", TOLD_S)
    with pytest.raises(WorkerDiedError, match=r"refuses tasks .* lost its scheduler for good"):
        next(iter(patient))

    resumed = DataLoader(Large(24), **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert_same([*found, *resumed], local(Large(24)))


def test_a_scheduler_that_comes_back_in_time_gets_the_lost_tasks(killable, its_client) -> None:
    its_client._timeout = STARTED_S
    loader = DataLoader(
        Mixed(60), num_workers=4, executor=DaskExecutor(its_client), worker_restarts=100, **OPTIONS
    )
    iterator = iter(loader)
    found = [next(iterator) for _ in range(4)]
    killable.kill_scheduler()
    killable.kill_workers()
    killable.start_scheduler()
    killable.start_workers(2)
    found += iterator
    assert_same(found, local(Mixed(60)))


def test_without_workers_a_batch_is_late_and_comes_when_one_is_there(killable, its_client) -> None:
    loader = DataLoader(
        Mixed(), num_workers=3, executor=DaskExecutor(its_client), timeout=1, **OPTIONS
    )
    iterator = iter(loader)
    found = patiently(iterator, 4)
    killable.kill_workers()
    with pytest.raises(LoaderTimeoutError):
        found.extend(iterator)
    killable.start_workers(1)
    found += patiently(iterator, 20 - len(found))
    assert_same(found, local(Mixed()))


def patiently(iterator: Iterator[Any], count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + STARTED_S
    while len(found) < count:
        try:
            found.append(next(iterator))
        except LoaderTimeoutError:
            if time.monotonic() > deadline:
                raise
    return found


def test_a_client_that_another_thread_closes_ends_the_wait(killable, its_client) -> None:
    loader = DataLoader(Pids(4, 100.0), None, num_workers=4, executor=DaskExecutor(its_client))
    iterator = iter(loader)

    def close() -> None:
        wait_until(lambda: iterator._pool.is_waiting, TOLD_S)
        its_client.close()

    with in_thread(close):
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match="Dask's client was closed"):
            next(iterator)
    assert time.monotonic() - began < TOLD_S


def test_a_result_that_cannot_be_fetched_is_the_loss_of_its_task(its_client, monkeypatch) -> None:
    failures = [OSError("the connection is reset")]

    async def gather(**named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await type(its_client.scheduler).__getattr__(its_client.scheduler, "gather")(**named)

    monkeypatch.setattr(its_client.scheduler, "gather", gather, raising=False)
    executor = DaskExecutor(its_client)
    loader = DataLoader(Mixed(), num_workers=3, executor=executor, worker_restarts=8, **OPTIONS)
    assert_same(list(loader), local(Mixed()))
    assert not failures

    failures.append(OSError("the connection is reset"))
    with pytest.raises(WorkerDiedError, match=r"OSError: the connection is reset"):
        list(DataLoader(Mixed(), num_workers=3, executor=executor, **OPTIONS))
