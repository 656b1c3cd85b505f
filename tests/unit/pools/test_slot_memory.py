"""The slots' memory: counted, trimmed when it is far too much, given back when it is short."""

import ctypes
import errno
import os
import pickle
from mmap import PAGESIZE
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch

from shmloader.errors import SharedMemoryError
from shmloader.memory import arena as arena_module
from shmloader.memory.arena import Arena
from shmloader.messages import RECEIVE_BYTES, SPILLED, TASK, TASK_HEAD
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.process import ProcessPool
from shmloader.pools.slot_memory import TRIM_EVERY, SlotMemory
from shmloader.pools.task_queue import TaskQueue
from tests.unit.memory.support import MIB, resident_bytes


class Admission:
    """Notes its calls. Memory is short if ``short`` is set."""

    def __init__(self):
        self.asked = []
        self.grown = []
        self.short = False

    def is_short(self, present_bytes, slot_bytes):
        self.asked.append((present_bytes, slot_bytes))
        return self.short

    def grow(self, arena, slot, end):
        self.grown.append((slot.slot_id, slot.touched_bytes, end))
        slot.touched_bytes = end + 100  # admitted, but not written


def make(slot_bytes: int = 256 * MIB, **options) -> SlotMemory:
    return SlotMemory(Arena.create(slot_bytes, 4), **options)


@pytest.fixture
def memory():
    memory = make()
    yield memory
    memory.close()


def touched(memory: SlotMemory, slot_id: int) -> int:
    return memory.arena.slots[slot_id].touched_bytes


def fill(memory: SlotMemory, slot_id: int, nbytes: int) -> None:
    slot = memory.grow(slot_id, nbytes)
    torch.frombuffer(slot.memory, dtype=torch.uint8, count=nbytes).fill_(1)
    memory.count_batch(slot_id, nbytes)


def test_use_is_counted_by_the_largest_batch_of_each_slot(memory):
    memory.count_batch(0, 100)
    memory.count_batch(0, 50)
    memory.count_batch(1, 7)
    assert (memory.counts.slot_bytes, memory.counts.most_bytes) == (107, 107)


def test_a_trim_is_due_once_in_so_many_batches(memory):
    for _ in range(TRIM_EVERY - 1):
        memory.count_batch(0, 1)
    assert memory.batches < TRIM_EVERY
    memory.count_batch(0, 1)
    assert memory.batches >= TRIM_EVERY
    memory.trim([0])
    assert memory.batches < TRIM_EVERY


def test_slots_that_hold_what_batches_need_are_left_alone(memory):
    fill(memory, 0, 40 * MIB)
    for _ in range(20):
        memory.count_batch(1, 40 * MIB)
        memory.trim([0])
    assert resident_bytes(memory.arena) == 40 * MIB


def test_a_free_slot_far_above_recent_need_gives_its_pages_back(memory):
    fill(memory, 0, 64 * MIB)
    fill(memory, 1, 64 * MIB)
    for _ in range(60):  # the one large batch is forgotten
        memory.count_batch(2, MIB)
        memory.trim([0])
    in_slot_0 = resident_bytes(memory.arena) - 64 * MIB  # slot 1 is not free
    assert in_slot_0 < 32 * MIB
    assert 0 <= in_slot_0 - touched(memory, 0) < PAGESIZE
    assert memory.counts.slot_bytes == 64 * MIB + MIB + touched(memory, 0)


def test_a_batch_that_is_kept_after_the_end_keeps_no_other_slot_s_memory(memory):
    for slot_id in range(3):
        fill(memory, slot_id, MIB)
    slot = memory.mapped(1)
    view = torch.frombuffer(slot.lend([].append), dtype=torch.uint8, count=MIB)
    fd = os.dup(memory.arena.fileno())
    memory.close()
    assert os.fstat(fd).st_blocks * 512 == MIB
    assert view.sum() == MIB
    os.close(fd)


def test_memory_that_this_process_writes_is_admitted_only_beyond_what_was_touched():
    admission = Admission()
    memory = make(MIB, admission=admission)
    memory.grow(0, 1000)
    assert touched(memory, 0) == 0, "it is counted when it is written"
    memory.count_batch(0, 1000)
    memory.grow(0, 1000)
    memory.grow(0, 1001)
    assert admission.grown == [(0, 0, 1000), (0, 1000, 1001)]
    memory.close()


