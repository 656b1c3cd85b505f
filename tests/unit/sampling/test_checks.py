"""Numbers, sequences of them and flags as users give them."""

import re

import numpy as np
import pytest
import torch

from shmloader.sampling.arguments import flag, non_negatives, whole_number


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_a_whole_number_is_an_int_afterwards(value):
    number = whole_number(value, "some", minimum=3)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize(
    "value", [None, np.True_, 3.0, np.float32(3), "3", [3], torch.tensor(3), True]
)
def test_what_is_no_whole_number_or_no_flag_is_a_type_error(value):
    with pytest.raises(TypeError, match=re.escape(f"an int, but got some={value!r}")):
        whole_number(value, "some", minimum=0)
    if value is not True:
        with pytest.raises(TypeError, match=re.escape(f"True or False, but got some={value!r}")):
            flag(value, "some")


def test_the_bounds_are_told_and_a_flag_is_itself():
    assert whole_number(1, "some", minimum=1, below=2) == 1
    with pytest.raises(ValueError, match=r"some should be 1 or more, but got some=0$"):
        whole_number(0, "some", minimum=1, below=2)
    with pytest.raises(ValueError, match=r"some should be below 2, but got some=2$"):
        whole_number(2, "some", minimum=1, below=2)
    assert (flag(True, "some"), flag(False, "some")) == (True, False)
    with pytest.raises(TypeError, match="True or False, but got some=1"):
        flag(1, "some")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 2, 1], np.int64),
        ((0, 2, 1), np.int64),
        (range(3), np.int64),
        (np.array([0, 2, 1], np.uint8), np.int64),
        (np.array([0, 2, 1], np.uint64), np.int64),
        (np.array([2**64 - 1, 0], np.uint64), np.float64),
        ([0, 2.5], np.float64),
        ([np.float32(0.5), np.int64(2)], np.float64),
        (np.array([0, 2.5], np.float16), np.float64),
        (torch.tensor([0, 2, 1], dtype=torch.int16), np.int64),
        (torch.tensor([0, 2.5], dtype=torch.bfloat16, requires_grad=True), np.float64),
        ([], np.float64),
        (torch.tensor([], dtype=torch.int64), np.int64),
    ],
)
def test_numbers_of_any_kind_become_an_array(values, dtype):
    array = non_negatives(values, "some")
    plain = values.tolist() if isinstance(values, torch.Tensor) else values
    assert array.tolist() == [float(value) for value in plain]
    assert array.dtype == dtype


def test_the_array_is_a_copy_that_cannot_be_written_to():
    values = np.array([1, 2])
    array = non_negatives(values, "some")
    values[0] = 9
    assert array.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9


@pytest.mark.parametrize(
    "values",
    [
        None,
        "123",
        ["1", "2"],
        [None],
        [True, False],
        [1j],
        {1, 2},
        iter([1, 2]),
        [[1], [2, 3]],
        [2**64],
        torch.tensor([True]),
        np.array(["2020-01-01"], "datetime64[D]"),
    ],
)
def test_what_are_no_numbers_is_a_type_error(values):
    with pytest.raises(TypeError, match="some should be a sequence of ints or floats, but"):
        non_negatives(values, "some")


@pytest.mark.parametrize(
    ("values", "shape"), [(3, r"\(\)"), ([[1, 2]], r"\(1, 2\)"), (torch.ones(2, 0), r"\(2, 0\)")]
)
def test_other_than_one_dimension_is_refused(values, shape):
    with pytest.raises(ValueError, match=rf"one dimension, but got some of shape {shape}$"):
        non_negatives(values, "some")


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([1, -1, -2], r"some\[1\]=-1"),
        ([0, 1, float("nan")], r"some\[2\]=nan"),
        ([float("inf")], r"some\[0\]=inf"),
        ([1.0, -0.5], r"some\[1\]=-0.5"),
    ],
)
def test_numbers_below_0_or_without_bounds_are_refused(values, got):
    with pytest.raises(ValueError, match=f"some should have no negative .* but got {got}$"):
        non_negatives(values, "some")
