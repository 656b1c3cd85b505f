"""What the device path owes its user beside the right batches: memory, streams, locks, ends.

On the late device (`tests.late`), which counts what it is asked for.
"""

import collections
import gc
import itertools
import os
import signal
import threading
import types
import weakref

import pytest
import torch

from shmloader import DataLoader, PipelineBuilder, WorkerDiedError
from shmloader.device.backend import Backend
from shmloader.device.device import DeviceStage, PageLocks
from shmloader.memory.arena import Arena
from shmloader.pools.slot_memory import SlotMemory
from tests.late import LateDevice
from tests.process.bytecodes import KINDS, interrupt
from tests.process.support import Calls, WatchedLock, in_thread, wait_until
from tests.process.test_device import LENGTH, ends, make, sample

BATCH_BYTES = -(-4 * LENGTH // 512) * 512


@pytest.fixture
def locks(late: LateDevice) -> PageLocks:
    backend = Backend(torch.device("late", 0))
    before = torch.accelerator.current_stream()
    backend.enter()
    yield PageLocks(backend)
    torch.accelerator.set_stream(before)


@pytest.fixture
def arena():
    arena = Arena.create(1 << 20, 2)
    for slot in arena.slots:
        arena.reach(slot, 1 << 20)
    yield arena
    arena.close()


def covers(locks: PageLocks, tensor: torch.Tensor) -> bool:
    with locks.reading(tensor) as is_locked:
        return is_locked


@pytest.fixture
def slot(arena):
    return arena.slots[0]


def test_pages_that_a_refused_growth_gives_back_are_not_read_for_a_later_batch(late, locks) -> None:
    memory = SlotMemory(Arena.create(1 << 20, 1), locks)

    def load(nbytes: int, value: int) -> torch.Tensor:
        slot = memory.mapped(0, nbytes)
        slot.memory[:nbytes] = bytes([value]) * nbytes
        memory.count_batch(0, nbytes)
        memory.lock(0)
        batch = torch.frombuffer(slot.array(), dtype=torch.uint8, count=nbytes)
        return batch.to("late", non_blocking=True)

    assert load(70_000, 1).unique().tolist() == [1]
    give_back, slot = memory.arena.give_back, memory.arena.slots[0]
    give_back(slot, 70_000)  # as MemoryAdmission.grow does in a worker that finds no memory
    assert load(80_000, 2).unique().tolist() == [2], "where it is mapped already"
    give_back(slot, 80_000)
    assert load(200_000, 3).unique().tolist() == [3], "where it is mapped anew"
    memory.close()


def test_what_is_locked_is_what_a_batch_takes(late, locks, slot) -> None:
    for nbytes, locked in (
        (70_000, 73_728),
        (60_000, 73_728),
        (73_729, 77_824),
        (1 << 20, 1 << 20),
    ):
        locks.lock(slot, nbytes)
        assert late.registered_bytes(slot.address) == locked
    locks.unlock(slot)
    locks.unlock(slot)
    assert late.count("registered bytes") == 0


@pytest.mark.parametrize("has_stream", [False, True], ids=["first", "later"])
def test_a_new_thread_gets_a_context_before_it_locks(late: LateDevice, slot, has_stream) -> None:
    backend = Backend(torch.device("late", 0))
    if has_stream:
        assert backend.stream is backend.stream
    found = []

    def lock() -> None:
        torch.accelerator.set_device_index(0)  # which binds none
        found.append(late.driver.has_context())
        locks = PageLocks(backend)
        locks.lock(slot, 1000)
        found.append(late.registered_bytes(slot.address))
        locks.unlock(slot)

    with in_thread(lock):
        pass
    assert found == [False, 4096]


def test_a_slot_that_is_about_to_be_unlocked_is_read_by_no_further_copy(late, locks, arena) -> None:
    slot, other = arena.slots
    tensors = [torch.frombuffer(one.array(), dtype=torch.uint8, count=100) for one in (slot, other)]
    locks.lock(slot, 100)
    locks.lock(other, 100)
    tensors[0].to("late", non_blocking=True)
    assert late.unfinished_count == 1
    locks.end_reads([slot])
    assert late.unfinished_count == 0
    assert [covers(locks, tensor) for tensor in tensors] == [False, True]
    for one in (slot, other):
        locks.unlock(one)
    locks.lock(slot, 100)
    assert covers(locks, tensors[0])
    locks.unlock(slot)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_of_locking_or_unlocking_leaves_no_lock(late, locks, slot, kind) -> None:
    def lock_and_unlock() -> None:
        locks.lock(slot, 1000)
        locks.lock(slot, 9000)
        locks.unlock(slot)

    for nth in itertools.count(1):
        outcome = interrupt(lock_and_unlock, nth, kind)
        locks.unlock(slot)
        assert late.registered_bytes(slot.address) == 0, outcome
        locks.lock(slot, 5000)
        assert late.registered_bytes(slot.address) == 8192, outcome
        locks.unlock(slot)
        if outcome.where is None:
            break
        assert outcome.has_arrived(kind)
    assert nth > 50
    assert late.count("registered bytes") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_of_an_arenas_end_leaves_nothing(late, locks, slots, kind) -> None:
    for nth in itertools.count(1):
        memory = SlotMemory(Arena.create(1 << 20, 2), locks)
        for slot_id in (0, 1):
            memory.count_batch(slot_id, 9000)
            memory.lock(slot_id)
        outcome = interrupt(memory.close, nth, kind)
        memory.close()
        assert late.count("registered bytes") == memory.counts.slot_bytes == 0, outcome
        assert slots.maps() == {}, outcome
        if outcome.where is None:
            break
        assert outcome.has_arrived(kind)
    assert nth > 50


@pytest.mark.usefixtures("locks")
def test_a_copy_that_was_begun_is_waited_for_before_memory_is_unlocked(late, slot) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    steps: list[str] = []

    class Slow(Backend):
        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            has_begun.set()
            assert may_go_on.wait(20)
            steps.append("copied")
            return super().copy(tensor)

    backend = Slow(torch.device("late", 0))
    locks = PageLocks(backend)
    reading = locks._reading = WatchedLock(locks._reading)
    stage = DeviceStage(types.SimpleNamespace(backend=backend, locks=locks), 1)
    locks.lock(slot, 200_000)
    tensor = torch.frombuffer(slot.array(), dtype=torch.uint8, count=200_000)
    with in_thread(lambda: stage.run(tensor)):
        assert has_begun.wait(20)
        with in_thread(lambda: (locks.end_reads([slot]), steps.append("ended"))):
            wait_until(lambda: steps or reading.is_waited_for.is_set())
            may_go_on.set()
    assert steps == ["copied", "ended"]
    locks.unlock(slot)
    stage.close()
    assert late.count("faults") == 0


def test_what_a_device_reads_is_not_unregistered(late: LateDevice) -> None:
    def dies(index: int) -> torch.Tensor:
        if index >= 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)

    loader = DataLoader(
        Calls(dies, 400), 2, device="late:1", num_workers=1, prefetch_factor=4, device_prefetch=4
    )
    batches = iter(loader)
    delivered = []
    with pytest.raises(WorkerDiedError):
        delivered.extend(batches)
    assert delivered
    for batch in delivered:
        ends_of = batch[:, [0, -1]].cpu()
        assert torch.equal(ends_of[:, 0], ends_of[:, 1])
    loader.close()
    assert late.count("faults") == 0
    assert late.count("registered") == late.count("unregistered") > 0


