"""Batches on the late device: what comes is right.

The device (`tests.late`) does its work when somebody waits. A consumer starts a copy on the device
of what is first and last in a batch, and drops the batch before that is done.
"""

import contextlib
import dataclasses
import os
import random

import pytest
import torch

from shmloader import DataLoader
from shmloader.device.backend import Backend
from shmloader.memory.arena import Arena, Slot
from tests.late import LateDevice
from tests.process.support import Calls, mapping_at, only, wait_until

# Elements of int32: above 64 KiB, so a batch of one is lent, and read late.
LENGTH = 17_000


def sample(index: int) -> torch.Tensor:
    return torch.full((LENGTH,), index, dtype=torch.int32)


def make(count: int, **options) -> DataLoader:
    options = {"num_workers": 2, "collate_fn": only, "device": "late", **options}
    return DataLoader(Calls(sample, count), batch_size=1, **options)


def ends(count: int) -> list[list[int]]:
    return [[index, index] for index in range(count)]


@contextlib.contextmanager
def on(stream: torch.Stream):
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(before)


@pytest.mark.slow
def test_thousands_of_batches_arrive_whole_whoever_uses_them(late: LateDevice) -> None:
    chance = random.Random(1)
    main = torch.accelerator.current_stream()
    streams = [main, torch.Stream("late:0"), torch.Stream("late:0")]
    found, kept = [], []
    for batch in make(2_000, prefetch_factor=3):
        stream = chance.choice(streams)
        if stream is not main:
            # As a user does who goes on elsewhere: next() ran on the main stream.
            stream.wait_stream(main)
            batch.record_stream(stream)
        with on(stream):
            found.append((batch[:1].clone(), batch[-1:].clone()))
        if chance.random() < 0.05:
            kept = [*kept[-5:], batch]
        del batch
    torch.accelerator.synchronize()
    assert [[int(end) for end in pair] for pair in found] == ends(2_000)
    assert late.count("faults") == 0
    assert late.count("pageable copies") == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [
    {"device": "late:1"},
    {"device": None, "pin_memory": True},
    {"device": "late", "thread_pool": True},
    {"device": "late", "persistent_workers": True},
    {"device": "late", "num_workers": 0},
], ids=str)  # fmt: skip
def test_batches_arrive_over_several_epochs(late: LateDevice, options) -> None:
    with contextlib.closing(make(40, **options)) as loader:
        for _ in range(3):
            if options["device"] is None:
                # A user's own copy, of memory that torch's allocator knows.
                found = late.contents(batch.to("late", non_blocking=True) for batch in loader)
            else:
                found = late.contents(loader)
            assert found == ends(40)
    assert late.count("faults") == 0


def test_batches_are_whole_on_a_stream_of_the_user_s_whenever_they_are_read(late) -> None:
    with on(torch.Stream("late:0")):
        assert late.contents(make(200)) == ends(200)
        assert [[int(batch[0]), int(batch[-1])] for batch in make(200)] == ends(200)


def test_slots_are_locked_once_each(late: LateDevice) -> None:
    assert late.contents(make(200)) == ends(200)
    assert late.count("registered") == late.count("unregistered") <= 2 * 2 + 4
    assert late.count("registered bytes") == 0


def test_a_slot_is_locked_anew_when_its_batches_grow(late: LateDevice) -> None:
    def growing(index):
        return torch.full((LENGTH + 40_000 * index,), index, dtype=torch.int32)

    loader = DataLoader(Calls(growing, 20), None, num_workers=1, prefetch_factor=1, device="late")
    assert late.contents(loader) == ends(20)
    assert late.count("registered") == late.count("unregistered") > 5
    assert late.count("pageable copies") == late.count("faults") == 0


def test_a_slot_is_unlocked_before_it_gives_memory_back_and_is_unmapped(late, monkeypatch) -> None:
    calls, wrong = set(), []

    def watch(kind, name):
        method = getattr(kind, name)

        def checked(*args):
            (slot,) = [one for one in args if isinstance(one, Slot)]
            address = getattr(slot, "address", 0)
            if late.registered_bytes(address):
                wrong.append(name)
            if address:
                calls.add(name)
            return method(*args)

        monkeypatch.setattr(kind, name, checked)

    def shrinking(index):
        length = 10 << 20 if index < 4 else LENGTH
        return torch.full((length,), index, dtype=torch.int32)

    watch(Arena, "give_back")
    watch(Slot, "unmap")
    loader = DataLoader(
        Calls(shrinking, 150), None, num_workers=1, prefetch_factor=2, device="late"
    )
    assert late.contents(loader) == ends(150)
    assert (calls, wrong) == ({"give_back", "unmap"}, [])


def test_a_fork_costs_no_slot_and_no_lock(late) -> None:
    batches = iter(make(60))
    found = late.contents(next(batches) for _ in range(30))
    before = late.count("registered")
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    found += late.contents(batches)
    assert found == ends(60)
    assert late.count("registered") == before
    assert late.count("faults") == 0


def test_where_locking_is_refused_batches_come_all_the_same_with_one_warning(late) -> None:
    late.driver.refuses = "not here"
    loader = make(60)
    with pytest.warns(RuntimeWarning, match=r"69\.6 kB was refused: not here") as warned:
        assert late.contents(loader) == ends(60)
    # Python 3.12 and later also warn of each fork while threads run.
    assert len([one for one in warned if one.category is RuntimeWarning]) == 1
    assert late.contents(loader) == ends(60)  # a second warning would be an error
    assert [call[0] for call in late.driver.calls] == ["register"]
    assert (late.count("late copies"), late.count("pageable copies")) == (120, 0)


