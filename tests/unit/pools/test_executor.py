"""What an executor's pool sends with its tasks, by an executor that a test answers for."""

from __future__ import annotations

import concurrent.futures
from types import SimpleNamespace
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.portable import PortablePayload
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.executor_task import Result, packed_name
from shmloader.pools.process_numbers import ProcessNumbers


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


def test_after_a_lost_task_the_dataset_is_put_into_the_store_anew() -> None:
    plan = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False)
    payload = PortablePayload(([0, 1], list, None, "raise", tuple(plan), 1, 4096))
    store: Any = Store()
    pool = ExecutorPool(
        store, payload, loader=b"-", numbers=ProcessNumbers(), base_seed=1, slot_bytes=4096,
        slot_count=3,
    )  # fmt: skip
    lost: list[str] = []
    events: Any = SimpleNamespace(lost=lambda number, death, at: lost.append(death.reason))

    def send(seq: int) -> None:
        ticket: Any = SimpleNamespace(seq=seq, indices=[0], worker_id=seq, slot_id=seq)
        assert pool.send(ticket, 0) is None

    def lacks_payload() -> None:
        store.futures[-1].set_result((*Result(packed_name()),))
        assert not pool.poll(None, events), "the task is sent again"

    send(0)
    lacks_payload()
    send(1)
    assert store.sent == [None, "reference 1", "reference 1"]
    store.futures[-1].set_exception(ConnectionError("node 7 is gone"))
    assert pool.poll(None, events)
    assert lost == ["the executor lost its task (ConnectionError: node 7 is gone)"]
    send(2)
    lacks_payload()
    assert store.sent[3:] == [None, "reference 2"]
    pool.close()
