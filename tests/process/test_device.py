"""Batches on the simulated device: what comes is right, and each naive policy is found out.

The device (`tests.simulated`) reads late and uses its memory again at once. A consumer starts a
kernel that finds a batch's checksum, and drops the batch before it has run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import shmloader.fronts.iterator
from shmloader import DataLoader, WorkerDiedError
from shmloader.memory.slot import Slot
from shmloader.stages.device import DeviceStage
from tests.process.support import Calls, only, wait_until
from tests.simulated import (
    SimulatedBackend,
    SimulatedDevice,
    host_checksum,
    installed,
)

# Elements of int32: above 64 KiB, so a batch of one is lent, and read late.
LENGTH = 17_000


def sample(index: int) -> torch.Tensor:
    return torch.full((LENGTH,), index, dtype=torch.int32)


def sums(count: int) -> list[int]:
    """The checksums of samples, as batches of one."""
    return [host_checksum(sample(index)) for index in range(count)]


def make(count: int, **options) -> DataLoader:
    options = {"num_workers": 2, "collate_fn": only, "device": "sim", **options}
    return DataLoader(Calls(sample, count), batch_size=1, **options)


def load(sim: SimulatedDevice, loader: DataLoader, *, on_side: bool = False) -> list[int]:
    """The checksums that a consumer finds, who drops each batch once its kernel is started."""
    stream = sim.new_stream("side") if on_side else sim.default_stream
    with sim.on(stream):
        results = [sim.checksum(batch) for batch in loader]
        return [result.value() for result in results]


# Ten thousand ----------------------------------------------------------------------------


def test_ten_thousand_batches_arrive_whole_whoever_uses_them() -> None:
    chance = random.Random(1)
    with installed(SimulatedDevice(seed=1)) as sim:
        streams = [sim.default_stream, sim.new_stream("side"), sim.new_stream("slow", 24)]
        results, kept = [], []
        for batch in make(10_000, prefetch_factor=3):
            stream = chance.choice(streams)
            with sim.on(stream):
                if stream is not sim.default_stream:
                    # As a user does who goes on elsewhere: next() ran on the default stream.
                    with sim.on(sim.default_stream):
                        event = sim.record()
                    sim.wait(event)
                    sim.use(batch)
                results.append(sim.checksum(batch))
            if chance.random() < 0.05:
                kept = [*kept[-5:], batch]
            del batch
        sim.finish()
        found = [result.found for result in results]
        want = sums(10_000)
        wrong = [index for index in range(10_000) if found[index] != want[index]]
        assert wrong == []
        assert sim.faults == []
        assert sim.counts["late copy"] == 10_000
        assert sim.counts["new block"] < 500  # most were used again


# Naive policies --------------------------------------------------------------------------


class FreesAtOnce(DeviceStage):
    """Lets go of the slot when the copy has been started."""

    def run(self, batch):
        result = super().run(batch)
        self._reading.clear()
        return result


class RecordsElsewhere(SimulatedBackend):
    """An event on the current stream of who is in the way, not on that of the copy."""

    def record(self):
        with self.device.on(self.device.default_stream):
            return self.device.record()


class NeverWaits(SimulatedBackend):
    """The consumer's stream does not wait for the copy."""

    def await_here(self, event):
        pass


class NeverNotes(SimulatedBackend):
    """The tensors are not recorded on the consumer's stream."""

    def use_here(self, tensor):
        pass


class HandsOutViews(SimulatedBackend):
    """The user gets views of page-locked slots, and copies by himself."""

    def copy(self, tensor):
        return tensor


def corrupted(sim: SimulatedDevice, loader: DataLoader, count: int, **how) -> int:
    found = load(sim, loader, **how)
    assert len(found) == count
    return sum(one != other for one, other in zip(found, sums(count), strict=True))


@pytest.mark.parametrize("backend", [RecordsElsewhere, NeverWaits, NeverNotes])
def test_a_backend_that_leaves_one_thing_out_corrupts_batches(backend) -> None:
    with installed(SimulatedDevice(seed=1), backend) as sim:
        assert corrupted(sim, make(400), 400, on_side=True) > 0
    with installed(SimulatedDevice(seed=1)) as sim:
        assert corrupted(sim, make(400), 400, on_side=True) == 0


