"""Whether a slot may grow: sums, steps, and no false alarms."""

import os

import pytest

from shmloader.errors import SharedMemoryError
from shmloader.memory import admission as admission_module
from shmloader.memory.admission import RESERVE_BYTES, MemoryAdmission, MemoryConfig
from shmloader.memory.arena import Arena
from shmloader.memory.limits import Free
from tests.made_up import MIB, System


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


@pytest.fixture
def arena():
    """One slot, which is mapped."""
    arena = Arena.create(512 * MIB, 1)
    arena.reach(arena.slots[0], 512 * MIB)
    yield arena
    arena.close()


def resident(arena: Arena) -> int:
    return os.fstat(arena.fileno()).st_blocks * 512


def grow(admission: MemoryAdmission, arena: Arena, backed: int, end: int) -> int:
    """Grow the slot, of which ``backed`` bytes have pages. Returns how many are admitted."""
    (slot,) = arena.slots
    slot.touched_bytes = backed
    try:
        admission.grow(arena, slot, end)
        return slot.touched_bytes
    except SharedMemoryError:
        assert slot.touched_bytes == backed
        raise


def make_admission(system: System, free_bytes: int, **config) -> MemoryAdmission:
    """An admission with this much free beyond the reserve, at the start and now."""
    free = free_bytes + RESERVE_BYTES
    system.set_available(free)
    options = {
        "worker_count": 2,
        "prefetch_factor": 2,
        "loop_holds": 2,
        "batch_count": 1000,
        "free_at_start": Free(free, "MemAvailable"),
        **config,
    }
    return MemoryAdmission(MemoryConfig(**options, root=str(system.root)))


def test_what_fits_is_there_when_it_is_said_to_be(system, arena):
    admission = make_admission(system, 40 * MIB)
    assert grow(admission, arena, 0, 20 * MIB) == 20 * MIB
    assert resident(arena) == 20 * MIB
    assert grow(admission, arena, 20 * MIB, 60 * MIB) == 60 * MIB, "as much again is free"
    assert resident(arena) == 60 * MIB


def test_what_does_not_fit_is_told_with_the_arithmetic_and_not_touched(system, arena):
    admission = make_admission(system, 50 * 10**6)
    with pytest.raises(SharedMemoryError) as caught:
        grow(admission, arena, 20 * 10**6, 97 * 10**6)
    assert str(caught.value) == (
        "a batch needs at least 97.0 MB of shared memory, 77.0 MB more than its slot has, but "
        "50.0 MB is free (MemAvailable; 16.8 MB is kept in reserve). The loader needs "
        "6 slots (prefetch_factor 2 * num_workers 2 + 2 in use) × 97.0 MB = 582.0 MB of shared "
        "memory: lower prefetch_factor, num_workers or batch_size, or set shm_size."
    )
    assert resident(arena) == 0


def test_all_that_is_free_may_be_taken_but_for_the_reserve(system, arena):
    grow(make_admission(system, 10 * MIB, worker_count=64), arena, 0, 10 * MIB)
    with pytest.raises(SharedMemoryError, match="MemAvailable"):
        grow(make_admission(system, 10 * MIB), arena, 10 * MIB, 20 * MIB + 1)
    with pytest.raises(SharedMemoryError, match="0 bytes is free"):
        grow(make_admission(system, -1 * MIB), arena, 10 * MIB, 10 * MIB + 1)


def test_without_any_limit_everything_may_be_taken(tmp_path, arena):
    admission = MemoryAdmission(MemoryConfig(2, 2, 2, 1000, None, str(tmp_path)))
    assert grow(admission, arena, 0, 500 * MIB) == 500 * MIB
    assert resident(arena) == 0, "the writer will"


class Looks:
    """What is free, look by look."""

    def __init__(self, monkeypatch, *mebibytes: int) -> None:
        self.left = list(mebibytes)
        monkeypatch.setattr(admission_module, "free_memory", self)

    def __call__(self, root, groups) -> Free:
        return Free(self.left.pop(0) * MIB + RESERVE_BYTES, "MemAvailable")


