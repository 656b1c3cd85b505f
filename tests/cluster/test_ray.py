"""Batches made on Ray: one machine that stands for several, one of which is killed."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from typing import Any

import cloudpickle
import numpy as np
import pytest

from shmloader import DataLoader, LoaderTimeoutError, WorkerDiedError
from shmloader.cluster import RayExecutor
from shmloader.pools import executor_task
from tests.cluster import datasets
from tests.cluster.datasets import OPTIONS, Bad, Held, Killing, Large, Mixed, Notes, Pids, local
from tests.cluster.needed import needed
from tests.commands import output_of, run_python
from tests.parity.compare import assert_same
from tests.process.support import mapping_at, wait_until

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


@pytest.fixture(scope="module")
def disconnected_at_the_end() -> Iterator[None]:
    yield
    ray.shutdown()


def start_ray(**more: Any) -> None:
    options = {"include_dashboard": False, "log_to_driver": False, **more}
    ray.init(num_cpus=2, object_store_memory=STORE_BYTES, **options)


@pytest.fixture
def connected(disconnected_at_the_end) -> None:
    """Ray on this machine, which takes seconds to start: tests share it unless they end it."""
    if not ray.is_initialized():
        start_ray()


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


def test_a_late_batch_is_named_and_not_lost(connected, tmp_path) -> None:
    dataset = Held(tmp_path / "go")
    iterator = iter(DataLoader(dataset, None, num_workers=2, executor=RayExecutor(), timeout=1))
    with pytest.raises(LoaderTimeoutError, match=r"waiting for batch 0 \(index 0\)") as caught:
        next(iterator)
    assert "Worker 0 (of the executor) has been loading batch 0 (index 0)" in str(caught.value)
    (tmp_path / "go").touch()
    found, deadline = [], time.monotonic() + 60
    while len(found) < 4 and time.monotonic() < deadline:
        with contextlib.suppress(LoaderTimeoutError):
            found.append(next(iterator))
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_process_s_batch_is_made_again_by_ray_alone(
    connected, tmp_path, caplog, number
) -> None:
    """By SIGTERM, Ray itself ends a process, which raises SystemExit in the dataset."""
    dataset = Killing(tmp_path / "killed", number)
    loader = DataLoader(dataset, num_workers=4, executor=RayExecutor(), **OPTIONS)
    found = list(loader)
    assert (tmp_path / "killed").exists()
    assert not caplog.records, "Ray says nothing to the loader"
    assert_same(found, local(Mixed(24)))


def test_what_ray_is_told_to_give_up_is_made_again_by_worker_restarts(
    connected, tmp_path, caplog
) -> None:
    executor = RayExecutor(max_retries=0)
    given: dict[str, Any] = {"num_workers": 4, "executor": executor, **OPTIONS}
    dataset = Killing(tmp_path / "killed")
    assert_same(list(DataLoader(dataset, worker_restarts=4, **given)), local(Mixed(24)))
    assert "WorkerCrashedError" in caplog.text

    iterator, found = iter(DataLoader(Killing(tmp_path / "again"), **given)), []
    with pytest.raises(WorkerDiedError, match="WorkerCrashedError"):
        found.extend(iterator)
    assert_same(found, local(Mixed(24))[: len(found)])


def test_more_batches_than_the_store_holds_all_come(connected) -> None:
    """While nothing is taken, 240 MB wait for a store of 100 MB: Ray puts the rest on the disk."""
    loader = DataLoader(Large(60), 1, num_workers=60, executor=RayExecutor())
    iterator = iter(loader)
    first = next(iterator)
    sent = iterator._pool._tasks
    wait_until(lambda: all(one.future.done() for one in sent.copy().values()), 120)
    for index, batch in enumerate([first, *iterator]):
        assert batch.unique().tolist() == [index]
    assert index == 59


def test_a_dataset_that_is_larger_than_the_store_reaches_it(connected) -> None:
    executor = RayExecutor()
    reference = executor.share(np.ones(STORE_BYTES + 1, np.uint8))
    assert executor.submit(np.sum, reference).result(60) == STORE_BYTES + 1


def test_a_batch_is_copied_once_from_ray_s_store(connected, monkeypatch) -> None:
    """Arrays in the store are not writable, and the store's memory is not held by a batch."""
    seen = []
    copy_if_needed = executor_task._writable

    def look(array: Any) -> Any:
        seen.append((array.flags.writeable, mapping_at(array.ctypes.data)))
        return copy_if_needed(array)

    monkeypatch.setattr(executor_task, "_writable", look)
    for batch in DataLoader(Large(6), 1, num_workers=2, executor=RayExecutor()):
        assert "plasma" not in mapping_at(batch.data_ptr())
        batch.add_(1)
    assert len(seen) == 6
    for is_writeable, file in seen:
        assert not is_writeable
        assert "plasma" in file, seen


def test_a_task_that_runs_is_left_to_end_when_the_loader_is_closed(connected, tmp_path) -> None:
    executor = RayExecutor()
    dataset = Notes(tmp_path, 3.0)
    iterator = iter(DataLoader(dataset, None, num_workers=2, executor=executor))
    wait_until((tmp_path / "begun").exists, 60)
    iterator._shutdown_workers()
    wait_until(lambda: (tmp_path / "ended").exists() or (tmp_path / "raised").exists(), 60)
    assert not (tmp_path / "raised").exists(), (tmp_path / "raised").read_text()
    assert executor.submit(abs, -3).result(60) == 3


