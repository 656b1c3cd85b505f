"""Leases: alive under every view, back exactly once, parted from a child; debug checks."""

import collections
import gc
import os

import numpy as np
import pytest
import torch

from shmloader.memory import arena as arena_module
from shmloader.memory.arena import Arena, Slot

MIB = 1 << 20
SLOT_ID = 5


@pytest.fixture
def arena():
    arena = Arena.create(MIB, SLOT_ID + 1)
    for slot in arena.slots:
        arena.reach(slot, MIB)
    yield arena
    arena.close()


@pytest.fixture
def slot(arena):
    return arena.slots[SLOT_ID]


class Book:
    """The leases that have ended."""

    def __init__(self) -> None:
        self.ended = collections.deque()

    def open(self, slot: Slot):
        return slot.lend(self.ended.append)

    def collect(self) -> list[int]:
        ended = [lease.slot_id for lease in self.ended]
        self.ended.clear()
        return ended


@pytest.fixture
def book():
    return Book()


def lend(book: Book, slot: Slot) -> torch.Tensor:
    """A tensor of 1000 ones over a lent slot."""
    slot.touched_bytes = 4000
    tensor = torch.frombuffer(book.open(slot), dtype=torch.float32, count=1000)
    return tensor.fill_(1)


def saved_for_backward(tensor: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(1000, requires_grad=True)
    return (weight * tensor).sum()


HOLDERS = {
    "the tensor": lambda t: t,
    "a slice": lambda t: t[10:20],
    "one element": lambda t: t[3],
    "a reshaped view": lambda t: t.view(10, 100),
    "another dtype": lambda t: t.view(torch.int32),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "the storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "a view of numpy": lambda t: t.numpy()[::3],
    "a view of a view of numpy": lambda t: t.numpy()[::3].reshape(-1, 2)[1:].T,
    "numpy and back": lambda t: torch.from_numpy(t.numpy()[5:]),
    "a memoryview of numpy": lambda t: memoryview(t.numpy()),
    "numpy's frombuffer": lambda t: np.frombuffer(t.numpy(), np.uint8)[4:],
    "a DLPack capsule": torch.utils.dlpack.to_dlpack,
    "numpy by DLPack": np.from_dlpack,
    "torch by DLPack": torch.from_dlpack,
    "a tensor saved by autograd": saved_for_backward,
    "a parameter": torch.nn.Parameter,
    "a transposed view in a list": lambda t: [t.view(10, 100).T],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_a_slot_comes_back_when_the_last_view_dies_and_only_then(book, slot, hold):
    holder = hold(lend(book, slot))
    gc.collect()
    assert not book.ended, "the slot came back while it can be read"
    assert book.collect() == []
    del holder
    assert book.ended
    assert book.collect() == [SLOT_ID]
    assert not book.ended
    assert book.collect() == [], "the slot came back twice"


def fork_and_wait() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def fill_anew(arena: Arena, slot: Slot) -> None:
    """Do as another process does that fills the slot."""
    arena.reach(slot, MIB)
    slot.memory[:4000] = bytes(4000)


def test_a_slot_that_was_lent_during_a_fork_is_filled_again_beside_its_old_views(book, arena, slot):
    tensor = lend(book, slot)
    fork_and_wait()
    assert slot.nbytes == 0, "its mapping is the views'"
    tensor[0] = 7
    fill_anew(arena, slot)
    assert tensor[0] == 7
    assert (tensor[1:] == 1).all()
    assert book.collect() == []
    del tensor
    assert book.collect() == [SLOT_ID]
    again = lend(book, slot)
    assert (again == 1).all()


def test_a_slot_whose_views_cannot_be_parted_is_not_filled_again(book, slot, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module, "_map_at", refuse)
    tensor = lend(book, slot)
    fork_and_wait()
    assert tensor.sum() == 1000
    del tensor
    assert book.collect() == [], "the child may read it"


def test_slots_that_only_a_device_reads_are_not_parted_from_their_views(book, arena, slot):
    arena.is_read_by_device = True
    tensor = lend(book, slot)
    fork_and_wait()
    assert slot.memory[:4] == memoryview(tensor.numpy()).cast("B")[:4]
    assert slot.nbytes == MIB
