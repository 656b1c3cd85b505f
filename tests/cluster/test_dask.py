"""Batches made on a cluster of Dask's, with processes."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from shmloader import DataLoader, ShardedDataLoader, WorkerDiedError
from shmloader.cluster import DaskExecutor
from tests.cluster import datasets
from tests.cluster.datasets import OPTIONS, Hungry, Mixed, Pids, local
from tests.cluster.needed import needed
from tests.parity.compare import assert_same
from tests.process.support import wait_until

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
