"""A slot's bytes: places, limits, who still holds them; and output of collate in the slot."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from shmloader.batch.collator import Collator, Timer
from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import Arena
from shmloader.memory.flat import FlatLayout
from shmloader.memory.writer import SlotWriter, empty
from tests.unit.memory.support import MIB, installed, is_in, open_bench


@pytest.fixture
def bench():
    """A slot of one MiB with a task in work, in what collate takes for a worker."""
    with open_bench(MIB) as bench, installed(bench.writer):
        yield bench


@pytest.fixture
def writer(bench):
    return bench.writer


@given(sizes=st.lists(st.integers(0, 5000), max_size=40))
def test_allocations_are_aligned_and_do_not_overlap(sizes):
    with open_bench(MIB) as bench:
        end = 0
        for nbytes in sizes:
            offset = bench.writer.allocate(nbytes)
            assert offset % 64 == 0
            assert end <= offset < end + 64
            end = offset + nbytes
            assert end <= bench.writer.used_bytes < end + 64


def test_exhaustion_names_need_limit_and_remedy_and_takes_nothing(writer):
    writer.allocate(1000)
    with pytest.raises(SharedMemoryError) as caught:
        writer.allocate(MIB)
    text = str(caught.value)
    assert "needs at least 1.0 MB" in text
    assert "leaves only 1.0 MB for each" in text
    for remedy in ("shm_size", "batch_size", "num_workers", "prefetch_factor"):
        assert remedy in text
    assert writer.used_bytes == 1024
    assert writer.allocate(1) == 1024


def test_bytes_are_found_where_they_lie_already_and_only_there(bench):
    writer = bench.writer
    address = writer.empty((100,), torch.uint8).data_ptr()
    assert writer.offset_of(address, 100) == 0
    assert writer.offset_of(address + 10, 90) == 10
    assert writer.offset_of(address + 100, 100) is None, "not handed out"
    assert writer.offset_of(address - 1, 1) is None
    elsewhere = ctypes.create_string_buffer(10)
    assert writer.offset_of(ctypes.addressof(elsewhere), 10) is None


class Admission:
    """Grants up to a limit, in whole thousands; notes what it is asked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.asked = []

    def grow(self, arena, slot, end):
        self.asked.append((slot.touched_bytes, end))
        if end > self.limit:
            raise SharedMemoryError("no memory")
        slot.touched_bytes = -(-end // 1000) * 1000


def test_memory_is_admitted_only_beyond_what_was_touched_or_granted(bench):
    admission = Admission(100_000)
    writer = SlotWriter(bench.arena, admission)
    bench.slot.touched_bytes = 5000
    writer.open(bench.slot)
    writer.allocate(5000)
    assert admission.asked == []
    writer.allocate(100)
    writer.allocate(700)
    writer.allocate(1000)
    assert admission.asked == [(5000, 5056 + 100), (6000, 5888 + 1000)]
    bench.slot.touched_bytes = 7000
    writer.open(bench.slot)
    writer.empty((7000,), torch.uint8)
    assert len(admission.asked) == 2, "the slot is as large as it was"


@pytest.fixture
def arena():
    arena = Arena.create(64 * MIB, 4)
    yield arena
    arena.close()


@pytest.fixture
def growing(arena):
    """A writer, and its slot, of which a page is mapped."""
    slot, writer = arena.slots[0], SlotWriter(arena)
    arena.reach(slot, 1)
    writer.open(slot)
    yield slot, writer
    writer.part()


def test_what_was_handed_out_before_a_slot_was_mapped_further_is_still_in_it(growing):
    slot, writer = growing
    first = writer.empty((100,), torch.uint8).fill_(1)
    second = writer.empty((MIB,), torch.uint8).fill_(2)
    third = writer.empty((4 * MIB,), torch.uint8).fill_(3)
    assert is_in(slot, third)
    assert not is_in(slot, first)
    places = [(0, 100), (128, MIB), (128 + MIB, 4 * MIB)]
    for tensor, (offset, nbytes) in zip((first, second, third), places, strict=True):
        assert writer.offset_of(tensor.data_ptr(), nbytes) == offset
        assert slot.memory[offset] == slot.memory[offset + nbytes - 1] == int(tensor[0])
    first[99] = 9
    assert slot.memory[99] == 9, "it is the same memory"


@pytest.mark.parametrize("held", [0, 1, 2])
def test_memory_that_is_held_of_any_of_a_slot_s_mappings_is_parted_from_it(arena, growing, held):
    slot, writer = growing
    tensors = [writer.empty((nbytes,), torch.uint8).fill_(5) for nbytes in (100, MIB, 4 * MIB)]
    kept = tensors[held]
    tensors.clear()
    assert writer.part()
    arena.reach(slot, 6 * MIB)
    offset = (0, 128, 128 + MIB)[held]
    assert slot.memory[offset] == 5, "the batch lies in the slot all the same"
    slot.memory[: 6 * MIB] = bytes(6 * MIB)
    assert (kept == 5).all()
    kept.fill_(6)
    assert slot.memory[offset] == 0
    assert not writer.part()


def test_a_slot_is_mapped_as_far_as_the_last_batch_went_at_once(arena, growing):
    slot, writer = growing
    _, other, third, _ = arena.slots
    writer.allocate(8 * MIB)
    writer.open(other)
    writer.allocate(100_000)
    assert other.nbytes == 8 * MIB
    third.touched_bytes = 20 * MIB
    writer.open(third)
    writer.allocate(100_000)
    assert third.nbytes == 20 * MIB, "it has so many pages"
    writer.open(slot)
    assert slot.nbytes == 10 * MIB


def test_a_slot_that_is_mapped_far_beyond_its_pages_is_unmapped(growing):
    slot, writer = growing
    writer.allocate(60 * MIB)
    slot.touched_bytes = 30 * MIB
    writer.open(slot)
    assert slot.nbytes == 64 * MIB
    slot.touched_bytes = MIB
    writer.open(slot)
    assert slot.nbytes == 0


SAMPLES = [torch.zeros(3), torch.ones(3)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((3, None), ((2, 3), torch.int8), ([2, 3], torch.bfloat16), (torch.Size([4]), None)),
        *(((), torch.bool), ((0, 2), None)),
    ],
)
@pytest.mark.parametrize("in_worker", [False, True])
def test_empty_is_torch_s_empty_in_a_worker_and_outside(shape, dtype, in_worker):
    expected = torch.empty(shape, dtype=dtype)
    with open_bench() as bench:
        if in_worker:
            bench.writer.open(bench.slot, is_offered=True)
            with installed(bench.writer):
                tensor = empty(shape, dtype)
        else:
            tensor = empty(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        assert tensor.is_contiguous()
        assert is_in(bench.slot, tensor) == (in_worker and tensor.numel() > 0)


def test_empty_follows_torch_s_default_dtype(bench):
    torch.set_default_dtype(torch.float64)
    try:
        assert empty(3).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_sample_that_is_yet_to_be_collated_gets_private_memory(bench):
    assert not is_in(bench.slot, empty(3))
    wrapped = Collator(lambda samples: empty(3), Timer(), writer=bench.writer)
    assert is_in(bench.slot, wrapped([1, 2]))
    assert not is_in(bench.slot, empty(3))


def test_default_collate_takes_the_short_way_or_writes_into_the_slot(bench):
    collate = Collator(default_collate, Timer(), writer=bench.writer)
    assert isinstance(collate(SAMPLES), FlatLayout)
    batch = collate([(sample, "name") for sample in SAMPLES])
    assert is_in(bench.slot, batch[0])
    assert batch[1] == ("name", "name")


def test_outside_the_collate_function_default_collate_leaves_the_slot_alone(bench):
    assert not is_in(bench.slot, default_collate(SAMPLES))
    with pytest.raises(ZeroDivisionError):
        Collator(lambda samples: 1 / 0, Timer(), writer=bench.writer)(SAMPLES)
    assert not is_in(bench.slot, default_collate(SAMPLES)), "a failed collate still runs"


def test_what_exceeds_the_share_is_collated_elsewhere():
    with open_bench(4096) as bench, installed(writer := SlotWriter(bench.arena)):
        writer.open(bench.slot, is_offered=True)
        batch = default_collate([torch.zeros(1000), torch.ones(1000)])
        assert batch.shape == (2, 1000)
        assert not is_in(bench.slot, batch)