def test_slots_that_are_freed_at_once_corrupt_batches(monkeypatch) -> None:
    monkeypatch.setattr(shmloader.fronts.iterator, "DeviceStage", FreesAtOnce)
    with installed(SimulatedDevice(seed=1)) as sim:
        assert corrupted(sim, make(400), 400) > 0


def test_a_view_of_a_locked_slot_that_the_user_copies_corrupts_batches() -> None:
    with installed(SimulatedDevice(seed=1), HandsOutViews) as sim:
        results = []
        for batch in make(400):
            copied = sim.copy(batch)
            del batch
            results.append(sim.checksum(copied))
            del copied
        found = [result.value() for result in results]
        assert sum(one != other for one, other in zip(found, sums(400), strict=True)) > 0


class UnlocksAtOnce(SimulatedBackend):
    """Does not wait for the copies before it unlocks."""

    def unlock(self, slot):
        if os.getpid() == self._pid and self._locked.pop(slot.address, 0):
            self.device.unlock(slot.address)


@pytest.mark.parametrize(
    ("backend", "is_right"), [(UnlocksAtOnce, False), (SimulatedBackend, True)]
)
def test_an_unlock_while_a_copy_goes_on_is_found(backend, is_right) -> None:
    def die_at_three(index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(index)

    # Nothing runs by itself: the copies of the first three are not done when the engine closes.
    device = SimulatedDevice(seed=1, longest_delay=10**6)
    with installed(device, backend) as sim:
        dataset = Calls(die_at_three, 8)
        loader = DataLoader(
            dataset, None, num_workers=1, prefetch_factor=4, device="sim", device_prefetch=4
        )
        batches = iter(loader)
        results = [sim.checksum(next(batches)) for _ in range(3)]
        with pytest.raises(WorkerDiedError, match="batch 3"):
            next(batches)
        found = [result.value() for result in results]
        assert (found == sums(3)) == is_right
        assert (sim.faults == []) == is_right


# Slots and their page locks --------------------------------------------------------------


def test_slots_are_locked_once_each(sim) -> None:
    assert load(sim, make(200)) == sums(200)
    assert sim.counts["lock"] == sim.counts["unlock"] <= 2 * 2 + 4
    assert sim.counts["early copy"] == 0
    assert sim.locked == {}


def test_a_slot_is_locked_anew_when_its_batches_grow(sim) -> None:
    def growing(index):
        return torch.full((LENGTH + 40_000 * index,), index, dtype=torch.int32)

    loader = DataLoader(Calls(growing, 20), None, num_workers=1, prefetch_factor=1, device="sim")
    want = [host_checksum(growing(index)) for index in range(20)]
    assert load(sim, loader) == want
    assert sim.counts["late copy"] == 20
    assert sim.counts["lock"] > 10
    assert sim.counts["lock"] == sim.counts["unlock"]


@contextlib.contextmanager
def unlocked_before(sim, monkeypatch, *names):
    """Check that a slot's methods are called on slots that are not locked; gives the calls."""
    calls = []

    def watch(name):
        method = getattr(Slot, name)

        def checked(slot, *args):
            if slot.address in sim.locked:
                sim.faults.append(f"{name} of a slot that is locked")
            calls.append(name)
            return method(slot, *args)

        monkeypatch.setattr(Slot, name, checked)

    for name in names:
        watch(name)
    yield calls
    monkeypatch.undo()


def test_a_slot_is_unlocked_before_it_gives_memory_back_and_is_unmapped(sim, monkeypatch) -> None:
    def shrinking(index):
        length = 12 << 20 if index < 6 else LENGTH
        return torch.full((length,), index, dtype=torch.int32)

    with unlocked_before(sim, monkeypatch, "give_back", "close") as calls:
        loader = DataLoader(
            Calls(shrinking, 150), None, num_workers=1, prefetch_factor=2, device="sim"
        )
        found = load(sim, loader)
        assert found == [host_checksum(shrinking(index)) for index in range(150)]
        assert {"give_back", "close"} <= set(calls)


def test_a_slot_that_a_fork_shares_is_unlocked_before_it_is_retired(sim, monkeypatch) -> None:
    with unlocked_before(sim, monkeypatch, "close") as calls:
        batches = iter(make(60))
        results = [sim.checksum(next(batches)) for _ in range(3)]
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        results += [sim.checksum(batch) for batch in batches]
        assert [result.value() for result in results] == sums(60)
        assert "close" in calls


def test_where_locking_is_refused_batches_come_all_the_same_with_one_warning() -> None:
    with installed(SimulatedDevice(seed=1, refuses="not here")) as sim:
        with pytest.warns(RuntimeWarning, match="not here") as warned:
            assert load(sim, make(60)) == sums(60)
        assert len(warned) == 1
        assert sim.counts["refused"] == 1
        assert sim.locked == {}
        assert (sim.counts["late copy"], sim.counts["early copy"]) == (0, 60)


def test_a_refusal_whose_warning_is_an_error_loses_one_batch_and_no_slot() -> None:
    # So late that all slots are in use at a time.
    device = SimulatedDevice(seed=1, longest_delay=60, refuses="not here")
    with installed(device) as sim:
        batches = iter(make(60))
        with pytest.raises(RuntimeWarning, match="not here"):
            next(batches)
        results = [sim.checksum(batch) for batch in batches]
        assert [result.value() for result in results] == sums(60)[1:]


# How far ahead ---------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_so_many_batches_are_made_ready_and_no_more(sim, ahead) -> None:
    made = []

    def note(batch):
        made.append(1)
        return batch

    loader = make(40, prefetch_factor=5, device_prefetch=ahead, transform=note)
    batches = iter(loader)
    assert sim.checksum(next(batches)).value() == sums(1)[0]
    wait_until(lambda: len(made) == ahead + 1)
    # One that is not to be made would have been by the time that another loader has run.
    load(sim, make(10))
    assert len(made) == ahead + 1
    found = [sim.checksum(batch).value() for batch in batches]
    assert found == sums(40)[1:]
    # None was copied out for lack of slots that may be lent.
    assert sim.counts["early copy"] == 0


def test_batches_that_are_kept_do_not_hold_slots(sim) -> None:
    kept = list(make(50))
    assert [sim.checksum(batch).value() for batch in kept] == sums(50)
    assert sim.counts["early copy"] == 0
    assert sim.counts["lock"] <= 2 * 2 + 4


# What a batch may be ---------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    image: torch.Tensor
    label: int


class Mover:
    """Moves itself, as batches of graphs do."""

    def __init__(self, tensor) -> None:
        self.tensor = tensor

    def to(self, device):
        return Mover(device.copy(self.tensor))


def odd_batch(index):
    large = torch.full((LENGTH,), index, dtype=torch.int32)
    return {
        "tensor": large,
        "pair": Pair(large + 1, index),
        "array": large.numpy() + 2,
        "mover": Mover(large + 3),
        "text": ["a", b"b", None, 1.5],
        "small": torch.tensor(index),
    }


def is_in_slot(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "memfd:shmloader" in line
    raise AssertionError("not mapped")


def test_no_part_of_a_batch_is_a_view_of_a_slot(sim) -> None:
    # A fourth of them is kept, for their slots to be filled again meanwhile.
    kept = []
    loader = DataLoader(Calls(odd_batch, 40), num_workers=2, collate_fn=only, device="sim")
    for index, batch in enumerate(loader):
        assert not is_in_slot(batch["pair"].image.data_ptr())
        assert not is_in_slot(batch["array"].ctypes.data)
        assert sim.has(batch["tensor"])
        assert sim.has(batch["small"])
        assert sim.has(batch["mover"].tensor)
        assert batch["text"] == ["a", b"b", None, 1.5]
        if index % 4 == 0:
            kept.append((index, batch))
    for index, batch in kept:
        assert sim.read(batch["tensor"]).unique().tolist() == [index]
        assert batch["pair"].image.unique().tolist() == [index + 1]
        assert np.unique(batch["array"]).tolist() == [index + 2]
        assert sim.read(batch["mover"].tensor).unique().tolist() == [index + 3]
        assert sim.read(batch["small"]).item() == index


def test_a_packed_sequence_moves_itself(sim, monkeypatch) -> None:
    def packed(index):
        return pack_padded_sequence(torch.full((5, 2, 3), float(index)), [5, 3])

    monkeypatch.setattr(
        PackedSequence,
        "to",
        lambda self, device: PackedSequence(device.copy(self.data), self.batch_sizes),
    )
    loader = DataLoader(Calls(packed, 6), None, num_workers=1, device="sim")
    for index, batch in enumerate(loader):
        assert type(batch) is PackedSequence
        assert sim.read(batch.data).unique().tolist() == [index]
        assert batch.batch_sizes.tolist() == [2, 2, 2, 1, 1]


@pytest.fixture
def slow_sim():
    """One that is later: two batches ahead are not done when the user has them."""
    with installed(SimulatedDevice(seed=1, longest_delay=60)) as device:
        yield device
    assert device.faults == []


def test_a_batch_of_an_epoch_that_is_left_stays_as_it_is(slow_sim) -> None:
    loader = make(40, persistent_workers=True)
    results = []
    for _ in range(40):
        batches = iter(loader)
        results += [slow_sim.checksum(next(batches)), slow_sim.checksum(next(batches))]
    loader.close()
    assert [result.value() for result in results] == sums(2) * 40


# Transforms ------------------------------------------------------------------------------


def test_a_transform_runs_on_our_thread_and_stream_before_the_hand_over(slow_sim) -> None:
    sim = slow_sim
    streams = []

    def double(batch):
        streams.append(sim.current_stream())
        return sim.compute(lambda numbers: numbers * 2, batch)

    loader = make(300, transform=double)
    with sim.on(sim.new_stream("side")):
        # At once: the consumer's stream waits for nothing but what next() has it wait for.
        found = [sim.checksum(batch).value() for batch in loader]
    assert found == [host_checksum(sample(index) * 2) for index in range(300)]
    assert len(set(streams)) == 1
    assert streams[0] is not sim.default_stream


class Wrapped:
    __slots__ = ("parts",)

    def __init__(self, *parts) -> None:
        self.parts = parts


def test_tensors_inside_of_what_a_transform_returns_are_noted_as_used(sim) -> None:
    loader = make(300, transform=lambda batch: Wrapped({"x": Pair(batch, 1)}))
    with sim.on(sim.new_stream("side")):
        results = [sim.checksum(batch.parts[0]["x"].image) for batch in loader]
        found = [result.value() for result in results]
    assert found == sums(300)
    assert sim.counts["use"] == 300


def test_a_copy_that_fails_half_way_loses_its_batch_alone(sim) -> None:
    def half_sparse(index):
        first = sample(index)
        return [first, torch.eye(3).to_sparse()] if index == 3 else [first]

    batches = iter(DataLoader(Calls(half_sparse, 60), None, num_workers=2, device="sim"))
    results = [sim.checksum(next(batches)) for _ in range(3)]
    with pytest.raises(RuntimeError, match="strided"):
        next(batches)
    results += [sim.checksum(batch) for batch in batches]
    want = sums(60)
    assert [result.value() for result in results] == want[:3] + want[4:]


def test_an_exception_that_is_kept_holds_no_slot(sim, slots) -> None:
    def fail(batch):
        raise ValueError("no such luck")

    errors = []
    batches = iter(make(20, transform=fail))
    for _ in range(20):
        with pytest.raises(ValueError, match="no such luck") as caught:
            next(batches)
        errors.append(caught.value)
    with pytest.raises(StopIteration):
        next(batches)
    assert slots.maps() == {}
    assert sim.counts["early copy"] == 0


# Alone -----------------------------------------------------------------------------------


def test_the_device_cpu_is_plain_loading() -> None:
    loader = make(6, device="cpu")
    assert [batch[0].item() for batch in loader] == list(range(6))
    loader = make(6, device="cpu", num_workers=0, transform=lambda batch: batch + 1)
    assert [batch[0].item() for batch in loader] == [1, 2, 3, 4, 5, 6]
