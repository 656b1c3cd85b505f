"""The slots' memory: made when first needed, trimmed when it is far too much, unmapped."""

import ctypes
import errno
import os
from mmap import PAGESIZE

import pytest
import torch

from shmloader.engine.scheduler import Ticket
from shmloader.errors import SharedMemoryError
from shmloader.memory import slot as slot_module
from shmloader.pools.arena import TRIM_EVERY, Arena
from shmloader.pools.sender import Sender

MIB = 1 << 20


class Admission:
    """Notes its calls. Memory is short if ``short`` is set."""

    def __init__(self):
        self.asked = []
        self.grown = []
        self.short = False

    def is_short(self, present_bytes, slot_bytes):
        self.asked.append((present_bytes, slot_bytes))
        return self.short

    def grow(self, slot, backed, end):
        self.grown.append((slot, backed, end))


@pytest.fixture
def arena():
    arena = Arena(256 * MIB)
    yield arena
    arena.close()


def touched_bytes(arena: Arena) -> int:
    """Count the bytes that were written since the slots were made or trimmed."""
    return sum(arena._touched.values())


def resident_bytes(arena: Arena, slot_id: int) -> int:
    return os.fstat(arena[slot_id].fileno()).st_blocks * 512


def fill(arena: Arena, slot_id: int, nbytes: int) -> None:
    arena.grow(slot_id, nbytes)
    torch.frombuffer(arena[slot_id].mapping, dtype=torch.uint8, count=nbytes).fill_(1)
    arena.note_use(slot_id, nbytes)


def test_a_slot_is_made_when_first_asked_for_and_only_once(arena):
    assert arena[3] is arena[3]
    assert arena[3] is not arena[4]
    assert arena[3].most_bytes == 256 * MIB


def test_an_untouched_slot_takes_no_memory(arena):
    assert resident_bytes(arena, 0) == 0
    assert touched_bytes(arena) == 0


def test_use_is_counted_by_the_largest_batch_of_each_slot(arena):
    arena.note_use(0, 100)
    arena.note_use(0, 50)
    arena.note_use(1, 7)
    assert touched_bytes(arena) == 107


def test_the_pages_of_a_retired_slot_are_counted_no_more(arena):
    arena.note_use(0, 100)
    arena.note_use(1, 7)
    arena.retire(0)
    assert (arena.counts.slot_bytes, arena.counts.most_bytes) == (7, 107)
    arena.note_use(2, 20)
    assert (arena.counts.slot_bytes, arena.counts.most_bytes) == (27, 107)


def test_a_trim_is_due_once_in_so_many_batches(arena):
    for _ in range(TRIM_EVERY - 1):
        arena.note_use(0, 1)
    assert arena.batches < TRIM_EVERY
    arena.note_use(0, 1)
    assert arena.batches >= TRIM_EVERY
    arena.trim([0])
    assert arena.batches < TRIM_EVERY


def test_slots_that_hold_what_batches_need_are_left_alone(arena):
    fill(arena, 0, 40 * MIB)
    for _ in range(20):
        arena.note_use(1, 40 * MIB)
        arena.trim([0])
    assert resident_bytes(arena, 0) == 40 * MIB


def test_a_free_slot_far_above_recent_need_gives_its_pages_back(arena):
    fill(arena, 0, 64 * MIB)
    fill(arena, 1, 64 * MIB)
    for _ in range(60):  # the one large batch is forgotten
        arena.note_use(2, MIB)
        arena.trim([0])
    assert resident_bytes(arena, 0) < 32 * MIB
    assert resident_bytes(arena, 1) == 64 * MIB, "slot 1 is not free"
    in_slot_0 = touched_bytes(arena) - 64 * MIB - MIB
    assert 0 <= resident_bytes(arena, 0) - in_slot_0 < PAGESIZE


def test_a_free_slot_that_was_never_used_is_not_made_by_a_trim(arena):
    arena.trim([0, 1, 2])
    assert not arena._slots


def test_a_retired_slot_is_unmapped_and_its_number_forgotten(arena):
    slot = arena[0]
    arena.note_use(0, 10)
    arena.retire(0)
    arena.retire(0)
    assert slot.mapping.closed
    assert touched_bytes(arena) == 0


def test_a_retired_slot_stays_mapped_under_a_view(arena):
    fill(arena, 0, 10)
    view = torch.frombuffer(arena.leases.open(0, arena[0]), dtype=torch.uint8, count=10)
    arena.retire(0)
    assert view.tolist() == [1] * 10


def test_closing_unmaps_all_slots_and_may_be_repeated(arena):
    slots = [arena[slot_id] for slot_id in range(3)]
    arena.close()
    arena.close()
    assert all(slot.mapping.closed for slot in slots)


def test_what_a_failed_batch_touched_is_counted_but_predicts_nothing(arena):
    arena.note_failed_use(0, 100)
    assert arena.touched_bytes(0) == 100
    arena.note_use(0, 50)
    assert arena.touched_bytes(0) == 100
    assert arena._recent_bytes == 50
    arena.note_failed_use(0, 10)
    assert arena.touched_bytes(0) == 100
    assert arena.touched_bytes(1) == 0


