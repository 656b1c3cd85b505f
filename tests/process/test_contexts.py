"""Multiprocessing contexts whose ``Process`` is no process, such as MONAI's, whose is a thread."""

import gc
import queue
import signal
import threading
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader


class ThreadAsProcess(threading.Thread):
    pid, exitcode = 123456789, None

    def run(self) -> None:
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class PlainQueue(queue.Queue[Any]):
    def close(self) -> None: ...

    cancel_join_thread = close


class ThreadContext(SpawnContext):
    _name = "threads"
    Process: Any = ThreadAsProcess
    Queue: Any = PlainQueue


REFUSED = "multiprocessing_context should start processes; thread_pool=True loads on threads"


def batches(loader: TorchLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_under_install_a_loader_whose_processes_are_threads_runs_on_torch_s_engine() -> None:
    frozen, handler = gc.get_freeze_count(), signal.getsignal(signal.SIGINT)
    with shmloader.installed() as report:
        loader: TorchLoader[Any] = TorchLoader(
            range(8),  # type: ignore[arg-type]
            batch_size=4,
            num_workers=1,
            multiprocessing_context=ThreadContext(),
        )
        assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (row,) = report.loaders
    assert row.engine == "torch"
    assert row.why == "its multiprocessing_context starts no processes"
    assert frozen - 1_000 <= gc.get_freeze_count() <= frozen  # some of these have ended since
    assert signal.getsignal(signal.SIGINT) is handler


def test_our_loader_refuses_a_context_whose_process_is_a_thread() -> None:
    with pytest.raises(ValueError, match=f"^{REFUSED}$"):
        DataLoader(range(8), num_workers=1, multiprocessing_context=ThreadContext())
    loader = DataLoader(range(8), num_workers=1)
    loader.multiprocessing_context = ThreadContext()
    with pytest.raises(ValueError, match=f"^{REFUSED}$"):
        iter(loader)
