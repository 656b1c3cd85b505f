"""Numbers and flags as users give them."""

import numpy as np
import pytest
import torch

from shmloader.sampling.checks import flag, whole_number


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_a_whole_number_is_an_int_afterwards(value):
    number = whole_number(value, "some", minimum=3)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize(
    "value", [None, True, np.True_, 3.0, np.float32(3), "3", [3], torch.tensor(3)]
)
def test_what_is_no_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match="some option should be an int, but got some=") as caught:
        whole_number(value, "some", minimum=0)
    assert repr(value) in str(caught.value)


def test_the_bounds_are_told():
    assert whole_number(1, "some", minimum=1, below=2) == 1
    with pytest.raises(ValueError, match=r"some option should be 1 or more, but got some=0$"):
        whole_number(0, "some", minimum=1, below=2)
    with pytest.raises(ValueError, match=r"some option should be below 2, but got some=2$"):
        whole_number(2, "some", minimum=1, below=2)


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_itself(value):
    assert flag(value, "some") is value


@pytest.mark.parametrize("value", [None, 0, 1, "True", np.True_, torch.tensor(True)])
def test_what_is_neither_true_nor_false_is_a_type_error(value):
    with pytest.raises(TypeError, match="some option should be True or False, but") as caught:
        flag(value, "some")
    assert f"got some={value!r}" in str(caught.value)
