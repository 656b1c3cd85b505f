"""What encoding copies, what it spills, and whom it blames."""

import copy
import dataclasses
import pickle

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
    SPILL_BYTES,
    is_in,
    open_bench,
    tensors_of,
)

both_ways = pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])


@dataclasses.dataclass
class Record:
    name: str
    value: object


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


# The body -----------------------------------------------------------------------------------


@both_ways
def test_a_long_body_spills_into_the_slot(bench, lent):
    batch = [list(range(20_000)), torch.arange(5), "end"]
    layout = bench.encode(batch)
    assert isinstance(layout.body, tuple)
    assert len(pickle.dumps(layout)) < 300
    assert_same(bench.decode(layout, lent=lent), batch)


def test_a_short_body_travels_in_the_message(bench):
    layout = bench.encode(["x" * (SPILL_BYTES - 100)])
    assert isinstance(layout.body, bytes)
    assert bench.writer.used_bytes == 0


def test_a_layout_crosses_a_pickle_unchanged(bench):
    layout = bench.encode([torch.zeros(3), np.zeros(LARGE), [1] * 20_000])
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert_same(bench.decode(again, lent=False), bench.decode(layout, lent=False))


def test_an_object_that_occurs_twice_arrives_once(bench):
    tensor, array, record = torch.zeros(3), np.zeros(3), Record("a", [1])
    arrived = bench.send([tensor, tensor, array, array, record, record], lent=False)
    assert arrived[0] is arrived[1]
    assert arrived[2] is arrived[3]
    assert arrived[4] is arrived[5]


def test_a_batch_that_holds_itself_arrives(bench):
    batch = {"x": torch.arange(3)}
    batch["self"] = batch
    arrived = bench.send(batch, lent=False)
    assert arrived["self"] is arrived
    assert arrived["x"].tolist() == [0, 1, 2]


def test_a_tensor_subclass_keeps_its_class_and_attributes(bench):
    tensor = torch.arange(LARGE).as_subclass(Owned)
    tensor.owner = "ada"
    arrived = bench.send({"t": tensor}, lent=True)["t"]
    assert type(arrived) is Owned
    assert arrived.owner == "ada"
    assert torch.equal(arrived.as_subclass(torch.Tensor), torch.arange(LARGE))


class Owned(torch.Tensor):
    owner: str


# Errors -------------------------------------------------------------------------------------


def test_functions_cross_by_value_where_that_is_allowed(bench):
    layout = bench.encode([lambda x: x + 1, torch.arange(3)], by_value=True)
    function, tensor = bench.decode(layout, lent=False)
    assert function(2) == 3
    assert tensor.tolist() == [0, 1, 2]


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


def test_an_object_of_the_user_s_that_cannot_be_unpickled_raises_its_own_error(bench):
    layout = bench.encode([Fragile()])
    with pytest.raises(ZeroDivisionError, match="on arrival"):
        bench.decode(layout, lent=False)


class Fragile:
    def __reduce__(self):
        return _break, ()


def _break():
    raise ZeroDivisionError("on arrival")


def test_encoding_leaves_the_batch_as_it_was(bench):
    batch = {"t": torch.arange(5.0).requires_grad_(), "a": np.arange(5)}
    before = copy.deepcopy(batch)
    bench.encode(batch)
    assert_same(batch, before)
    assert not is_in(bench.slot, batch["t"])
    assert tensors_of(batch)[0].is_leaf
