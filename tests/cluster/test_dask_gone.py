"""A cluster of Dask's whose scheduler or workers are gone: one clear error, or a wait that says so.

The scheduler and the workers are processes of their own, which the tests kill.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import cloudpickle
import pytest

from shmloader import DataLoader, LoaderTimeoutError, WorkerDiedError
from shmloader.cluster import DaskExecutor
from tests.cluster import datasets
from tests.cluster.datasets import OPTIONS, Large, Mixed, Pids, local
from tests.cluster.needed import needed
from tests.parity.compare import assert_same
from tests.process.support import ROOT, wait_until

distributed = needed("distributed")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:executor= lets any:UserWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
]

cloudpickle.register_pickle_by_value(datasets)

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
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    with ExitStack() as stack:
        stack.callback(cluster.kill_scheduler)
        stack.callback(cluster.kill_workers)
        cluster.start_workers(2)
        yield cluster


@pytest.fixture
def client(cluster) -> Iterator[Any]:
    with distributed.Client(cluster.address, timeout=STARTED_S) as client:
        client.wait_for_workers(2, timeout=STARTED_S)
        client._timeout = RECONNECT_S
        yield client


def test_a_killed_scheduler_is_one_error_at_once_or_when_the_client_gives_up(
    cluster, client
) -> None:
    """At all times some of the results, which are large, are on their way."""
    options = {**OPTIONS, "num_workers": 4}
    executor = DaskExecutor(client)
    loader = DataLoader(Large(24), executor=executor, **options)
    patient = DataLoader(Large(400), executor=executor, worker_restarts=1000, **options)
    iterator, waiting = iter(loader), iter(patient)
    found = [next(iterator) for _ in range(3)]
    next(waiting)
    cluster.kill_scheduler()

    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"the executor lost its task \("):
        found.extend(iterator)
    assert time.monotonic() - began < TOLD_S
    with pytest.raises(WorkerDiedError, match="closed, or it has lost its scheduler for good"):
        list(waiting)
    assert time.monotonic() - began < RECONNECT_S + TOLD_S
    wait_until(lambda: client.status == "closed", TOLD_S)
    with pytest.raises(WorkerDiedError, match=r"refuses tasks .* lost its scheduler for good"):
        next(iter(patient))

    resumed = DataLoader(Large(24), **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
    assert_same([*found, *resumed], local(Large(24)))


def test_a_scheduler_that_comes_back_in_time_gets_the_lost_tasks(cluster, client) -> None:
    client._timeout = STARTED_S
    loader = DataLoader(
        Mixed(60), num_workers=4, executor=DaskExecutor(client), worker_restarts=100, **OPTIONS
    )
    iterator = iter(loader)
    found = [next(iterator) for _ in range(4)]
    cluster.kill_scheduler()
    cluster.kill_workers()
    cluster.start_scheduler()
    cluster.start_workers(2)
    found += iterator
    assert_same(found, local(Mixed(60)))


def test_without_workers_a_batch_is_late_and_comes_when_one_is_there(cluster, client) -> None:
    loader = DataLoader(Mixed(), num_workers=3, executor=DaskExecutor(client), timeout=1, **OPTIONS)
    iterator = iter(loader)
    found = patiently(iterator, 4)
    cluster.kill_workers()
    with pytest.raises(LoaderTimeoutError):
        found.extend(iterator)
    cluster.start_workers(1)
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


def test_a_client_that_another_thread_closes_ends_the_wait(cluster, client) -> None:
    loader = DataLoader(Pids(4, 100.0), None, num_workers=4, executor=DaskExecutor(client))
    iterator = iter(loader)

    def close() -> None:
        wait_until(lambda: iterator._pool.is_waiting, TOLD_S)
        client.close()

    closing = threading.Thread(target=close)
    closing.start()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="Dask's client was closed"):
        next(iterator)
    closing.join(TOLD_S)
    assert time.monotonic() - began < TOLD_S


def test_a_result_that_cannot_be_fetched_is_the_loss_of_its_task(client, monkeypatch) -> None:
    failures = [OSError("the connection is reset")]

    async def gather(**named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await type(client.scheduler).__getattr__(client.scheduler, "gather")(**named)

    monkeypatch.setattr(client.scheduler, "gather", gather, raising=False)
    executor = DaskExecutor(client)
    loader = DataLoader(Mixed(), num_workers=3, executor=executor, worker_restarts=8, **OPTIONS)
    assert_same(list(loader), local(Mixed()))
    assert not failures

    failures.append(OSError("the connection is reset"))
    with pytest.raises(WorkerDiedError, match=r"OSError: the connection is reset"):
        list(DataLoader(Mixed(), num_workers=3, executor=executor, **OPTIONS))
