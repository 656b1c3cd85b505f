"""The arena and leases: no name, no fixed cost, sealed, safe under views and forks; segments."""

import collections
import ctypes
import errno
import gc
import os
import resource
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
import torch

from shmloader.errors import SharedMemoryError
from shmloader.memory import arena as arena_module
from shmloader.memory.arena import Arena, Slot, populate
from shmloader.memory.segment import SegmentWriter
from shmloader.pools.starting import close_inherited
from tests.process.bytecodes import KINDS, interrupt
from tests.process.support import descriptor_count
from tests.unit.memory.support import (
    MIB,
    exit_code_of_a_child,
    in_a_child,
    names_in,
    resident_bytes,
)


@pytest.fixture
def arena():
    """Two slots, of which the second is mapped as far as it goes."""
    arena = Arena.create(8 * MIB, 2)
    arena.reach(arena.slots[1], 8 * MIB)
    yield arena
    arena.close()


@pytest.fixture
def slot(arena):
    return arena.slots[1]


def is_mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any("memfd:" in line and line.split()[4] == str(inode) for line in lines)


def test_huge_slots_cost_nothing_until_they_are_written():
    arena = Arena.create(1 << 37, 2000)
    slot = arena.slots[1999]
    arena.reach(slot, 1 << 36)
    assert slot.nbytes >= 1 << 36
    assert resident_bytes(arena) == 0
    slot.memory[1 << 35] = 1
    assert resident_bytes(arena) == PAGESIZE
    arena.close()


@pytest.mark.parametrize("page_count", [1 << 50, 0, -1, -1 << 50])
def test_slots_are_as_large_as_can_be_where_the_machines_memory_is_not_known(
    page_count, monkeypatch
):
    monkeypatch.setattr(os, "sysconf", lambda _: page_count)
    arena = Arena.create(None, 2)
    assert arena.slot_bytes == 1 << 37
    arena.close()


@pytest.mark.parametrize("nbytes", [0, MIB, 64 * MIB])
def test_the_length_of_an_arena_cannot_be_changed(arena, nbytes):
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fileno(), nbytes)


def test_what_is_given_back_reads_as_zeros_and_takes_no_memory(arena, slot):
    other = arena.slots[0]
    arena.reach(other, MIB)
    slot.memory[: 4 * MIB] = b"x" * (4 * MIB)
    other.memory[:PAGESIZE] = b"y" * PAGESIZE
    slot.touched_bytes = 4 * MIB
    assert arena.give_back(slot, MIB)
    assert slot.touched_bytes == MIB
    assert resident_bytes(arena) == MIB + PAGESIZE
    assert slot.memory[: 4 * MIB] == b"x" * MIB + bytes(3 * MIB)
    assert other.memory[0] == ord("y")


def test_an_arena_without_an_owner_leaves_nothing():
    before = names_in("/proc/self/fd")
    arena = Arena.create(MIB, 1)
    arena.reach(arena.slots[0], MIB)
    inode = os.fstat(arena.fileno()).st_ino
    del arena
    assert names_in("/proc/self/fd") == before
    assert not is_mapped(inode)


@pytest.mark.parametrize(
    "view_of",
    [
        lambda slot: slot.array(),
        lambda slot: np.frombuffer(slot.array(), np.uint8),
        lambda slot: slot.memory[:],
    ],
    ids=["array", "numpy", "memoryview"],
)
def test_an_arena_closed_under_a_view_lives_as_long_as_the_view(arena, slot, view_of):
    slot.memory[:5] = b"hello"
    view = view_of(slot)
    address, inode = slot.address, os.fstat(arena.fileno()).st_ino
    arena.close()
    assert bytes(memoryview(view).cast("B")[:5]) == b"hello"
    assert ctypes.string_at(address, 5) == b"hello"
    assert is_mapped(inode)
    del view
    assert not is_mapped(inode)


def test_a_forked_worker_closes_the_arenas_that_are_not_its_own(arena, slot):
    other = Arena.create(MIB, 1)
    other.reach(other.slots[0], MIB)
    slot.memory[:5] = b"hello"

    def work() -> str:
        close_inherited(arena)
        lengths = slot.nbytes, other.slots[0].nbytes
        arena.reach(slot, 5)
        return f"{lengths} {other.fileno()} {bytes(slot.memory[:5]).decode()}"

    assert in_a_child(work) == "(0, 0) -1 hello"
    assert other.slots[0].nbytes == MIB
    other.close()


def _leave_address_space(nbytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * PAGESIZE + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_where_a_slot_cannot_be_mapped_the_error_names_the_limit_and_what_helps():
    def work() -> str:
        arena = Arena.create(1 << 33, 1)
        (slot,) = arena.slots
        _leave_address_space(10 * MIB)
        try:
            arena.reach(slot, 20 * MIB)
        except SharedMemoryError as error:
            arena.reach(slot, MIB)
            slot.memory[0] = 1
            return str(error)
        return "no error"

    text = in_a_child(work)
    assert text.startswith("cannot map 21.0 MB of a slot of shared memory: Cannot allocate memory")
    assert "limit on address space (`ulimit -v`)" in text


def test_where_files_may_not_be_long_the_slots_share_what_they_may_have():
    def work() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB + 1, 4 * MIB + 1))
        arena = Arena.create(1 << 33, 4)
        arena.reach(arena.slots[3], MIB)
        arena.slots[3].memory[-1] = 1
        return f"{arena.slot_bytes} {arena.describe_limit(1)}"

    text = in_a_child(work)
    assert text.startswith(
        f"{MIB} shm_size (or `ulimit -f`) leaves only 1.0 MB for each of 4 slots. Raise it:"
    )


