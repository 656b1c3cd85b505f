"""What an executor's pool sends and awaits, and what its processes keep between tasks."""

import collections
import concurrent.futures
import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.payload import PayloadHandle, PortablePayload
from shmloader.pools import executor_task
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.executor_task import pack_batch, unpack_batch
from shmloader.process_state import PROCESS
from tests.parity.compare import assert_same


class Store:
    """An executor with a store of objects, which keeps all futures.

    Attributes:
        sent: What was sent with each task.
        futures: The tasks' futures.
        stored: The number of objects in the store.
    """

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.futures: list[concurrent.futures.Future[Any]] = []
        self.stored = 0

    def submit(self, *call: Any) -> Any:
        self.sent.append(call[-1])
        self.futures.append(concurrent.futures.Future())
        return self.futures[-1]

    def share(self, contents: Any) -> str:
        self.stored += 1
        return f"reference {self.stored}"


@contextlib.contextmanager
def opened(store: Any) -> Iterator[ExecutorPool]:
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False)
    payload = PortablePayload(([0, 1], list, None, "raise", tuple(plan), 1))
    pool = ExecutorPool(store, payload, loader=b"-", numbers=itertools.count(), base_seed=1)
    with contextlib.closing(pool):
        yield pool


def send(pool: ExecutorPool, seq: int) -> None:
    ticket: Any = SimpleNamespace(seq=seq, indices=[0], worker_id=seq)
    assert pool.send(ticket, 0) is None


class Lost(list[str]):
    """What is told of lost tasks."""

    def lost(self, worker_id: int, death: Any) -> None:
        self.append(death.reason)


def test_after_a_lost_task_the_dataset_is_put_into_the_store_anew() -> None:
    store, events = Store(), Lost()

    with opened(store) as pool:

        def lacks_payload() -> None:
            store.futures[-1].set_result(("",))
            assert not pool.poll(events), "the task is sent again"

        send(pool, 0)
        lacks_payload()
        send(pool, 1)
        assert store.sent == [None, "reference 1", "reference 1"]
        store.futures[-1].set_exception(ConnectionError("node 7 is gone"))
        assert pool.poll(events)
        assert events == ["the executor lost its task (ConnectionError: node 7 is gone)"]
        send(pool, 2)
        lacks_payload()
        assert store.sent[3:] == [None, "reference 2"]


def test_a_task_that_the_executor_has_cancelled_is_lost_and_said_to_be_cancelled() -> None:
    store, events = Store(), Lost()
    with opened(store) as pool:
        send(pool, 0)
        assert store.futures[0].cancel()
        assert pool.poll(events)
    assert events == ["the executor has cancelled its task"]


def test_the_datasets_of_the_loaders_that_were_used_last_are_kept(monkeypatch) -> None:
    made, closed = [], []

    class Maker:
        def __init__(self, payload: Any, loader: int, *_: Any) -> None:
            self.loader, self.digest = loader, payload.digest
            made.append(self.loader)

        def close(self) -> None:
            closed.append(self.loader)

    monkeypatch.setattr(executor_task, "_Maker", Maker)
    monkeypatch.setattr(executor_task, "_keep_freed_memory", lambda: None)
    monkeypatch.setattr(PROCESS.tasks, "makers", collections.OrderedDict())

    def make(loader: int) -> None:
        payload = PayloadHandle(b"-", b"", (0, 0, 0))
        executor_task._find_maker(loader, payload, loader, 0, "", None)

    most = executor_task.KEPT
    for loader in [*range(most), 0, 1, most, most + 1, 0, 1]:
        make(loader)
    assert made == list(range(most + 2))
    assert closed == [2, 3]


def _batch() -> dict[str, Any]:
    image = torch.arange(40_000, dtype=torch.float32).reshape(4, 100, 100)
    return {
        "image": image,
        "part of it": image[1:3, ::2],
        "array": np.arange(6).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "texts": ["a", "b"],
    }


def test_arrays_that_come_are_not_copied_again() -> None:
    body, order, arrays, starts = pack_batch(torch.zeros(100_000))
    batch: Any = unpack_batch(body, order, arrays, starts)
    assert batch.data_ptr() == arrays[0].ctypes.data


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_batch_can_be_changed_and_is_aligned_whatever_the_executor_gives(is_read_only) -> None:
    body, order, arrays, starts = pack_batch(_batch())
    given = []
    for array in arrays:
        odd = np.empty(array.nbytes + 1, np.uint8)[1:]
        odd[:] = array
        odd.flags.writeable = not is_read_only
        given.append(odd)
    batch: Any = unpack_batch(body, order, given, starts)
    assert_same(batch, _batch())
    assert batch["image"].data_ptr() % 16 == 0
    batch["image"] += 1
    batch["array"] += 1


def test_what_the_next_batch_overwrites_is_not_sent() -> None:
    kept = torch.zeros(3)
    packed = pack_batch(kept)
    kept += 1
    assert_same(unpack_batch(*packed), torch.zeros(3))
