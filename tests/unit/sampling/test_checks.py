"""Numbers, sequences of them and flags as users give them."""

import re

import numpy as np
import pytest
import torch

from shmloader.sampling.arguments import as_numbers, flag, whole_number


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
    "values",
    [
        (0, 2, 1),
        range(3),
        [np.float32(0.5), np.int64(2)],
        np.array([2**64 - 1, 0], np.uint64),
        torch.tensor([0, 2, 1], dtype=torch.int16),
        torch.tensor([0, 2.5], dtype=torch.bfloat16, requires_grad=True),
        [],
    ],
)
def test_numbers_of_any_kind_become_an_array(values):
    plain = values.tolist() if isinstance(values, torch.Tensor) else values
    assert as_numbers(values, "some").tolist() == list(plain)


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
        as_numbers(values, "some")