def test_a_slot_is_mapped_as_far_as_batches_need_and_a_quarter_more(memory):
    assert memory.mapped(0).nbytes == 0
    memory.count_batch(0, 40 * MIB)
    assert memory.mapped(0).nbytes == 50 * MIB
    mapping = memory.mapped(0).mapping
    memory.count_batch(0, 50 * MIB)
    assert memory.mapped(0).mapping is mapping, "a batch that is a little larger finds it mapped"
    memory.count_batch(0, 256 * MIB)
    assert memory.mapped(0).nbytes == 256 * MIB, "no more than the slot may have"


class Locker:
    """Notes the addresses of locked memory."""

    def __init__(self):
        self.locked = set()

    def lock(self, slot, nbytes):
        assert nbytes <= slot.nbytes
        self.locked.add(slot.address)

    def unlock(self, slot):
        self.locked.discard(slot.address)

    def end_reads(self, slots):
        pass


class Unpickled(NamedTuple):
    """A ticket of batch 0, in slot 0 of worker 0."""

    indices: object
    seq: int = 0
    worker_id: int = 0
    slot_id: int = 0
    hung: object = None


def test_long_indices_go_into_a_slot_whose_mapping_a_device_reads():
    locker, queue = Locker(), TaskQueue()
    arena = Arena.create(64 * MIB, 1)
    starter = MagicMock(is_shared=False, nursery=None)
    pool = ProcessPool(starter, TaskConfig(None, arena, None, queue), 0, locker)
    fill(pool.memory, 0, 1000)
    pool.memory.lock(0)
    indices = bytes(range(256)) * 4096
    assert pool.send(Unpickled(indices), 0) is None
    with queue.pop_receiver() as receiver:
        data = receiver.recv(RECEIVE_BYTES)
    bits, *_, touched_bytes, _ = TASK_HEAD.unpack_from(data)
    assert bits == TASK | SPILLED
    nbytes = int(data[TASK_HEAD.size :])
    assert pickle.loads(arena.slots[0].memory[:nbytes]) == indices
    assert touched_bytes == nbytes
    pool.close()


def test_where_address_space_is_short_slots_without_views_are_unmapped(memory, monkeypatch):
    left = 30 * MIB
    slots = memory.arena.slots

    def map_some(fd, offset, nbytes):
        filled = offset // memory.arena.slot_bytes
        others = sum(slot.nbytes for slot in slots if slot.slot_id != filled)
        if others + nbytes > left:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return really(fd, offset, nbytes)

    really = arena_module.map_range
    monkeypatch.setattr(arena_module, "map_range", map_some)
    for slot_id in range(3):
        memory.count_batch(slot_id, 10 * MIB)
    lent = memory.mapped(0).lend([].append)
    assert memory.mapped(1).nbytes == 12.5 * MIB, "there is space for two"
    assert memory.mapped(2).nbytes == 10 * MIB
    assert memory.mapped(0).nbytes == 12.5 * MIB
    assert ctypes.addressof(lent) == slots[0].address, "somebody looks at it"
    assert slots[1].nbytes == 0
    more = memory.mapped(2).lend([].append)
    with pytest.raises(SharedMemoryError, match=r"cannot map 10.5 MB of a slot"):
        memory.mapped(1)
    del lent, more
    assert memory.mapped(1).nbytes == 10 * MIB


def test_where_memory_is_short_a_slot_gives_its_pages_back_before_its_task():
    admission = Admission()
    memory = make(64 * MIB, admission=admission)
    fill(memory, 0, 4 * MIB)
    fill(memory, 1, 6 * MIB)
    assert admission.asked == [(4 * MIB, 4 * MIB), (10 * MIB, 6 * MIB)]
    memory.prepare(0)
    assert touched(memory, 0) == 4 * MIB, "there is memory enough"
    admission.short = True
    fill(memory, 0, 5 * MIB)
    memory.prepare(0)
    assert touched(memory, 0) == 0
    assert resident_bytes(memory.arena) == 6 * MIB
    assert memory.counts.slot_bytes == 6 * MIB
    memory.close()


def test_while_memory_is_short_free_slots_keep_no_pages(memory) -> None:
    for slot_id in range(3):
        fill(memory, slot_id, 4096)
    memory.tidy([0, 1])
    assert [touched(memory, slot_id) for slot_id in range(3)] == [4096] * 3
    memory.is_short = True
    memory.tidy([0, 1])
    assert [touched(memory, slot_id) for slot_id in range(3)] == [0, 0, 4096]


def test_locked_memory_is_not_given_back_however_short_it_is():
    admission = Admission()
    admission.short = True
    memory = make(64 * MIB, locker=Locker(), admission=admission)
    fill(memory, 0, 4 * MIB)
    memory.prepare(0)
    assert resident_bytes(memory.arena) == 4 * MIB
    memory.close()
