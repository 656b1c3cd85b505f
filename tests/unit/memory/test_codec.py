"""Any picklable batch, into a slot and out of it, in one process."""

import copy

import numpy as np
import pytest
import torch

from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import ALIGNMENT
from shmloader.memory.flat import COPY_OUT_BYTES
from shmloader.memory.pickled import PickledReader
from tests.parity.compare import assert_same
from tests.parity.objects import WHOLE
from tests.unit.memory.support import (
    LARGE,
    MIB,
    assert_storages_are_aligned,
    is_in,
    open_bench,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
both_ways = pytest.mark.parametrize("lent", [False, True], ids=["copied", "lent"])


# Kinds that arrive as they were sent; tests/parity has all kinds, and what torch makes of them.
KINDS = (
    *("None", "nested containers", "an OrderedDict", "a named tuple", "a dataclass"),
    *("one list twice", "arrays of all number types"),
    *("a structured array", "an array of objects", "datetimes", "a large array", "0-d tensors"),
    *("tensors of all types", "NaNs with their payload", "one tensor twice", "large channels_last"),
    *("two views of one storage", "a tensor and its transpose", "one storage as two types"),
    *("large views of one storage", "a Parameter", "a tensor that requires grad"),
    *("a list of 5,000 numbers", "a megabyte of bytes", "small and large together"),
)


@pytest.mark.sampled(4)
@both_ways
@pytest.mark.parametrize("kind", KINDS)
def test_any_batch_arrives_as_it_was_sent(bench, kind, lent):
    expected = WHOLE[kind](1)
    arrived = bench.send(WHOLE[kind](1), lent=lent)
    assert_storages_are_aligned(arrived)
    if not lent:  # what is copied out does not change with its slot
        bench.slot.memory[: bench.writer.used_bytes] = b"\xff" * bench.writer.used_bytes
    assert_same(arrived, expected)
    del arrived
    assert len(bench.ended) == lent, "the slot is still held"


def test_a_tensor_brings_only_the_bytes_that_it_spans(bench):
    base = torch.arange(10**6, dtype=torch.int32)
    part = bench.send(base[1000:1010], lent=False)
    assert bench.writer.used_bytes == ALIGNMENT
    assert part.untyped_storage().nbytes() == 40
    assert part.storage_offset() == 0
    assert part.tolist() == list(range(1000, 1010))


@both_ways
def test_a_sparse_tensor_holds_its_slot_no_longer_than_the_user_does(bench, lent):
    """torch keeps what pickle makes of sparse tensors, until it loads a file."""
    kept = torch._utils._sparse_tensors_to_validate
    kept.append(None)  # as while a file is loaded
    expected = torch.ones(LARGE).to_sparse()
    arrived = bench.send(expected, lent=lent)
    assert_same(arrived, expected)
    assert kept == [None]
    kept.clear()
    del arrived
    assert len(bench.ended) == lent


def test_a_tensor_with_a_graph_is_refused_with_the_remedy(bench):
    tensor = torch.zeros(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"detach\(\) it .*: autograd does not cross processes"):
        bench.encode({"x": tensor})


@pytest.mark.parametrize(("nbytes", "is_lent"), [(COPY_OUT_BYTES, False), (LARGE, True)])
@pytest.mark.parametrize("make", [np.zeros, lambda n, dtype: torch.zeros(n, dtype=torch.uint8)])
def test_the_limit_of_copying_out_counts_bytes_of_a_part(bench, make, nbytes, is_lent):
    layout = bench.encode([make(nbytes, dtype=np.uint8), make(10, dtype=np.uint8)])
    assert PickledReader(layout).lends == is_lent


def test_a_part_outside_the_slot_is_copied_and_one_inside_is_not(bench):
    inside = bench.writer.empty((LARGE,), torch.uint8).fill_(1)
    used = bench.writer.used_bytes
    arrived = bench.send([inside, torch.full((LARGE,), 2, dtype=torch.uint8)], lent=False)
    assert bench.writer.used_bytes - used == -(-LARGE // 64) * 64
    assert [int(tensor[0]) for tensor in arrived] == [1, 2]


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros,
        np.zeros,
        lambda size: [torch.zeros(size // 5), torch.zeros(size // 5)],
        lambda size: list(range(size)),
    ],
    ids=["tensor", "array", "two tensors", "body"],
)
def test_a_batch_too_large_for_its_slot_is_a_shared_memory_error(make):
    batch = make(MIB)
    with open_bench(MIB) as bench, pytest.raises(SharedMemoryError, match="Raise it: shm_size="):
        bench.encode(batch)


def test_encoding_leaves_the_batch_as_it_was(bench):
    batch = {"t": torch.arange(5.0).requires_grad_(), "a": np.arange(5)}
    before = copy.deepcopy(batch)
    bench.encode(batch)
    assert_same(batch, before)
    assert not is_in(bench.slot, batch["t"])
    assert tensors_of(batch)[0].is_leaf
