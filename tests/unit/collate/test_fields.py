"""Fields of dicts and tuples, each by a function of its own."""

from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from shmloader.collate import AsList, Fields, Jagged, Pack, Pad, Ragged, RaggedBatch, Stack
from tests.parity.compare import assert_same

SAMPLES = [
    {"input_ids": [1, 2], "labels": [3], "id": 7, "text": "a", "left": "out"},
    {"input_ids": [4], "labels": [5, 6], "id": 8, "text": "b"},
]
EXPECTED = {
    "input_ids": torch.tensor([[1, 2], [4, 0]]),
    "labels": torch.tensor([[3, -100], [5, 6]]),
    "id": torch.tensor([7, 8]),
    "text": ["a", "b"],
    "count": 2,
}
BY_KEY = {"input_ids": Pad(0), "labels": Pad(-100), "id": Stack(), "text": AsList()}


def count_texts(texts):
    assert type(texts) is list
    return len(texts)


def with_count(samples):
    return [{**sample, "count": sample["text"]} for sample in samples]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_dicts_are_collated_by_key(kind):
    collate = Fields(**BY_KEY, count=count_texts)
    assert_same(collate([kind(sample) for sample in with_count(SAMPLES)]), EXPECTED)


def test_a_batch_of_columns_is_collated_by_key():
    batch = RaggedBatch({
        "input_ids": Ragged(np.array([4, 1, 2]), [1, 0], [2, 1]),
        "labels": Ragged(np.array([3, 5, 6]), [0, 1], [1, 2], as_item=np.ndarray.tolist),
        "id": np.array([7, 8]),
        "text": ["a", "b"],
        "count": ("a", "b"),
    })  # fmt: skip
    assert_same(Fields(**BY_KEY, count=count_texts)(batch), EXPECTED)
    assert Fields(labels=AsList())(batch) == {"labels": [[3], [5, 6]]}


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_are_collated_by_position(kind):
    samples = [kind(sample[key] for key in BY_KEY) for sample in SAMPLES]
    expected = [EXPECTED[key] for key in BY_KEY]
    assert_same(Fields(*BY_KEY.values())(samples), expected)


def test_functions_nest():
    samples = [{"text": ([1, 2], 0)}, {"text": ([3], 1)}]
    batch = Fields(text=Fields(Pack(), Stack()))(samples)
    assert_same(batch, {"text": [Pack()([[1, 2], [3]]), torch.tensor([0, 1])]})
    with pytest.raises(ValueError, match=r"field 'text': sample 1 of the batch is an int"):
        Fields(text=Fields(Pack(), Stack()))([{"text": ([1], 0)}, {"text": 3}])


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2],
        [0.5, 1.5],
        [torch.ones(2), torch.zeros(2)],
        [np.ones(2), np.zeros(2)],
        ["a", "b"],
        [(1, "a"), (2, "b")],
    ],
)
def test_stack_is_default_collate(samples):
    assert_same(Stack()(samples), default_collate(samples))


@pytest.mark.parametrize("rows", [np.arange(6).reshape(3, 2), torch.arange(3.0)])
def test_columns_are_stacked_as_their_items_are(rows):
    assert_same(Stack()(rows), default_collate(list(rows)))


