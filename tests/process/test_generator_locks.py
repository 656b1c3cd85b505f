"""Workers that are forked while another thread draws random numbers."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmloader import DataLoader, WorkerDiedError
from shmloader.pools.worker import report_unlocked
from tests.process.support import in_thread


@pytest.fixture(autouse=True)
def _another_thread() -> Iterator[None]:
    stop = threading.Event()
    with in_thread(stop.wait):
        yield
        stop.set()


def batches() -> list[int]:
    with DataLoader(range(4), num_workers=2, timeout=20) as loader:
        return [batch.item() for batch in loader]


def test_a_worker_starts_though_another_thread_had_numpys_lock() -> None:
    lock: Any = np.random.mtrand._rand._bit_generator.lock
    has_lock, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has_lock.set()
            may_end.wait()

    with in_thread(hold):
        has_lock.wait()
        try:
            assert batches() == [0, 1, 2, 3]
        finally:
            may_end.set()


def test_another_worker_is_forked_for_one_that_finds_torchs_lock_held(
    monkeypatch, tmp_path, caplog
) -> None:
    def report(channel: Any) -> None:
        path = tmp_path / "first"
        if not path.exists():
            path.touch()
            signal.pause()
        report_unlocked(channel)

    monkeypatch.setattr("shmloader.pools.worker.report_unlocked", report)
    monkeypatch.setattr("shmloader.pools.starting._FIRST_WAIT_S", 2.0)
    assert batches() == [0, 1, 2, 3]
    assert caplog.messages[0] == "worker 0 cannot seed torch's generator, and is replaced"


def test_that_is_given_up_if_it_never_helps(monkeypatch) -> None:
    monkeypatch.setattr("shmloader.pools.worker.report_unlocked", lambda _: signal.pause())
    monkeypatch.setattr("shmloader.pools.starting._FIRST_WAIT_S", 0.01)
    with pytest.raises(RuntimeError, match="Give multiprocessing_context='forkserver'"):
        batches()


def test_a_worker_that_dies_before_it_reports_is_a_dead_worker(monkeypatch) -> None:
    monkeypatch.setattr("shmloader.pools.worker.report_unlocked", lambda _: os._exit(3))
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        batches()