def test_tasks_may_be_cancelled_at_the_moment_when_they_end(connected) -> None:
    """In a program of its own, which Ray ended within a second when it cancelled them itself."""
    address = ray.get_runtime_context().gcs_address
    assert output_of("-c", CANCELS, address) == "3\n"


def test_another_cluster_is_not_the_one_that_was_left(connected) -> None:
    executor = RayExecutor(resources={"none has this": 1})
    future = executor.submit(abs, -3)
    ray.shutdown()
    start_ray()
    with pytest.raises(RuntimeError, match="connected to another cluster"):
        executor.submit(abs, -3)
    executor.check()
    with pytest.raises(BrokenExecutor):
        future.result(20)


CANCELS = """
import sys
import ray
from shmloader.cluster import RayExecutor

ray.init(address=sys.argv[1], log_to_driver=False)
executor = RayExecutor()
for number in range(500):
    futures = [executor.submit(bytes, 3) for _ in range(8)]
    futures[number % 4].result()
    for future in futures:
        future.cancel()
print(executor.submit(abs, -3).result(), flush=True)
"""


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


def test_a_program_survives_that_leaves_its_epoch_when_its_raylet_is_gone() -> None:
    source = KILLS_ITS_RAYLET.partition("began = ")[0] + LEAVES_THEN
    assert output_of("-c", source).endswith("alive\n")


LEAVES_THEN = """
loader.close()
time.sleep(3)
print("alive", flush=True)
os._exit(0)
"""


def test_an_executor_whose_cluster_is_left_can_be_shut_down(connected) -> None:
    with RayExecutor(resources={"none has this": 1}) as executor:
        future = executor.submit(abs, -3)
        ray.shutdown()
        with pytest.raises(RuntimeError, match="Ray was shut down"):
            executor.share(1)
        assert not ray.is_initialized()
    executor.check()
    with pytest.raises(BrokenExecutor):
        future.result(0)


def test_a_program_that_is_connected_by_ray_client_loads_and_leaves_epochs(monkeypatch) -> None:
    needed("grpc")
    # Else one connection in ten is refused: Ray's server for clients forks while gRPC's threads
    # run, and gRPC's own handlers end the child (ray-project/ray, issue 63202).
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = cluster_utils.Cluster(True, head_node_args={**head, "ray_client_server_port": port})
    try:
        done = run_python("-c", BY_CLIENT, f"ray://127.0.0.1:{port}")
    finally:
        cluster.shutdown()
    assert done.stdout == "[0, 4, 8, 12, 16]\n0 -3\nFalse\n", done


BY_CLIENT = """
import os, sys, time
import ray
from shmloader import DataLoader
from shmloader.cluster import RayExecutor

ray.init(sys.argv[1], log_to_driver=False)
executor = RayExecutor()
loader = DataLoader(list(range(20)), 4, num_workers=6, executor=executor)
print([int(batch[0]) for batch in loader], flush=True)
iterator = iter(loader)
first = int(next(iterator)[0])
loader.close()
print(first, executor.submit(int, -3).result(60), flush=True)
iterator = iter(DataLoader(list(range(200)), 4, num_workers=30, executor=executor))
next(iterator)
iterator._shutdown_workers()
ray.shutdown()
time.sleep(2)
print(ray.is_initialized(), flush=True)
os._exit(0)
"""


def test_a_full_disk_under_a_full_store_is_one_clear_error() -> None:
    ray.shutdown()
    start_ray(_system_config={"local_fs_capacity_threshold": 0.0001})  # any disk is full
    try:
        executor = RayExecutor()
        loader = DataLoader(Large(60), 1, num_workers=60, executor=executor)
        iterator, found = iter(loader), []
        sent = iterator._pool._tasks
        wait_until(
            lambda: any(
                one.future.done() and one.future.exception() for one in sent.copy().values()
            ),
            120,
        )
        with pytest.raises(WorkerDiedError, match=r"OutOfDiskError.* object store is full"):
            found.extend(iterator)
        for index, batch in enumerate(found):
            assert batch.unique().tolist() == [index]
    finally:
        ray.shutdown()


def test_a_killed_raylet_of_the_driver_is_one_error() -> None:
    """In a program of its own, which Ray may end."""
    done = run_python("-c", KILLS_ITS_RAYLET)
    told = r"^WorkerDiedError after .*LocalRayletDiedError"
    assert re.search(told, done.stdout, re.MULTILINE), done


KILLS_ITS_RAYLET = """
import os, signal, time
import cloudpickle, psutil, ray
from shmloader import DataLoader
from shmloader.cluster import RayExecutor
from tests.cluster import datasets
cloudpickle.register_pickle_by_value(datasets)
ray.cloudpickle.register_pickle_by_value(datasets)

ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
    _system_config={
        "health_check_initial_delay_ms": 0, "health_check_period_ms": 500,
        "health_check_timeout_ms": 500, "health_check_failure_threshold": 2,
    },
)
raylets = [one for one in psutil.Process().children(True) if one.name() == "raylet"]
loader = DataLoader(datasets.Pids(100_000, 0.05), None, num_workers=4, executor=RayExecutor())
iterator = iter(loader)
next(iterator)
assert raylets
for one in raylets:
    one.kill()
began = time.monotonic()
try:
    list(iterator)
except Exception as error:
    print(type(error).__name__, "after", time.monotonic() - began, "s:", error, flush=True)
os._exit(0)
"""


def test_a_killed_node_s_batches_are_made_again() -> None:
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES}
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
