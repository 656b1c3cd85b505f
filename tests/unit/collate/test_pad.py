"""Padded and jagged batches, and what torch and transformers make of the same samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from shmloader.collate import Fields, Jagged, Pad, Ragged, Stack
from tests.parity.compare import assert_same
from tests.unit.collate.support import BATCHES, KINDS, as_kind, ragged, tokenizer

DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16)


@given(lists=BATCHES, kind=st.sampled_from(KINDS), side=st.sampled_from(["right", "left"]))
def test_a_padded_batch_is_that_of_pad_sequence(lists, kind, side):
    expected = pad_sequence(as_kind(lists, "tensor"), True, -3, side)
    assert_same(Pad(-3, side)(as_kind(lists, kind)), expected)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    tail=st.sampled_from([(), (2,), (2, 3), (0,)]),
    dtype=st.sampled_from(DTYPES),
    side=st.sampled_from(["right", "left"]),
)
def test_elements_of_any_dtype_and_shape_are_padded_as_by_pad_sequence(lengths, tail, dtype, side):
    samples = [torch.arange(1.0, n + 1).to(dtype) for n in lengths]
    samples = [each.reshape(-1, *[1] * len(tail)).expand(-1, *tail).clone() for each in samples]
    expected = pad_sequence(samples, True, 1, side)
    assert_same(Pad(1, side)(samples), expected)
    if dtype is not torch.bfloat16:
        arrays = [each.numpy() for each in samples]
        assert_same(Pad(1, side)(arrays), expected)
        assert_same(Pad(1, side)(ragged(arrays)), expected)


@given(
    lists=BATCHES.filter(any),
    kind=st.sampled_from(KINDS),
    side=st.sampled_from(["right", "left"]),
    multiple_of=st.sampled_from([None, 1, 8]),
)
def test_a_batch_of_dicts_is_that_of_transformers(lists, kind, side, multiple_of):
    from transformers import DataCollatorWithPadding

    theirs = DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=multiple_of)
    samples = [{"input_ids": each, "label": n} for n, each in enumerate(lists)]
    expected = theirs(samples)
    ours = Fields(input_ids=Pad(0, side, multiple_of, with_mask=True), labels=Stack())
    column = as_kind(lists, kind)
    samples = [{"input_ids": each, "labels": n} for n, each in enumerate(column)]
    assert_same(ours(samples), dict(expected))


def test_a_batch_of_one_shape_is_cut_and_filled_to_its_length():
    pad = Pad(9, multiple_of=4, max_length=4, with_mask=True, with_lengths=True)
    for samples in ([[1], [1, 2, 3, 4, 5]], [np.array([1]), np.arange(1, 6)]):
        padded, mask, lengths = pad(samples)
        assert padded.tolist() == [[1, 9, 9, 9], [1, 2, 3, 4]]
        assert mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
        assert lengths.tolist() == [1, 4]
    assert Pad(multiple_of=4)([[1]]).shape == (1, 4)
    left = Pad(9, "left", max_length=2, with_mask=True)([[1], [1, 2, 3]])
    assert [each.tolist() for each in left] == [[[9, 1], [1, 2]], [[0, 1], [1, 1]]]


def test_the_mask_and_the_lengths_are_named_after_their_field():
    batch = Fields(input_ids=Pad(with_mask=True, with_lengths=True), pixels=Pad(with_mask=True))(
        [{"input_ids": [1], "pixels": [0.5]}, {"input_ids": [1, 2], "pixels": []}]
    )
    assert {key: part.tolist() for key, part in batch.items()} == {
        "input_ids": [[1, 0], [1, 2]],
        "attention_mask": [[1, 0], [1, 1]],
        "input_ids_lengths": [1, 2],
        "pixels": [[0.5], [0.0]],
        "pixels_mask": [[1], [0]],
    }


@pytest.mark.parametrize("length", [1, 200])
def test_numbers_too_large_for_a_float_are_infinite_without_a_warning(length):
    slices = Ragged(np.full(length, 1e300), [0], [length], np.float32)
    assert Pad()(slices).isinf().all()


def test_slices_of_an_array_are_converted():
    values = np.arange(200, dtype=np.int32)
    for lengths in ([150, 100], [3, 2]):  # by slices, and by indices
        column = Ragged(values, [10, 20], lengths, np.int64)
        assert_same(Pad()(column), pad_sequence([torch.from_numpy(each) for each in column], True))


@given(lists=BATCHES, kind=st.sampled_from(KINDS))
def test_a_jagged_batch_is_torchs_nested_tensor(lists, kind):
    expected = torch.nested.nested_tensor(as_kind(lists, "tensor"), layout=torch.jagged)
    ours = Jagged()(as_kind(lists, kind))
    assert_same(ours, expected)
    assert ours.layout is torch.jagged
    assert_same(ours.offsets(), expected.offsets())
    assert ours.is_contiguous()
    assert (ours._max_seqlen, ours._min_seqlen) == (expected._max_seqlen, expected._min_seqlen)


BAD = [
    ([[1], [1, 2.5]], r"sample 1 of the batch begins with an int, but not all"),
    ([[1], [2**63]], r"sample 1 of the batch begins with an int, but not all its items are ints"),
    ([[1], "text"], r"sample 1 of the batch is a str, but should be a tensor"),
    ([{"a": [1]}], r"sample 0 of the batch is a dict with the keys \['a'\].*Fields has a function"),
    ([[1], None], r"sample 1 of the batch is a NoneType"),
    ([torch.tensor([1]), torch.tensor(1)], r"sample 1 of the batch is a number, but should have a"),
    (
        [torch.zeros(2), torch.zeros(2, 3)],
        r"sample 1 .* is a float32 Tensor of shape \[2, 3\], but sample 0 is a float32 Tensor of",
    ),
    (
        [np.zeros((1, 2)), np.zeros((1, 3))],
        r"sample 1 .* is a float64 ndarray of shape \[1, 3\], but sample 0 is a float64 ndarray of",
    ),
    (
        [np.zeros(2), np.zeros(2, np.int64), np.zeros(2, np.int8)],
        r"sample 1 of the batch is an int64 ndarray of shape \[2\], but sample 0 is a float64",
    ),
    ([np.array(["a"])], r"sample 0 of the batch has the dtype <U1, which torch lacks"),
]


@pytest.mark.parametrize(("samples", "text"), BAD)
def test_samples_that_cannot_be_joined_are_named(samples, text):
    for collate in (Pad(), Jagged()):
        with pytest.raises(ValueError, match=text):
            collate(samples)
    with pytest.raises(ValueError, match="field 'x': " + text):
        Fields(x=Pad())([{"x": each} for each in samples])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"value": "x"}, "value should be a number, but is 'x'"),
        ({"side": "top"}, 'side should be "right" or "left", but is \'top\''),
        ({"multiple_of": 0}, "multiple_of should be a positive int or None, but is 0"),
        ({"max_length": 1.5}, "max_length should be a positive int or None, but is 1.5"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    with pytest.raises(TypeError if "value" in arguments else ValueError, match=text):
        Pad(**arguments)


@pytest.mark.parametrize(("dtype", "value"), [(torch.uint8, -100), (torch.int8, 128)])
def test_a_value_that_the_samples_cannot_have_is_refused(dtype, value):
    samples = [torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype)]
    with pytest.raises(ValueError, match=f"'x': samples of {str(dtype)[6:]} cannot .* {value}"):
        Fields(x=Pad(value))([{"x": each} for each in samples])
    assert Pad(value)(samples[:1]).tolist() == [[1, 1]]  # nothing is padded


@pytest.mark.parametrize("kind", [Pad, Jagged])
def test_a_sample_that_requires_a_gradient_is_refused(kind):
    samples = [torch.ones(2), torch.ones(3, requires_grad=True)]
    with pytest.raises(ValueError, match=r"sample 1 of the batch requires a gradient.*detach"):
        kind()(samples)
