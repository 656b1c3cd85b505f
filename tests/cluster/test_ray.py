"""Batches made on Ray: one machine that stands for several, one of which is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from shmloader import DataLoader, PipelineBuilder, WorkerDiedError
from shmloader.cluster import RayExecutor
from tests.cluster import datasets
from tests.cluster.datasets import Bad, Mixed, Notes, Pids
from tests.cluster.needed import needed
from tests.parity.compare import assert_same
from tests.process.support import wait_until

ray = needed("ray")
cluster_utils = needed("ray.cluster_utils")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:executor= lets any:UserWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
]

cloudpickle.register_pickle_by_value(datasets)
ray.cloudpickle.register_pickle_by_value(datasets)

STORE_BYTES = 100 << 20


@pytest.fixture
def connected() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def local(dataset: Any, **options: Any) -> list[Any]:
    return list(DataLoader(dataset, num_workers=2, **options))


def test_batches_are_those_of_local_workers(connected) -> None:
    executor = RayExecutor()
    options: dict[str, Any] = {"batch_size": 16, "seed": 3, "shuffle": True}
    dataset = Mixed(uses_random=True)
    loader = DataLoader(dataset, num_workers=4, executor=executor, **options)
    assert_same(list(loader), local(dataset, **options))
    iterator = iter(DataLoader(Bad(), None, num_workers=3, executor=executor))
    assert [next(iterator) for _ in range(5)] == list(range(5))
    with pytest.raises(LookupError, match="no 5"):
        next(iterator)
    assert list(iterator) == list(range(6, 40))
    assert executor.submit(abs, -3).result() == 3
    assert executor.submit(abs, executor.share(-4)).result() == 4
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(abs, 1)
    with pytest.raises(WorkerDiedError, match="refuses tasks"):
        next(iter(loader))


def test_a_closed_loader_cancels_what_is_pending(connected) -> None:
    executor = RayExecutor()
    loader = DataLoader(Pids(400, 0.5), None, num_workers=40, executor=executor)
    next(iter(loader))
    loader.close()
    began = time.monotonic()
    assert executor.submit(abs, -3).result(60) == 3
    assert time.monotonic() - began < 15, "the 38 others would have taken it 10 s"


def test_a_task_that_runs_is_left_to_end_when_the_loader_is_closed(connected, tmp_path) -> None:
    executor = RayExecutor()
    dataset = Notes(tmp_path, 3.0)
    iterator = iter(DataLoader(dataset, None, num_workers=2, executor=executor))
    wait_until((tmp_path / "begun").exists, 60)
    iterator._shutdown_workers()
    wait_until(lambda: (tmp_path / "ended").exists() or (tmp_path / "raised").exists(), 60)
    assert not (tmp_path / "raised").exists(), (tmp_path / "raised").read_text()
    assert executor.submit(abs, -3).result(60) == 3


def test_a_stage_of_a_pipeline_runs_there(connected) -> None:
    builder = PipelineBuilder().add_source(range(-20, 20))
    found = (
        builder.pipe(abs, executor=RayExecutor(), concurrency=4, output_order="input")
        .add_sink(4)
        .build()
    )
    assert list(found) == [abs(number) for number in range(-20, 20)]


def test_what_ray_takes_for_each_task_is_passed_on(connected) -> None:
    executor = RayExecutor(runtime_env={"env_vars": {"SHMLOADER_TEST": "there"}})
    assert executor.submit(os.getenv, "SHMLOADER_TEST").result(60) == "there"
    with pytest.raises(ValueError, match="no_such"):
        RayExecutor(no_such=1)


def test_a_cluster_that_is_gone_is_one_error(connected) -> None:
    loader = DataLoader(Pids(400, 0.02), None, num_workers=4, executor=RayExecutor())
    iterator = iter(loader)
    next(iterator)
    ray.shutdown()
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="the executor "):
        list(iterator)
    assert time.monotonic() - began < 60


def test_a_killed_node_s_batches_are_made_again() -> None:
    cluster = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES},
    )
    try:
        doomed = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        options: dict[str, Any] = {"batch_size": 16, "seed": 3}
        dataset = Mixed(640, wait_s=0.01)
        executor = RayExecutor()
        loader = DataLoader(
            dataset, num_workers=6, executor=executor, worker_restarts=12, **options
        )
        iterator = iter(loader)
        found = [next(iterator) for _ in range(8)]
        cluster.remove_node(doomed, allow_graceful=False)
        found += list(iterator)
        assert_same(found, local(dataset, **options))
    finally:
        ray.shutdown()
        cluster.shutdown()