def test_a_refusal_whose_warning_is_an_error_loses_one_batch_and_no_slot(late) -> None:
    late.driver.refuses = "not here"
    batches = iter(make(60))
    with pytest.raises(RuntimeWarning, match="not here"):
        next(batches)
    assert late.contents(batches) == ends(60)[1:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ahead", [1, 7])
def test_so_many_batches_are_made_ready_and_no_more(late, ahead) -> None:
    made = []

    def note(batch):
        made.append(1)
        return batch

    loader = make(40, prefetch_factor=5, device_prefetch=ahead, device_transform=note)
    batches = iter(loader)
    assert int(next(batches)[0]) == 0
    wait_until(lambda: len(made) == ahead + 1)
    # One that is not to be made would have been by the time that another loader has run.
    late.contents(make(10))
    assert len(made) == ahead + 1
    assert late.contents(batches) == ends(40)[1:]


@dataclasses.dataclass
class Pair:
    image: torch.Tensor
    label: int


class Mover:
    def __init__(self, tensor) -> None:
        self.tensor = tensor

    def to(self, device):
        return Mover(self.tensor.to(device))


def odd_batch(index):
    large = torch.full((LENGTH,), index, dtype=torch.int32)
    return {
        "tensor": large,
        "transposed": (large.view(2, -1) + 4).t(),
        "pair": Pair(large + 1, index),
        "array": large.numpy() + 2,
        "mover": Mover(large + 3),
        "text": ["a", b"b", None, 1.5],
        "small": torch.tensor(index),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
    }


def parts_of(batch):
    tensors = [batch[name] for name in ("tensor", "transposed", "small", "empty", "bool")]
    return [*tensors, batch["mover"].tensor, batch["pair"].image, torch.from_numpy(batch["array"])]


def test_no_part_of_a_batch_is_a_view_of_a_slot(late: LateDevice) -> None:
    # A fourth of them is kept, for their slots to be filled again meanwhile.
    kept = []
    loader = DataLoader(Calls(odd_batch, 40), num_workers=2, collate_fn=only, device="late")
    for index, batch in enumerate(loader):
        for address in (batch["pair"].image.data_ptr(), batch["array"].ctypes.data):
            assert "memfd:shmloader" not in mapping_at(address)
        assert {part.device for part in parts_of(batch)[:6]} == {torch.device("late:0")}
        assert batch["text"] == ["a", b"b", None, 1.5]
        if index % 4 == 0:
            kept.append((index, batch))
    assert late.count("pageable copies") == 10 * 4  # of the objects that move themselves
    for index, batch in kept:
        for part, expected in zip(parts_of(batch), parts_of(odd_batch(index)), strict=True):
            assert part.shape == expected.shape
            assert torch.equal(part.cpu(), expected)


def test_a_batch_of_an_epoch_that_is_left_stays_as_it_is(late: LateDevice) -> None:
    with contextlib.closing(make(40, persistent_workers=True)) as loader:
        found = []
        for _ in range(20):
            batches = iter(loader)
            found += late.contents(next(batches) for _ in range(2))
    assert found == ends(2) * 20


def test_a_transform_runs_on_our_thread_and_stream_before_the_delivery(late: LateDevice) -> None:
    streams = []

    def double(batch):
        streams.append(torch.accelerator.current_stream())
        return torch.cat([batch, batch])

    with on(torch.Stream("late:0")) as side:
        assert late.contents(make(100, device_transform=double)) == ends(100)
        assert {(stream.stream_id == side.stream_id) for stream in streams} == {False}
    assert len({stream.stream_id for stream in streams}) == 1


def test_a_transform_that_moves_a_batch_to_another_device_is_told(late: LateDevice) -> None:
    def move(batch):
        return [batch, batch.to("late:1", non_blocking=True)] if batch[0] == 3 else batch

    batches = iter(make(8, device="late:0", device_transform=move))
    found = late.contents(next(batches) for _ in range(3))
    with pytest.raises(
        ValueError, match="returned a tensor on late:1, but batches arrive on late:0"
    ):
        next(batches)
    assert found + late.contents(batches) == ends(8)[:3] + ends(8)[4:]


class Bad:
    def to(self, device, non_blocking=False):
        raise ValueError("not to be moved")


def test_a_copy_that_fails_half_way_loses_its_batch_alone(late: LateDevice) -> None:
    def half_bad(index):
        return [sample(index), Bad()] if index == 3 else [sample(index)]

    batches = iter(DataLoader(Calls(half_bad, 60), None, num_workers=2, device="late"))
    found = late.contents(next(batches) for _ in range(3))
    with pytest.raises(ValueError, match="not to be moved"):
        next(batches)
    found += late.contents(batches)
    assert found == ends(60)[:3] + ends(60)[4:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["device_transform", "copy", "record"])
def test_an_exception_that_is_kept_holds_no_slot(late, slots, monkeypatch, where) -> None:
    def fail(*_):
        raise ValueError("no such luck")

    options = {"device_transform": fail} if where == "device_transform" else {}
    if where != "device_transform":
        monkeypatch.setattr(Backend, where, fail)
    errors = []
    batches = iter(make(20, **options))
    for _ in range(20):
        with pytest.raises(ValueError, match="no such luck") as caught:
            next(batches)
        errors.append(caught.value)
    with pytest.raises(StopIteration):
        next(batches)
    assert slots.maps() == {}


def test_the_device_cpu_is_plain_loading() -> None:
    loader = make(6, device="cpu")
    assert [batch[0].item() for batch in loader] == list(range(6))
    loader = make(6, device="cpu", num_workers=0, device_transform=lambda batch: batch + 1)
    assert [batch[0].item() for batch in loader] == [1, 2, 3, 4, 5, 6]
