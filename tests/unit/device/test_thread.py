"""Epochs of an engine on a thread of its own, without workers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from shmloader.device.stage import Stage
from shmloader.device.thread import StagedEngine
from shmloader.engine.engine import Engine
from shmloader.engine.scheduler import Scheduler
from tests.pools.scripted import ScriptedPool, call_of, next_of
from tests.process.support import Bad


class Unchanged(Stage):
    ahead, name, kind = 1, "unchanged", "pin"

    def run(self, batch: Any) -> Any:
        return batch


def failing() -> Iterator[object]:
    raise Bad(0)
    yield


def test_a_sampler_that_fails_at_once_ends_the_epoch_whatever_the_one_before_left() -> None:
    pool: Any = ScriptedPool(2, lambda pool: pool.answer_all())
    engine = Engine(pool, Scheduler(2, 4, 1, in_order=True), timeout_s=0)
    staged = StagedEngine(engine, Unchanged(), timeout_s=20)
    with contextlib.closing(staged):
        staged.start(iter(range(9)))
        assert next_of(staged) == 0
        with pytest.raises(Bad):
            call_of(staged.restart, failing())
        with pytest.raises(StopIteration):
            next_of(staged)
        staged.restart(iter(range(3)))
        assert [next_of(staged) for _ in range(3)] == [0, 1, 2]
