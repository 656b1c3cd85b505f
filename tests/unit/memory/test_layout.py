"""Flat batches out of their slot: what is lent, what is copied out, and how it lies."""

import pytest
import torch

from shmloader.memory.flat import FlatPacker, FlatReader
from tests.unit.memory.support import LARGE, collated_by_torch, is_in

both_ways = pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])


@pytest.fixture
def packer(bench):
    return FlatPacker(bench.writer)


def large_and_small(count=4):
    return [
        {"image": torch.full((LARGE // 4,), float(n)), "label": n, "box": torch.tensor([n, n])}
        for n in range(count)
    ]


@both_ways
def test_every_field_has_a_storage_of_its_own(bench, packer, lent):
    samples = [
        (*sample.values(), torch.tensor([7.0, 7.0, 7.0]), torch.tensor([8.0, 8.0, 8.0]))
        for sample in large_and_small(3)
    ]
    arrived = bench.read(packer.pack(samples), lent=lent)
    starts = [tensor.untyped_storage().data_ptr() for tensor in arrived]
    assert all(start % 16 == 0 for start in starts)
    assert len(set(starts)) == len(arrived)
    for tensor in arrived:
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
        assert not tensor._is_view()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_large_fields_are_views_of_the_slot_and_small_ones_are_not(bench, packer):
    layout = packer.pack(large_and_small())
    assert FlatReader(layout).lends
    arrived = bench.read(layout, lent=True)
    assert {name: is_in(bench.slot, tensor) for name, tensor in arrived.items()} == {
        "image": True,
        "label": False,
        "box": False,
    }


def test_a_kept_label_holds_no_slot_and_a_kept_image_does(bench, packer):
    arrived = bench.read(packer.pack(large_and_small()), lent=True)
    image, label = arrived["image"][1:2], arrived["label"]
    del arrived
    assert not bench.ended
    assert (image == 1).all()
    del image
    assert len(bench.ended) == 1
    assert label.tolist() == [0, 1, 2, 3]


@both_ways
def test_what_was_copied_out_does_not_change_with_its_slot(bench, packer, lent):
    arrived = bench.read(packer.pack(large_and_small()), lent=lent)
    if lent:
        del arrived["image"]
        assert len(bench.ended) == 1
    expected = collated_by_torch(large_and_small())
    packer.pack([{**sample, "label": 99} for sample in large_and_small()[::-1]])
    for name, tensor in arrived.items():
        assert torch.equal(tensor, expected[name]), name


def test_the_user_may_write_into_every_field_without_touching_another(bench, packer):
    samples = [(torch.ones(2), torch.ones(2), torch.ones(LARGE), 1.0)] * 3
    arrived = bench.read(packer.pack(samples), lent=True)
    for number, tensor in enumerate(arrived):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in arrived] == [[0], [1], [2], [3]]
    assert all(tensor.eq(1).all() for tensor in samples[0][:3])
