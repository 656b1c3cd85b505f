"""What the CUDA backend decides, over a driver and streams that only write down."""

from __future__ import annotations

import os

import pytest
import torch

from shmloader.memory.slot import Slot
from shmloader.stages import cuda
from shmloader.stages.cuda import CudaBackend, move_to

MIB = 1 << 20


class Driver:
    """Notes what it is asked for; refuses what it is told to."""

    refuses = ""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = LOG

    def register(self, address, nbytes):
        self.calls.append(("register", address, nbytes))
        return self.refuses

    def unregister(self, address):
        self.calls.append(("unregister", address))

    def relax_capture(self):
        self.calls.append(("relax",))


class Stream:
    def __init__(self, device) -> None:
        pass

    def synchronize(self):
        LOG.append(("synchronize",))


LOG: list[tuple[object, ...]] = []


@pytest.fixture
def log(monkeypatch):
    LOG.clear()
    monkeypatch.setattr(cuda, "open_driver", Driver)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Driver, "refuses", "")
    return LOG


@pytest.fixture
def slot():
    made = Slot.create(16 * MIB)
    yield made
    made.close()


def backend():
    return CudaBackend(torch.device("cuda", 0))


def test_a_slot_is_locked_in_steps_and_once(log, slot) -> None:
    ours = backend()
    ours.lock(slot, 100)
    ours.lock(slot, 2 * MIB)
    ours.lock(slot, 1)
    assert log == [("register", slot.address, 2 * MIB)]


def test_a_slot_that_grows_is_unlocked_after_all_copies_and_locked_anew(log, slot) -> None:
    ours = backend()
    ours.lock(slot, 100)
    ours.lock(slot, 2 * MIB + 1)
    assert log == [
        ("register", slot.address, 2 * MIB),
        ("synchronize",),
        ("unregister", slot.address),
        ("register", slot.address, 4 * MIB),
    ]


def test_no_more_is_locked_than_there_is(log) -> None:
    small = Slot.create(MIB)
    backend().lock(small, 10)
    assert log == [("register", small.address, MIB)]
    small.close()


def test_what_was_not_locked_is_not_unlocked(log, slot) -> None:
    ours = backend()
    ours.unlock(slot)
    assert log == []
    ours.lock(slot, 1)
    ours.unlock(slot)
    ours.unlock(slot)
    assert [call[0] for call in log] == ["register", "synchronize", "unregister"]


def test_a_forked_child_unlocks_nothing(log, slot, monkeypatch) -> None:
    ours = backend()
    ours.lock(slot, 1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    ours.unlock(slot)
    assert [call[0] for call in log] == ["register"]


def test_a_refusal_is_told_once_and_nothing_is_tried_again(log, slot, monkeypatch) -> None:
    monkeypatch.setattr(Driver, "refuses", "CUDA_ERROR_NOT_PERMITTED")
    ours = backend()
    other = Slot.create(MIB)
    with pytest.warns(RuntimeWarning, match="2097152 bytes was refused: CUDA_ERROR_NOT"):
        ours.lock(slot, 1)
    # A second warning would be an error here.
    ours.lock(slot, 3 * MIB)
    ours.lock(other, 1)
    assert log == [("register", slot.address, 2 * MIB)]
    ours.unlock(slot)
    assert len(log) == 1
    other.close()


def test_without_the_driver_s_library_it_warns_and_goes_by_pinned_memory(log, slot, monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda, "open_driver", missing)
    with pytest.warns(RuntimeWarning, match="by way of pinned memory.*libcuda"):
        ours = backend()
    ours.lock(slot, 1)
    ours.unlock(slot)
    assert log == []
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(1) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: "copied")
    assert ours.copy(torch.ones(2)) == "copied"
    assert pinned == [1]


def test_a_locked_tensor_is_not_pinned_first(log, slot, monkeypatch) -> None:
    how = []

    def to(self, device, *, non_blocking):
        how.append((device, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pytest.fail("pinned"))
    monkeypatch.setattr(torch.Tensor, "to", to)
    backend().copy(torch.ones(2))
    assert how == [(torch.device("cuda", 0), True)]


def test_the_thread_takes_the_device_and_lets_others_capture(log, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(("set", device)))
    backend().start()
    assert log == [("set", torch.device("cuda", 0)), ("relax",)]


class Old:
    def to(self, device):
        return ("moved", device)


class New:
    def to(self, device, *, non_blocking):
        return ("moved", device, non_blocking)


def test_objects_are_moved_by_their_own_to() -> None:
    assert move_to(Old(), "cuda") == ("moved", "cuda")
    assert move_to(New(), "cuda") == ("moved", "cuda", True)
