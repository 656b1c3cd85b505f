"""What becomes of a worker's place when the worker is lost."""

from __future__ import annotations

import collections
import os
import select
from types import SimpleNamespace
from typing import Any

import pytest

from shmloader.pools.worker_processes import WorkerProcesses


@pytest.mark.parametrize("is_limited", [False, True])
def test_a_lost_worker_lets_another_one_start_up(is_limited: bool) -> None:
    """It may have waited for its turn, or have had it."""
    released: list[str] = []
    startup = SimpleNamespace(release=lambda: released.append("a turn")) if is_limited else None
    workers = object.__new__(WorkerProcesses)
    workers._poll = select.poll()
    workers._starter = SimpleNamespace(startup=startup)  # type: ignore[assignment]
    worker: Any = SimpleNamespace(
        channel=SimpleNamespace(fileno=lambda: 8), pidfd=9, is_lost=False,
        outbox=collections.deque([(b"a task", ())]),
    )  # fmt: skip
    for fd in (8, 9):
        workers._poll.register(fd, select.POLLIN)
    workers._note_lost(worker)
    assert released == ["a turn"] * is_limited
    assert worker.is_lost
    assert not worker.outbox
    with pytest.raises(FileNotFoundError):
        workers._poll.modify(9, select.POLLIN)


def test_a_forked_child_closes_its_copies_once() -> None:
    """By the second time, other files may have the numbers of their descriptors."""
    closed: list[str] = []
    ours, theirs = os.pipe()
    workers = object.__new__(WorkerProcesses)
    workers._is_closed = False
    channel = SimpleNamespace(close=lambda: closed.append("channel"))
    worker: Any = SimpleNamespace(channel=channel, pidfd=ours)
    workers._workers = [worker]
    workers._starter = SimpleNamespace(  # type: ignore[assignment]
        abandon=lambda: closed.append("what starts workers")
    )
    workers.abandon()
    assert closed == ["channel", "what starts workers"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)
    os.dup2(theirs, ours)
    workers.abandon()
    assert closed == ["channel", "what starts workers"]
    for fd in (ours, theirs):
        os.close(fd)