def test_all_epochs_of_a_loader_use_one_stream_and_the_same_memory(late: LateDevice) -> None:
    loader = make(20)
    for _ in range(4):
        for batch in loader:
            del batch
    assert late.count("new streams") == 1
    assert late.count("reserved bytes") <= (2 + 5) * BATCH_BYTES


def test_a_loop_that_never_waits_has_a_bounded_number_of_batches_on_the_device(late) -> None:
    results = []
    for batch in make(100, device_prefetch=2):
        results.append(batch[:1].clone())
        del batch
    clones = 100 * 512
    assert late.count("most used bytes") <= (2 + 5) * BATCH_BYTES + clones
    assert [int(result) for result in results] == list(range(100))


def test_nothing_of_the_device_is_initialized_before_workers_are_forked(late) -> None:
    def initializations(index):
        return torch.tensor(late.count("initializations"))

    for options in ({"device": "late"}, {"pin_memory": True}):
        late.switch(is_on=True)
        # A pinned block that an earlier test has left would be used without the device.
        torch.accelerator.empty_host_cache()
        assert late.count("initializations") == 0
        loader = DataLoader(
            Calls(initializations, 6), None, num_workers=2, multiprocessing_context="fork",
            **options,
        )  # fmt: skip
        assert [int(found) for found in loader] == [0] * 6
        assert late.count("initializations") == 1


@pytest.mark.parametrize("options", [{"device": "late"}, {"pin_memory": True}], ids=str)
def test_an_iterator_without_workers_is_freed_when_it_is_dropped(
    options, late, no_collector
) -> None:
    loader = DataLoader(Calls(torch.tensor, 6), 2, **options)
    iterator = iter(loader)
    next(iterator)
    dropped = weakref.ref(iterator)
    del iterator
    assert dropped() is None, "the collector has to free it"


def fields(index: int) -> dict[str, torch.Tensor]:
    kinds = [torch.int64, torch.float32, torch.bool, torch.uint8, torch.bfloat16]
    return {
        f"field {number}": torch.full((1 + number % 5,), index % 2).to(kinds[number % 5])
        for number in range(114)
    }


