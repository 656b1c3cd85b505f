"""What a forked child does with the workers of its parent."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from shmloader.pools.worker_processes import WorkerProcesses


def test_a_forked_child_closes_its_copies_once() -> None:
    """By the second time, other files may have the numbers of their descriptors."""
    closed: list[str] = []
    ours, theirs = os.pipe()
    workers = object.__new__(WorkerProcesses)
    workers._is_closed = False
    workers.queue = None
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
