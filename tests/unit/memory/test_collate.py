"""Output in the slot, for torch's own collate and for the user's."""

import pytest
import torch
from torch.utils.data import default_collate

from shmloader.batch.collator import Collator, Timer
from shmloader.memory.flat import FlatLayout
from shmloader.memory.writer import SlotWriter, empty
from tests.unit.memory.support import installed, is_in, open_bench


@pytest.fixture
def bench():
    with open_bench() as bench, installed(bench.writer):
        yield bench


def collator(bench):
    return Collator(default_collate, Timer(), writer=bench.writer)


SAMPLES = [torch.zeros(3), torch.ones(3)]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected_shape", "expected_dtype"),
    [
        (3, None, (3,), torch.float32),
        ((2, 3), torch.int8, (2, 3), torch.int8),
        ([2, 3], torch.bfloat16, (2, 3), torch.bfloat16),
        (torch.Size([4]), None, (4,), torch.float32),
        ((), torch.bool, (), torch.bool),
        ((0, 2), None, (0, 2), torch.float32),
    ],
)
@pytest.mark.parametrize("in_worker", [False, True])
def test_empty_is_torch_s_empty_in_a_worker_and_outside(
    shape, dtype, expected_shape, expected_dtype, in_worker
):
    with open_bench() as bench:
        if in_worker:
            bench.writer.open(bench.slot, is_offered=True)
            with installed(bench.writer):
                tensor = empty(shape, dtype)
        else:
            tensor = empty(shape, dtype)
        assert tensor.shape == expected_shape
        assert tensor.dtype == expected_dtype
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


def test_default_collate_of_plain_samples_takes_the_short_way(bench):
    collate = collator(bench)
    assert isinstance(collate(SAMPLES), FlatLayout)


def test_default_collate_of_other_samples_still_writes_into_the_slot(bench):
    batch = collator(bench)([(sample, "name") for sample in SAMPLES])
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
