"""Fields of a batch whose samples are slices of one array."""

import numpy as np
import pytest
import torch

from shmloader.collate import Ragged, RaggedBatch

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
