"""Which rank a worker serves next that the ranks of a host share."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shmloader.messages import Task
from shmloader.pools.host_child import _HostWorker, _Rank
from shmloader.pools.status_page import Memory


class Tasks:
    """A worker with two ranks. Each message is followed by forgetting it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        start: Any = SimpleNamespace(worker_id=0, loads=None)
        line: Any = SimpleNamespace(note=lambda phase: None, idle=lambda: None)
        self.worker = _HostWorker(stack.enter_context(socket.socket()), start, line)
        self.ranks = []
        for fd in range(2):
            rank = _Rank(stack.enter_context(socket.socket()), 0, start.loads, Memory())
            rank.serve = rank.messages.popleft  # type: ignore[assignment, method-assign]
            self.worker._ranks[fd] = rank
            self.ranks.append(rank)

    def send(self, number: int, *seqs: int, newest: int) -> None:
        rank: Any = self.ranks[number]
        rank._line = SimpleNamespace(newest=lambda: (0, newest))
        rank.messages.extend(Task(seq, 0, 0, b"") for seq in seqs)

    def served(self) -> list[int]:
        found = []
        while (rank := self.worker._most_urgent()) is not None:
            self.worker._serve(rank)
            found.append(self.ranks.index(rank))
        return found


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    with contextlib.ExitStack() as stack:
        yield Tasks(stack)


def test_the_rank_that_is_furthest_behind_is_served_first(tasks: Tasks) -> None:
    tasks.send(0, 7, newest=8)
    tasks.send(1, 1, 2, newest=8)
    assert tasks.served() == [1, 1, 0]


def test_ranks_that_are_equally_far_behind_take_turns(tasks: Tasks) -> None:
    for _ in range(3):
        tasks.send(0, 5, newest=6)
        tasks.send(1, 5, newest=6)
    assert tasks.served() == [0, 1, 0, 1, 0, 1]
