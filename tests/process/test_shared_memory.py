"""Sizes: caps, growth, giving back; and what collate functions allocate in torch's own way."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from shmloader import DataLoader, SharedMemoryError
from shmloader.grammar import size
from tests.process.support import Calls, mapping_at, only

SLOTS = 2 * 2 + 4
MIB = 1 << 20


def of_bytes(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), nbytes % 251, dtype=torch.uint8)


def assert_whole(batch: torch.Tensor, nbytes: int) -> None:
    assert batch.shape == (nbytes,)
    assert bool((batch == nbytes % 251).all())


@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_over_its_share_raises_with_numbers_and_the_rest_goes_on(in_order) -> None:
    sizes = [1000, 2 * MIB, 1000, 900_000, 3 * MIB, 1 * MIB, 5]
    loader = DataLoader(
        Calls(of_bytes, len(sizes)), sampler=sizes, batch_size=None, num_workers=2,
        shm_size=SLOTS * MIB, in_order=in_order,
    )  # fmt: skip
    batches, seen, told = iter(loader), [], []
    for _ in sizes:
        try:
            seen.append(len(next(batches)))
        except SharedMemoryError as error:
            told.append(str(error))
            seen.append(next(n for n in sizes if size(n) in str(error)))
    assert len(told) == 2
    assert all(f"leaves only {size(MIB)} for each of" in text for text in told)
    assert issubclass(SharedMemoryError, MemoryError)
    # What they say to do helps.
    enough = sorted(re.search(r"shm_size='(\d+)MiB' suff", text)[1] for text in told)
    assert [int(one) for one in enough] == [2 * SLOTS, 3 * SLOTS]
    assert seen == sizes if in_order else sorted(seen) == sorted(sizes)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pickled", "collated", "many small", "strings"])
def test_batches_of_any_size_under_a_cap_come_whole_or_are_told_and_nobody_dies(way) -> None:
    """Sizes go through the cap in small steps: layout, body and spans each meet it somewhere."""

    def make(n: int) -> object:
        if way == "pickled":
            return [of_bytes(n * 500), {"n": n}]
        if way == "collated":
            return default_collate([of_bytes(n * 500)])
        if way == "many small":
            return [torch.tensor([n]) for _ in range(n * 8)]
        return ["x" * 50 + str(k) for k in range(n * 15)]

    loader = DataLoader(
        Calls(make, 200), num_workers=1, collate_fn=only, batch_size=1,
        shm_size=6 * 64 * 1024,
    )  # fmt: skip
    batches = iter(loader)
    came = told = 0
    for n in range(200):
        try:
            batch = next(batches)
            came += 1
            if way == "many small":
                assert len(batch) == 8 * n
                assert all(int(tensor[0]) == n for tensor in batch)
            if way == "pickled":
                assert_whole(batch[0], 500 * n)
            if way == "strings":
                assert batch == make(n)
        except SharedMemoryError:
            told += 1
    assert came > 50
    assert told > 50


def test_a_long_message_under_a_cap_is_shortened() -> None:
    def fail(n: int) -> None:
        raise ValueError("begin " + "é" * 500_000 + " end")

    batches = iter(DataLoader(Calls(fail, 2), num_workers=1, shm_size=6 * 64 * 1024))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?s)Traceback.* end"):
            next(batches)


def test_an_exception_class_too_large_for_the_cap_is_told() -> None:
    def fail(n: int) -> None:
        class Heavy(Exception):  # noqa: N818 - as users name theirs
            ballast = os.urandom(300_000)

        raise Heavy("too much")

    batches = iter(DataLoader(Calls(fail, 2), num_workers=1, shm_size=6 * 64 * 1024))
    for _ in range(2):
        with pytest.raises(Exception, match="too much") as told:
            next(batches)
        assert "died" not in type(told.value).__name__.lower()


def test_a_small_batch_then_a_very_large_one() -> None:
    sizes = [1000, 200_000_000, 1000, 100_000_000, 10]
    loader = DataLoader(Calls(of_bytes, len(sizes)), sampler=sizes, batch_size=None, num_workers=2)
    for nbytes, batch in zip(sizes, loader, strict=True):
        assert_whole(batch, nbytes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [1000, 200_000])
def test_memory_is_given_back_after_a_very_large_batch(after, slots) -> None:
    sizes = [200_000_000] + [after] * 600
    loader = DataLoader(
        Calls(of_bytes, len(sizes)), sampler=sizes, batch_size=None, num_workers=2,
        persistent_workers=True,
    )  # fmt: skip
    most = 0
    for batch in loader:
        del batch
        most = max(most, sum(slots.files().values()))
    assert most >= 200_000_000
    assert sum(slots.files().values()) < 100_000_000


def test_dev_shm_stays_empty() -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are compared
    loader = DataLoader(Calls(lambda n: of_bytes(100_000 + n), 20), num_workers=2)
    for _ in loader:
        assert {
            name for name in set(os.listdir("/dev/shm")) - before  # noqa: PTH208 - as above
            if not name.startswith(("sem.", "pym-"))
        } == set()  # fmt: skip


def concatenate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, str]:
    """Concatenate in a worker as PyTorch Geometric does, and say where the result lies."""
    first = samples[0]
    count = sum(sample.numel() for sample in samples)
    storage = first.untyped_storage()._new_shared(count * first.element_size(), device=first.device)
    out = first.new(storage).resize_(len(samples) * first.shape[0], *first.shape[1:])
    return torch.cat(samples, out=out), mapping_at(storage.data_ptr())


def ramp(index: int) -> torch.Tensor:
    return torch.arange(index, index + 40_000).view(4, 10_000)


def test_shared_memory_of_torchs_is_served_from_the_slot_in_collate():
    loader = DataLoader(Calls(ramp, 12), batch_size=4, collate_fn=concatenate, num_workers=1)
    kept = list(loader)
    for number, (batch, where) in enumerate(kept):
        assert "memfd:shmloader" in where
        assert torch.equal(batch, torch.cat([ramp(4 * number + at) for at in range(4)]))
        assert batch.untyped_storage().nbytes() == batch.numel() * 8


def test_what_does_not_fit_in_the_slot_is_raised_as_such_or_lies_in_private_memory():
    loader = DataLoader(
        Calls(ramp, 4),
        batch_size=4,
        collate_fn=lambda x: concatenate(x)[1],
        num_workers=1,
        shm_size="1MiB",
    )
    (where,) = loader
    assert "/" not in where  # an intermediate result may be larger than the slot


def outside(index: int) -> tuple[Any, str]:
    storage = torch.UntypedStorage._new_shared(4096)
    return index, mapping_at(storage.data_ptr())


def test_outside_of_collate_memory_is_private():
    loader = DataLoader(Calls(outside, 2), batch_size=2, collate_fn=list, num_workers=1)
    ((first, second),) = loader
    assert not any("/" in where for _, where in (first, second))


def test_the_main_process_keeps_torchs_own_function():
    before = torch.UntypedStorage._new_shared
    list(DataLoader(Calls(ramp, 4), collate_fn=concatenate, num_workers=1))
    assert torch.UntypedStorage._new_shared == before


def test_a_default_device_of_the_consumers_does_not_touch_batches() -> None:
    loader = DataLoader(
        Calls(lambda n: {"x": torch.full((3,), n), "y": torch.full((3,), n)}, 4),
        batch_size=2, num_workers=1,
    )  # fmt: skip
    batches = iter(loader)
    with torch.device("meta"):
        batch = next(batches)
    assert batch["x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert [tensor.device.type for batch in batches for tensor in batch.values()] == ["cpu"] * 2


class Tagged(torch.Tensor):
    pass


def test_tensors_of_a_subclass_leave_no_file_in_dev_shm() -> None:
    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        mapped = re.findall(r"/dev/shm/torch\S*", Path("/proc/self/maps").read_text())
        return batch, len(mapped)

    loader = DataLoader(
        Calls(lambda n: torch.full((30_000,), float(n)).as_subclass(Tagged), 4),
        batch_size=2, num_workers=1, collate_fn=collate,
    )  # fmt: skip
    for number, (batch, mapped) in enumerate(loader):
        assert mapped == 0
        assert type(batch) is Tagged
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]


def test_a_step_on_the_way_to_a_batch_may_be_larger_than_the_share() -> None:
    loader = DataLoader(
        Calls(lambda n: torch.full((200_000,), float(n)), 4), batch_size=2, num_workers=1,
        collate_fn=lambda samples: default_collate(samples).mean(1), shm_size="1MiB",
    )  # fmt: skip
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