def test_memory_that_this_process_writes_is_admitted_only_beyond_what_was_touched():
    admission = Admission()
    arena = Arena(MIB, admission=admission)
    arena.grow(0, 1000)
    arena.note_use(0, 1000)
    arena.grow(0, 1000)
    arena.grow(0, 1001)
    assert admission.grown == [(arena[0], 0, 1000), (arena[0], 1000, 1001)]
    arena.close()


def test_poison_covers_what_was_ever_used_and_no_more(arena):
    fill(arena, 0, 1000)
    arena.note_use(0, 10)
    arena.poison(0)
    assert arena[0].mapping[:1001] == b"\xfb" * 1000 + b"\0"
    arena.poison(17)
    assert 17 not in arena._slots


def test_a_slot_is_mapped_as_far_as_batches_need_and_a_quarter_more(arena):
    assert arena[0].nbytes == PAGESIZE
    arena.note_use(0, 40 * MIB)
    assert arena[0].nbytes == 50 * MIB
    mapping = arena[0].mapping
    arena.note_use(0, 50 * MIB)
    assert arena[0].mapping is mapping, "a batch that is a little larger finds it mapped"
    arena.note_use(0, 256 * MIB)
    assert arena[0].nbytes == 256 * MIB, "no more than the file has"


class Locker:
    """Notes the addresses of locked memory."""

    def __init__(self):
        self.locked = set()
        self.kept = []
        self.fails = False

    def lock(self, slot, nbytes):
        assert nbytes <= slot.nbytes
        self.locked.add(slot.address)

    def locked_bytes(self, slot):
        return int(slot.address in self.locked)

    def unlock(self, slot):
        if not self.fails:
            self.locked.discard(slot.address)
        return slot.address not in self.locked

    def keep(self, slot):
        self.kept.append(slot)

    def end_reads(self, slots):
        pass


def test_a_slot_is_unlocked_before_it_is_mapped_elsewhere():
    locker = Locker()
    arena = Arena(256 * MIB, locker)
    for nbytes in (MIB, 16 * MIB):
        arena.note_use(0, nbytes)
        slot = arena[0]
        assert locker.locked == set()
        arena.lock(0)
        assert locker.locked == {slot.address}
    arena.close()


def test_a_slot_that_cannot_be_unlocked_stays_mapped_where_it_is():
    locker = Locker()
    arena = Arena(256 * MIB, locker)
    fill(arena, 0, MIB)
    arena.lock(0)
    before, locker.fails = arena[0], True
    fill(arena, 0, 16 * MIB)
    assert locker.kept == [before]
    assert arena[0].address != before.address
    assert before.mapping[:5] == arena[0].mapping[:5], "the same memory"
    arena.close()
    assert before.mapping[MIB - 1] == 1
    before.close()


def test_long_indices_go_into_a_slot_that_had_to_be_remade():
    locker = Locker()
    arena = Arena(256 * MIB, locker)
    fill(arena, 0, 1000)
    arena.lock(0)
    locker.fails = True
    indices = bytes(range(256)) * 4096
    sent = Sender(None, arena)._spill(Ticket(0, 0, 0, None), indices)
    assert len(locker.kept) == 1
    assert arena[0].mapping[sent.offset : sent.offset + sent.nbytes] == indices
    arena.close()
    locker.kept[0].close()


def test_where_address_space_is_short_slots_without_views_are_unmapped(arena, monkeypatch):
    left = 30 * MIB

    def map_some(fd, nbytes):
        others = sum(slot.nbytes for slot in arena._slots.values() if slot.fileno() != fd)
        if others + nbytes > left:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return really(fd, nbytes)

    really = slot_module._map
    monkeypatch.setattr(slot_module, "_map", map_some)
    for slot_id in range(3):
        arena.note_use(slot_id, 10 * MIB)
    lent = arena[0].array()
    assert arena[1].nbytes == 12.5 * MIB, "there is space for two"
    assert arena[2].nbytes == 10 * MIB
    assert arena[0].nbytes == 12.5 * MIB
    assert ctypes.addressof(lent) == arena[0].address, "somebody looks at it"
    assert arena._slots[1].nbytes == PAGESIZE
    more = arena[2].array()
    with pytest.raises(SharedMemoryError, match=r"cannot map 10.5 MB of a slot"):
        arena[1]
    del lent, more
    assert arena[1].nbytes == 10 * MIB


def test_where_memory_is_short_a_slot_gives_its_pages_back_before_its_task():
    admission = Admission()
    arena = Arena(64 * MIB, admission=admission)
    fill(arena, 0, 4 * MIB)
    fill(arena, 1, 6 * MIB)
    assert admission.asked == [(4 * MIB, 4 * MIB), (10 * MIB, 6 * MIB)]
    arena.prepare(0)
    assert arena.touched_bytes(0) == 4 * MIB, "there is memory enough"
    admission.short = True
    fill(arena, 0, 5 * MIB)
    arena.prepare(0)
    assert arena.touched_bytes(0) == resident_bytes(arena, 0) == 0
    assert resident_bytes(arena, 1) == 6 * MIB
    assert arena.counts.slot_bytes == 6 * MIB
    arena.close()


def test_locked_memory_is_not_given_back_however_short_it_is():
    admission = Admission()
    admission.short = True
    arena = Arena(64 * MIB, Locker(), admission)
    fill(arena, 0, 4 * MIB)
    arena.prepare(0)
    assert resident_bytes(arena, 0) == 4 * MIB
    arena.close()
