"""An epoch's lock: what another thread does just after it is free."""

from __future__ import annotations

import threading

import pytest

from shmloader.engine.failures import FailureList
from shmloader.pipeline.config import OpKind
from shmloader.pipeline.epoch import Epoch, StageOp
from shmloader.pipeline.source import SourceReader
from shmloader.pipeline.stages import Job
from tests.unit.pipeline.support import chain


class StageExecutor:
    """Notes what it is given, and runs nothing."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def put(self, job: Job) -> None:
        self.jobs.append(job)


class OvertakenLock:
    """Once it is free, another thread is faster than the one that has freed it."""

    def __init__(self, other) -> None:
        self._lock = threading.Lock()
        self._others = [other]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._others:
            self._others.pop()()


def test_a_job_that_another_thread_makes_ready_is_handed_out_once():
    executor = StageExecutor()
    stage_ops = [
        StageOp("the source", iter, OpKind.GENERATOR, executor),
        StageOp("abs", abs, OpKind.FUNCTION, executor),
    ]
    reader = SourceReader([1], None, 1)
    epoch = Epoch(chain([1], abs)._config, stage_ops, FailureList(), reader)
    epoch.begin()
    [source] = executor.jobs
    epoch._lock = OvertakenLock(lambda: epoch.yielded(source, 1))
    with pytest.raises(TimeoutError):
        epoch.take(0)
    assert [job.item for job in executor.jobs[1:]] == [1]