def image_and_label(index: int) -> list[torch.Tensor]:
    return [sample(index), torch.tensor([index])]


@pytest.mark.parametrize("thread_pool", [False, True], ids=["processes", "threads"])
@pytest.mark.parametrize(
    ("make_sample", "copies"), [(fields, 1), (image_and_label, 2)], ids=["114 fields", "image"]
)
def test_small_fields_are_copied_together(late, make_sample, copies, thread_pool) -> None:
    loader = DataLoader(
        Calls(make_sample, 10), None, num_workers=2, device="late", thread_pool=thread_pool
    )
    batches = list(loader)
    for name in ("late copies", "allocations", "recorded streams"):
        assert late.count(name) == 10 * copies, name
    assert late.count("stream waits") == late.count("stream lookups") == 10
    assert late.count("pageable copies") == 0
    for index, batch in enumerate(batches):
        want = make_sample(index)
        parts = batch.items() if isinstance(batch, dict) else enumerate(batch)
        for name, part in parts:
            assert part.device == torch.device("late:0")
            assert part.dtype == want[name].dtype
            assert torch.equal(part.cpu(), want[name])


def test_a_small_field_may_be_changed_in_place_where_another_one_is_kept(late) -> None:
    (batch,) = DataLoader(Calls(fields, 1), None, num_workers=1, device="late")
    first, second = batch["field 1"], batch["field 6"]
    version = first._version
    second.zero_()
    assert first._version == version
    assert not first._is_view()


def test_what_comes_from_threads_is_pinned_as_what_a_pipeline_takes(late: LateDevice) -> None:
    assert late.contents(make(20, thread_pool=True)) == ends(20)
    builder = PipelineBuilder().add_source(range(20)).pipe(sample, output_order="input")
    assert late.contents(builder.transfer("late").add_sink().build()) == ends(20)
    assert late.count("pageable copies") == 0
    assert late.count("late copies") == 40
    assert late.count("registered") == 0


def growing(index: int) -> list[torch.Tensor]:
    return [torch.full((LENGTH + 5_000 * index,), index, dtype=torch.int32), torch.tensor(index)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"device": "late"}, {"pin_memory": True}], ids=str)
def test_a_graph_may_be_captured_while_the_loader_works(late: LateDevice, options) -> None:
    loader = DataLoader(Calls(growing, 40), None, num_workers=2, **options)
    batches = iter(loader)
    first = next(batches)
    before = late.count("registered") + late.count("host blocks")
    with late.capturing():
        rest = list(batches)
        del batches
        loader.close()
    assert late.count("registered") + late.count("host blocks") > before
    assert late.count("capture breaks") == 0
    kept = [first, *rest]
    assert late.contents(kept) == [[index] * 4 for index in range(40)]


def large_sample(index: int) -> torch.Tensor:
    return torch.full((1_500_000,), index, dtype=torch.int32)


def pipeline() -> object:
    builder = PipelineBuilder().add_source(range(100)).pipe(sample, executor="process")
    return builder.transfer("late").add_sink(2).build()


# What makes the loader, and how many copies still work.
FAILING = {
    "a device": (lambda: make(100), 20),
    "while batches are ready": (lambda: make(8, device_prefetch=4), -1),
    "of a pipeline": (pipeline, 10),
    # Blocks of a size of their own: torch keeps those that other tests have freed.
    "for which it pins": (
        lambda: DataLoader(Calls(large_sample, 24), 2, num_workers=2, pin_memory=True),
        -1,
    ),
}


@pytest.mark.parametrize("end", ["close", "close before it is told", "garbage"])
@pytest.mark.parametrize("what", FAILING)
def test_a_device_that_fails_is_told_and_closes_quietly(late, slots, what, end) -> None:
    build, copies = FAILING[what]
    loader = build()
    batches = iter(loader)
    kept = [next(batches)]
    if what == "while batches are ready":
        wait_until(lambda: late.count("late copies") == 5)
    late.fail_after(copies)
    if end != "close before it is told":
        with pytest.raises(RuntimeError, match="late error 700"):
            kept.extend(batches)
    if end != "garbage":
        (loader.stop if what == "of a pipeline" else loader.close)()
    del batches, loader
    gc.collect()
    if end == "garbage":  # the thread may still drop its last batch
        wait_until(lambda: slots.maps() == {})
    assert slots.maps() == {}


class Box(collections.UserDict):
    """A user's container; a copy of it shares what it holds."""

    __copy__ = None


def boxed(samples) -> Box:
    return Box({"x": torch.stack(samples)})


def test_a_container_that_changes_while_it_is_copied_keeps_its_slot(late) -> None:
    loader = DataLoader(Calls(sample, 100), 1, num_workers=2, device="late", collate_fn=boxed)
    found = late.contents(batch["x"] for batch in loader)
    assert [first for first, _ in found] == [int(sample(index)[0]) for index in range(100)]
