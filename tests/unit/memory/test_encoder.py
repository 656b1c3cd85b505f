"""What encoding copies, what it spills, and whom it blames."""

import copy

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import ALIGNMENT
from tests.parity.compare import assert_same
from tests.unit.memory.support import (
    LARGE,
    MIB,
    is_in,
    open_bench,
    tensors_of,
)

# What lies in the slot already --------------------------------------------------------------


def test_what_collate_put_into_the_slot_is_not_copied_again(bench):
    image = bench.writer.empty((3, LARGE), torch.float32).fill_(3)
    mask = bench.writer.empty((LARGE,), torch.uint8).fill_(1)
    used = bench.writer.used_bytes
    layout = bench.encode({"image": image, "mask": mask.numpy(), "flat": image.view(-1)[1:]})
    assert bench.writer.used_bytes == used
    del image, mask
    arrived = bench.decode(layout, lent=True)
    assert arrived["image"].shape == (3, LARGE)
    assert (arrived["image"] == 3).all()
    assert (arrived["mask"] == 1).all()
    arrived["image"][0, 1] = 9
    assert arrived["flat"][0] == 9


def test_a_batch_that_was_encoded_is_not_held(bench):
    bench.encode({"image": bench.writer.empty((3, 4), torch.float32), "name": "x"})
    assert not bench.writer.part(), "the slot's bytes would be copied after each use"


def test_a_part_outside_the_slot_is_copied_and_one_inside_is_not(bench):
    inside = bench.writer.empty((LARGE,), torch.uint8).fill_(1)
    used = bench.writer.used_bytes
    arrived = bench.send([inside, torch.full((LARGE,), 2, dtype=torch.uint8)], lent=False)
    assert bench.writer.used_bytes - used == -(-LARGE // 64) * 64
    assert [int(tensor[0]) for tensor in arrived] == [1, 2]


def test_the_whole_way_through_collate_copies_once(bench):
    samples = [(torch.full((LARGE,), number), number) for number in range(4)]
    stacked = bench.writer.empty((4, LARGE), torch.int64)
    torch.stack([sample for sample, _ in samples], out=stacked)
    used = bench.writer.used_bytes
    arrived = bench.send([stacked, torch.arange(4)], lent=True)
    assert bench.writer.used_bytes == used + ALIGNMENT
    assert_same(arrived, default_collate(samples))


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(MIB),
        np.zeros(MIB),
        [torch.zeros(MIB // 5), torch.zeros(MIB // 5)],
        list(range(MIB)),
    ],
    ids=["tensor", "array", "two tensors", "body"],
)
def test_a_batch_too_large_for_its_slot_is_a_shared_memory_error(batch):
    with open_bench(MIB) as bench, pytest.raises(SharedMemoryError, match="raise shm_size"):
        bench.encode(batch)


def test_encoding_leaves_the_batch_as_it_was(bench):
    batch = {"t": torch.arange(5.0).requires_grad_(), "a": np.arange(5)}
    before = copy.deepcopy(batch)
    bench.encode(batch)
    assert_same(batch, before)
    assert not is_in(bench.slot, batch["t"])
    assert tensors_of(batch)[0].is_leaf
