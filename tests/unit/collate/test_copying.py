"""The compiled part copies samples as Python does, and writes nowhere else."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shmloader.collate import Pack, Pad, sequences
from tests.parity.compare import assert_same

copy = sequences._copy_sequences
pytestmark = pytest.mark.skipif(copy is None, reason="the compiled part is not built")


BATCHES = st.lists(st.lists(st.integers(0, 99), max_size=120), min_size=1, max_size=6)


class Number(int):
    """An int of a type of its own."""


def other_ints(tokens, _):
    return [*tokens[:1], *map(Number, tokens[1:2]), *map(np.int8, tokens[2:3]), *tokens[3:]]


def strided(tokens, dtype):
    return np.repeat(np.array(tokens, dtype), 2)[::2]


def read_only(tokens, dtype):
    array = np.array(tokens, dtype)
    array.flags.writeable = False
    return array


# Those of a list may be in one batch.
KINDS = {
    "ints": [lambda tokens, _: list(tokens), lambda tokens, _: tuple(tokens), other_ints],
    "lists": [lambda tokens, _: list(tokens)],
    "arrays": [np.array, strided, read_only],
    "contiguous arrays": [np.array, read_only],
    "swapped": [lambda tokens, dtype: np.array(tokens, np.dtype(dtype).newbyteorder())],
    "rows": [lambda tokens, dtype: np.array(tokens, dtype)[:, None] + np.zeros((1, 3), dtype)],
}


def in_python(collate, samples):
    """What the function makes without the compiled part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "_copy_sequences", None)
        return collate(samples)


@given(
    data=st.data(),
    lists=BATCHES.filter(any),
    kind=st.sampled_from([*KINDS]),
    dtype=st.sampled_from([np.int64, np.int32, np.uint8, np.bool_, np.float32, np.float64]),
    collate=st.builds(
        Pad,
        value=st.sampled_from([0, -3, 2.5, -0.0]),
        side=st.sampled_from(["right", "left"]),
        multiple_of=st.sampled_from([None, 8]),
        max_length=st.sampled_from([None, 1, 40]),
        with_mask=st.booleans(),
    )
    | st.builds(Pack, separator=st.none(), fixed_tokens=st.sampled_from([None, 999])),
)
def test_the_compiled_part_makes_the_batches_of_python(data, lists, kind, dtype, collate):
    assume(dtype is not np.uint8 or getattr(collate, "value", 0) >= 0)  # refused: it does not fit
    makes = data.draw(st.lists(st.sampled_from(KINDS[kind]), min_size=len(lists)))
    samples = [make(tokens, dtype) for make, tokens in zip(makes, lists, strict=False)]
    assert_same(collate(samples), in_python(collate, samples))


@pytest.mark.parametrize("value", [0, -100])
def test_what_is_between_samples_is_filled_or_left(value):
    memory = np.full(12, 7)
    item = np.array([value]) if value else b""
    starts, counts = np.array([1, 4]), np.array([2, 3])
    address = memory[1:].ctypes.data
    assert copy(address, 10, 8, [[1, 2], np.array([3, 4, 5, 6])], starts, counts, item)
    gap = value or 7
    assert memory.tolist() == [7, gap, 1, 2, gap, 3, 4, 5, gap, gap, gap, 7]


@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([-1, 2], [1, 1]),
        ([0, 1], [2, 1]),
        ([2, 0], [1, 1]),
        ([0, 3], [1, 2]),
        ([0, 5], [1, 0]),
        ([0, 2], [1, -1]),
        ([0, 2], [1, 2**63 - 1]),
        ([0, 2**63 - 1], [1, 1]),
        ([0], [1]),
        ([0, 1, 2], [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("samples", [[[5] * 9, [6] * 9], [np.full(9, 5), np.full(9, 6)]])
def test_nothing_is_written_outside_of_the_target(starts, counts, samples):
    memory = np.full(12, 7)
    before = [sys.getrefcount(each) for each in samples]
    with pytest.raises(ValueError, match="sequences overlap, or do not lie inside of the target"):
        copy(
            memory[4:].ctypes.data, 4, 8, samples,
            np.array(starts), np.array(counts), np.array([1]),
        )  # fmt: skip
    assert [sys.getrefcount(each) for each in samples] == before
    assert (memory[:4] == 7).all()
    assert (memory[8:] == 7).all()


@pytest.mark.parametrize("row_bytes", [0, -8])
def test_rows_have_bytes(row_bytes):
    with pytest.raises(ValueError, match="inside of the target"):
        copy(0, 0, row_bytes, [], b"", b"", b"")


@pytest.mark.parametrize(
    "sample",
    [
        [1, 2.5],
        [1, 2**63],
        [1, -(2**63) - 1],
        [1, True],
        [1],
        (1, 2),
        object(),
        np.arange(1),
        np.arange(4)[::2],
        np.arange(3, dtype=np.int32),
        torch.arange(2),
    ],
)
def test_other_samples_are_left_to_python(sample):
    memory = np.full(4, 7)
    given = sample, np.array([0, 1]), np.array([1, 2]), np.array([3])
    before = [*map(sys.getrefcount, given)]
    assert not copy(memory.ctypes.data, 3, 8, [[1], sample], *given[1:])
    assert [*map(sys.getrefcount, given)] == before
    assert memory[3] == 7


def test_ints_need_eight_bytes():
    memory = np.zeros(4, np.int32)
    assert not copy(memory.ctypes.data, 4, 4, [[1, 2]], np.array([0]), np.array([2]), b"")
    assert not memory.any()


def test_the_least_and_the_largest_ints_are_copied():
    ints = [-(2**63), -1, 0, 2**63 - 1]
    assert Pad()([ints]).tolist() == [ints]


def test_the_compiled_part_is_used(monkeypatch):
    calls = []
    monkeypatch.setattr(sequences, "_copy_sequences", lambda *given: calls.append(given) or True)
    for samples in ([[1]], [np.arange(2)]):
        Pad()(samples)
        Pack(separator=None)(samples)
    assert len(calls) == 4
    Pack(separator=None)([np.arange(2, dtype=np.int32)])  # converted
    assert len(calls) == 4