@pytest.mark.parametrize(
    ("collate", "samples", "text"),
    [
        (
            Fields(x=Stack()),
            [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
            r"field 'x': sample 1 of the batch is a float32 Tensor of shape \[3\], but sample 0 is",
        ),
        (Fields(x=Stack()), [{"x": None}], "field 'x': sample 0 of the batch cannot be stacked: "),
        (
            Fields(x=Pad()),
            [{"x": [1]}, {"y": 1}],
            r"sample 1 of the batch has no key 'x', but \['y",
        ),
        (Fields(x=Pad()), [{"x": [1]}, [1]], "sample 1 of the batch is a list of length 1, but sh"),
        (
            Fields(Pad()),
            [([1],), ([1], 2)],
            "sample 1 .* is a tuple of length 2, but .* of 1 item",
        ),
        (
            Fields(Pad()),
            [{"x": 1}],
            r"sample 0 .* is a dict with the keys \['x'\], but should be a",
        ),
    ],
)
def test_samples_without_these_fields_are_named(collate, samples, text):
    with pytest.raises(ValueError, match=text):
        collate(samples)


def test_an_error_of_the_users_function_stays_as_it_is():
    def fail(samples):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Fields(x=fail)([{"x": 1}])


def test_bad_functions_are_refused():
    with pytest.raises(ValueError, match=r"by key, for dicts, or by position"):
        Fields()
    with pytest.raises(ValueError, match=r"by key, for dicts, or by position"):
        Fields(Pad(), x=Pad())
    with pytest.raises(TypeError, match=r"field 'x' should have a function, but has 3"):
        Fields(x=3)


def test_a_field_may_have_any_name():
    assert Fields(self=Stack(), samples=Stack())([{"self": 1, "samples": 2}]).keys() == {
        "self", "samples",
    }  # fmt: skip


class Untouched(RaggedBatch):
    """A batch by fields that makes no samples."""

    def __iter__(self):
        raise AssertionError

    def __getitem__(self, number):
        raise AssertionError


class UntouchedColumn(Ragged):
    """A field that makes no samples."""

    def __getitem__(self, number):
        raise AssertionError


@pytest.mark.parametrize("lengths", [[3, 2], [300, 200]])
def test_no_object_is_made_of_a_sample_of_columns(lengths):
    column = UntouchedColumn(np.arange(600), [0, 300], lengths)
    batch = Untouched({"input_ids": column, "id": np.array([7, 8])})
    assert Pack()(batch)["cu_seq_lens_q"].tolist() == [0, lengths[0], sum(lengths)]
    made = Fields(input_ids=Pad(), id=Stack())(batch)
    assert_same(made["id"], torch.tensor([7, 8]))
    assert made["input_ids"].shape == (2, lengths[0])


@pytest.mark.parametrize(
    "collate", [Stack(), Pad(), Pack(), Jagged(), Fields(Pad()), Fields(x=Pad())]
)
def test_a_batch_without_samples_is_refused(collate):
    with pytest.raises(ValueError, match="a batch without samples"):
        collate([])


# Samples that are slices of one array --------------------------------------------------------

VALUES = np.arange(10, dtype=np.int32)


def test_samples_are_views_of_the_values():
    ragged = Ragged(VALUES, [6, 0, 3], [4, 2, 0])
    assert len(ragged) == 3
    assert [sample.tolist() for sample in ragged] == [[6, 7, 8, 9], [0, 1], []]
    assert np.shares_memory(ragged[0], VALUES)
    assert ragged[-1].dtype == np.int32
    with pytest.raises(IndexError):
        ragged[3]


def test_samples_are_converted_as_ordinary_code_wants_them():
    ragged = Ragged(VALUES, [1, 4], [2, 3], np.int64, torch.from_numpy)
    assert ragged[1].dtype == torch.int64
    assert ragged[1].tolist() == [4, 5, 6]
    assert ragged[1:][0].tolist() == [4, 5, 6]


def test_values_may_be_a_list():
    assert Ragged([5, 6, 7], [1], [2])[0].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("starts", "lengths", "error", "text"),
    [
        ([0, 8], [2, 3], IndexError, "sample 1 begins at 8 and has the length 3"),
        ([0, -1], [2, 1], IndexError, "sample 1 begins at -1"),
        ([0], [-1], IndexError, "sample 0 begins at 0 and has the length -1"),
        ([2**63 - 1], [5], IndexError, "sample 0 begins at 9223372036854775807"),
        ([0, 1], [1], ValueError, "as many starts as lengths"),
    ],
)
def test_samples_outside_of_the_values_are_refused(starts, lengths, error, text):
    with pytest.raises(error, match=text):
        Ragged(VALUES, starts, lengths)


def test_a_batch_of_fields_is_a_sequence_of_dicts():
    fields = {
        "input_ids": Ragged(VALUES, [0, 5], [2, 1], as_item=np.ndarray.tolist),
        "score": torch.tensor([0.5, 1.5]),
        "text": ["a", "b"],
    }
    batch = RaggedBatch(fields)
    expected = [
        {"input_ids": [0, 1], "score": torch.tensor(0.5), "text": "a"},
        {"input_ids": [5], "score": torch.tensor(1.5), "text": "b"},
    ]
    assert len(batch) == 2
    assert list(batch) == [batch[0], batch[1]] == expected
    assert list(batch[1:]) == expected[1:]
    assert batch[-1] == expected[1]


def test_fields_of_different_numbers_of_samples_are_refused():
    with pytest.raises(ValueError, match=r"one number of samples, but they have \{'a': 1, 'b': 2"):
        RaggedBatch({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match=r"they have \{\}"):
        RaggedBatch({})
