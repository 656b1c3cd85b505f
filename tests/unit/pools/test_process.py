"""What a pool of processes reports beside their answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmloader.memory.arena import Arena
from shmloader.messages import StartEpoch, unpack
from shmloader.pools.process import ProcessPool


def test_each_epoch_is_told_once_how_many_workers_the_host_wants() -> None:
    """Workers that were leaving stay when an epoch is left, and have to leave again."""
    sent, told = [], []
    workers: Any = SimpleNamespace(
        readings=None,
        wanted_count=2,
        wait=lambda timeout_s: [],
        send=lambda worker_id, data: sent.append((worker_id, unpack(data))),
        close=lambda: None,
    )
    events: Any = SimpleNamespace(workers_wanted=told.append)
    pool = ProcessPool(workers, Arena.create(4096, 1))
    assert [pool.wait(0, events) for _ in range(2)] == [True, False]
    assert told == [2]
    workers.wanted_count = 3
    assert [pool.wait(0, events) for _ in range(2)] == [True, False]
    for worker_id in range(2):
        pool.start_epoch(worker_id, 1)
    assert sent == [(0, StartEpoch(1)), (1, StartEpoch(1))]
    assert [pool.wait(0, events) for _ in range(2)] == [True, False]
    assert told == [2, 3, 3]
    pool.close()
