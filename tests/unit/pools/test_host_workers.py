"""What a rank makes of what the owner of a host's workers tells it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.memory.arena import Arena
from shmloader.pools.host_messages import Attach, Lost, Welcome, pack, unpack
from shmloader.pools.host_workers import HostWorkers
from shmloader.pools.status_page import Line, Phase
from shmloader.pools.task_server import TaskConfig

PLAN = FetchConfig(is_iterable=False, auto_collation=True, drop_last=False)


@contextlib.contextmanager
def attached(count: int) -> Iterator[tuple[HostWorkers, socket.socket]]:
    """Workers that do nothing, and their owner's end of the connection."""
    ours, owner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with owner:
        owner.send(pack(Welcome(os.getpid(), count, None, "samples")))
        pool: Any = SimpleNamespace(
            worker_count=count, owner_pid=os.getpid(), connect=lambda: ours, close=lambda: None
        )
        arena = Arena.create(4096, 1)
        workers = HostWorkers(pool, (list, "raise"), TaskConfig(PLAN, arena), count)
        try:
            yield workers, owner
        finally:
            workers.close()
            arena.close()


def test_the_death_of_a_worker_that_was_left_is_not_that_of_its_successor() -> None:
    with attached(2) as (workers, owner):
        workers.retire(1)
        workers.start(1)
        owner.send(pack(Lost(1, 1, 7, 0, 0, was_loading=False)))
        assert workers.wait(0) == []
        owner.send(pack(Lost(1, 2, 8, -9, 0, was_loading=False)))
        assert workers.wait(0) == [(1, None)]
        assert (workers.death(1).pid, workers.death(1).exit_code) == (8, -9)


def test_what_a_dead_worker_was_at_is_not_what_its_successor_is_at() -> None:
    with attached(1) as (workers, owner):
        line = object.__new__(Line)  # without its signal handler
        line._mapping, line._offset, line._thread = workers._status_page._mapping, 0, 0
        line.note(Phase.LOADING, 0, 5)
        owner.send(pack(Lost(0, 1, 7, -9, 0, was_loading=True)))
        assert workers.wait(0) == [(0, None)]
        assert not workers.death(0).was_elsewhere
        workers.replace(0)
        owner.send(pack(Lost(0, 2, 8, -9, 0, was_loading=True)))
        assert workers.wait(0) == [(0, None)]
        assert workers.death(0).was_elsewhere, "it was loading another rank's batch"


def test_a_forked_child_keeps_no_connection() -> None:
    with attached(1) as (workers, owner):
        owner.settimeout(0)
        assert unpack(owner.recv(1000)) == Attach(0, 1)
        workers.leave_to_parent()  # as if this process were the child, and had the only copy
        assert owner.recv(1000) == b""
