"""What the backend decides by the kind of device, and what it does without its driver."""

from __future__ import annotations

import pytest
import torch

from shmloader.device import drivers
from shmloader.device.backend import Backend, BlockingBackend, move_to, open_backend
from shmloader.device.page_locks import PageLocks
from shmloader.memory.slot import Slot


def test_a_wait_on_cuda_keeps_no_core_busy(monkeypatch) -> None:
    calls = []

    def note(name):
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setattr(torch.cuda, "Stream", note("stream"))
    monkeypatch.setattr(torch.cuda, "Event", note("event"))
    device = torch.device("cuda", 1)
    backend = open_backend(device)
    assert calls == []  # nothing of CUDA is initialized
    backend._new_stream(device)
    backend._new_event(device)
    assert calls == [("stream", (device,), {}), ("event", (), {"blocking": True})]
    assert backend._current_stream is torch.cuda.current_stream


def test_a_kind_without_streams_copies_and_waits() -> None:
    backend = open_backend(torch.device("mps", 0))
    assert type(backend) is BlockingBackend
    assert not backend.can_pin
    assert backend.record().query()


@pytest.fixture
def slot():
    made = Slot.create(1 << 20)
    yield made
    made.close()


def test_without_the_driver_s_library_it_says_so_once_and_locks_nothing(late, slot, monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(drivers.DRIVERS, "late", missing)
    locks = PageLocks([Backend(torch.device("late", 0))])
    with pytest.warns(RuntimeWarning, match=r"by way of pinned memory.*libcuda"):
        locks.lock(slot, 100)
    locks.lock(slot, 200)  # a second warning would be an error here
    assert locks.unlock(slot)


def test_a_kind_without_a_known_driver_goes_by_pinned_memory_in_silence(slot) -> None:
    locks = PageLocks([Backend(torch.device("xpu", 0))])
    locks.lock(slot, 100)
    assert not locks.cover(torch.frombuffer(slot.array(), dtype=torch.uint8, count=10))
    assert locks.unlock(slot)


class Old:
    def to(self, device):
        return ("moved", device)


class New:
    def to(self, device, *, non_blocking):
        return ("moved", device, non_blocking)


def test_objects_are_moved_by_their_own_to() -> None:
    assert move_to(Old(), "cuda") == ("moved", "cuda")
    assert move_to(New(), "cuda") == ("moved", "cuda", True)