@pytest.mark.parametrize(
    ("slot_count", "needed_bytes", "enough"),
    [(8, MIB, "8MiB"), (8, MIB + 1, "9MiB"), (5, 64 * 1024, "1MiB"), (1000, 3 * MIB, "3000MiB")],
)
def test_an_shm_size_that_suffices_is_told_in_mebibytes(slot_count, needed_bytes, enough):
    arena = Arena.create(MIB, slot_count)
    text = arena.describe_limit(needed_bytes)
    assert f" for each of {slot_count:,} slots. " in text
    assert text.endswith(f" Raise it: shm_size='{enough}' suffices for this")
    arena.close()


def test_a_slot_is_mapped_further_under_its_views():
    arena = Arena.create(64 * MIB, 1)
    (slot,) = arena.slots
    arena.reach(slot, 1)
    slot.memory[:3] = b"abc"
    slot.views = ("a reader", [slot.memory[:]])
    before, address = slot.array(), slot.address
    arena.reach(slot, 8 * MIB)
    assert slot.nbytes == 10 * MIB
    assert slot.address != address
    assert slot.views == (None, None)
    slot.memory[1] = ord("x")
    assert ctypes.string_at(address, 3) == before[:3] == b"axc"
    arena.reach(slot, 10 * MIB)
    assert slot.nbytes == 10 * MIB
    inode = os.fstat(arena.fileno()).st_ino
    arena.close()
    assert is_mapped(inode), "the first mapping goes with its last view"
    del before
    assert not is_mapped(inode)


def test_with_no_descriptor_left_the_error_is_the_system_s():
    def work() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            Arena.create(MIB, 1)
        except OSError as error:
            return errno.errorcode[error.errno]
        return "no error"

    assert in_a_child(work) == "EMFILE"


@pytest.mark.parametrize("kernel", ["this", "before 5.14"])
def test_pages_can_be_had_before_they_are_written(arena, slot, kernel, monkeypatch):
    if kernel != "this":
        monkeypatch.setattr(arena_module, "_POPULATE_WRITE", 9999)
    slot.memory[:5000] = b"x" * 5000
    populate(slot.mapping, 5000, 10 * PAGESIZE + 1)
    assert resident_bytes(arena) == 11 * PAGESIZE
    assert slot.memory[: 11 * PAGESIZE] == b"x" * 5000 + bytes(11 * PAGESIZE - 5000)
    populate(slot.mapping, 5000, 5001)


def test_pages_that_cannot_be_had_are_an_error_and_no_signal():
    fd = os.memfd_create("shmloader")
    os.ftruncate(fd, MIB)
    mapping = arena_module.map_range(fd, 0, MIB)
    os.ftruncate(fd, PAGESIZE)
    assert populate(mapping, 0, PAGESIZE)
    assert not populate(mapping, 0, 2 * PAGESIZE)
    os.close(fd)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "call",
    [
        lambda arena, slot: arena.reach(slot, 4 * MIB),
        lambda _, slot: populate(slot.mapping, 0, 2 * MIB),
        lambda arena, slot: arena.give_back(slot, 0),
    ],
    ids=["reach", "populate", "give_back"],
)
def test_an_interruption_is_never_taken_for_a_refusal_of_the_system(call, kind):
    nth, outcome = 0, None
    while outcome is None or outcome.where is not None:
        nth += 1
        arena = Arena.create(8 * MIB, 1)
        (slot,) = arena.slots
        arena.reach(slot, 2 * MIB)
        try:
            outcome = interrupt(lambda arena=arena, slot=slot: call(arena, slot), nth, kind)
            assert outcome.where is None or outcome.has_arrived(kind), outcome.where
            arena.reach(slot, 6 * MIB)  # and it can be used
            slot.memory[6 * MIB - 1 : 6 * MIB] = b"x"
        finally:
            arena.close()
        del slot
    assert nth > 5


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_start_of_a_file_in_memory_leaves_no_descriptor(kind) -> None:
    def where_interrupted(nth: int) -> str | None:
        return interrupt(arena_module.memory_file, nth, kind).where

    before, nth, where = descriptor_count(), 0, ""
    while where is not None:
        nth += 1
        where = where_interrupted(nth)
        gc.collect()
        assert descriptor_count() == before, where
    assert nth > 5


def test_a_segment_whose_beginning_is_interrupted_leaves_no_file_open(monkeypatch) -> None:
    def interrupted(self: SegmentWriter, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(SegmentWriter, "append", interrupted)
    before = descriptor_count()
    with pytest.raises(KeyboardInterrupt) as caught:
        SegmentWriter()
    del caught
    gc.collect()
    assert descriptor_count() == before


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
    assert book.collect() == [slot.slot_id]
    assert not book.ended
    assert book.collect() == [], "the slot came back twice"


def fork_and_wait() -> None:
    assert exit_code_of_a_child(gc.collect) == 0


def fill_anew(arena: Arena, slot: Slot) -> None:
    """Do as another process does that fills the slot."""
    arena.reach(slot, 4000)
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
    assert book.collect() == [slot.slot_id]
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
    assert slot.nbytes == 8 * MIB