def test_a_growth_that_others_come_before_is_undone_and_told(system, arena, monkeypatch):
    admission = make_admission(system, 0)
    grow(admission, arena, 0, 0)
    arena.slots[0].memory[: 2 * MIB] = b"x" * (2 * MIB)
    looks = Looks(monkeypatch, 100, 90, 13)
    with pytest.raises(SharedMemoryError, match=r"31\.5 MB more .* but 30\.4 MB is free"):
        grow(admission, arena, 2 * MIB, 32 * MIB)
    assert looks.left == []
    assert resident(arena) == 2 * MIB
    assert bytes(arena.slots[0].memory[2 * MIB - 1 : 2 * MIB + 1]) == b"x\0"


def test_all_slots_are_added_up_at_the_second_batch(system, arena):
    admission = make_admission(system, 60 * 10**6, prefetch_factor=2, worker_count=8)
    grow(admission, arena, 0, 10**7)
    admission.smallest_batch = min(admission.smallest_batch, 10**7)
    grow(admission, arena, 0, 2 * 10**6)
    with pytest.raises(SharedMemoryError) as caught:
        grow(admission, arena, 0, 10**7)
    assert str(caught.value) == (
        "18 slots (prefetch_factor 2 * num_workers 8 + 2 in use) × 10.0 MB = 180.0 MB of shared "
        "memory, but 60.0 MB is free (MemAvailable; 16.8 MB is kept in reserve): lower "
        "prefetch_factor, num_workers or batch_size, or set shm_size."
    )
    assert resident(arena) == -(-(10**7) // 4096) * 4096, "the first batch's"


def test_what_siblings_have_touched_since_the_start_does_not_count_twice(system, arena):
    admission = make_admission(system, 80 * MIB)
    admission.smallest_batch = min(admission.smallest_batch, 10 * MIB)
    system.set_available(15 * MIB + RESERVE_BYTES)
    grow(admission, arena, 0, 10 * MIB)


def test_what_was_freed_since_the_start_counts(system, arena):
    admission = make_admission(system, 80 * MIB, free_at_start=Free(0, "MemAvailable"))
    grow(admission, arena, 0, 10 * MIB)
    admission.smallest_batch = min(admission.smallest_batch, 10 * MIB)
    system.set_available(15 * MIB + RESERVE_BYTES)
    grow(admission, arena, 0, 10 * MIB)


@pytest.mark.parametrize("first", [10, 1])
def test_one_batch_that_is_larger_than_the_others_raises_no_alarm(system, arena, first):
    admission = make_admission(system, 20 * MIB)
    for mebibytes in (first, 1, 1, 10, 1):
        grow(admission, arena, 0, mebibytes * MIB)
        admission.smallest_batch = min(admission.smallest_batch, mebibytes * MIB)


@pytest.mark.parametrize("batch_count", [3, None])
def test_slots_that_may_never_be_used_raise_no_alarm(system, arena, batch_count):
    admission = make_admission(system, 30 * MIB, batch_count=batch_count)
    for _ in range(3):
        grow(admission, arena, 0, 10 * MIB)
        admission.smallest_batch = min(admission.smallest_batch, 10 * MIB)


def test_an_epoch_of_few_batches_is_told_as_such():
    config = MemoryConfig(8, 2, 2, batch_count=6)
    text = config.describe(10**6)
    assert text == "6 slots (one for each batch of an epoch) × 1.0 MB = 6.0 MB of shared memory"
    assert "18 slots (prefetch_factor 2" in MemoryConfig(8, 2, 2, batch_count=18).describe(10**6)


@pytest.mark.parametrize(
    ("free_mib", "present_mib", "is_short"), [(80, 0, False), (79, 0, True), (60, 20, False)]
)
def test_memory_is_short_if_it_may_not_do_for_slots_and_samples(
    system, free_mib, present_mib, is_short
):
    # Six slots, and as much for the samples of two workers.
    admission = make_admission(system, free_mib * MIB)
    assert admission.is_short(present_mib * MIB, 10 * MIB) == is_short


def test_it_is_tight_where_workers_may_come_to_take_all_there_is(system, arena):
    admission = make_admission(system, 20 * MIB)
    grow(admission, arena, 0, 10 * MIB)
    assert not admission.is_tight
    grow(admission, arena, 0, 10 * MIB + 1)
    assert admission.is_tight
