"""Checks of arguments. Errors contain the argument's name and its value."""

import reprlib
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch


def whole_number(value: object, name: str, *, minimum: int, below: int | None = None) -> int:
    """Check an integer argument and return it as an int.

    Args:
        value: The argument: an int or a numpy integer, but not a bool.
        name: Name of the argument.
        minimum: The smallest value allowed.
        below: The value must be smaller than this; None for no bound.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is out of bounds.
    """
    got = f"but got {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} should be an int, {got}")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} should be {minimum} or more, {got}")
    if below is not None and number >= below:
        raise ValueError(f"{name} should be below {below}, {got}")
    return number


def flag(value: object, name: str) -> bool:
    """Check a bool argument and return it.

    Raises:
        TypeError: If it is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} should be True or False, but got {name}={value!r}")
    return value


def non_negatives(values: object, name: str) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Check an argument that is a 1-d sequence of finite numbers, none of them negative.

    Args:
        values: The argument: a sequence, numpy array or tensor of ints or floats.
        name: Name of the argument.

    Returns:
        A read-only copy, int64 if the values are ints that fit, else float64.

    Raises:
        TypeError: If the values are not numbers.
        ValueError: If the values do not have one dimension, or one is negative, infinite or NaN.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # such as rows of different lengths
        raise _no_numbers(values, name) from error
    if array.dtype.kind not in "iuf":
        raise _no_numbers(values, name)
    if array.ndim != 1:
        raise ValueError(f"{name} should have one dimension, but got {name} of shape {array.shape}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"{name} should have no negative or infinite numbers and no NaN, "
            f"but got {name}[{first}]={array[first]}"
        )
    is_int = array.dtype.kind in "iu" and not (array > np.iinfo(np.int64).max).any()
    # astype() makes a copy even if the dtype stays the same.
    checked = array.astype(np.int64) if is_int else array.astype(np.float64)
    checked.flags.writeable = False
    return checked


def _no_numbers(values: object, name: str) -> TypeError:
    return TypeError(
        f"{name} should be a sequence of ints or floats, but got {name}={reprlib.repr(values)}"
    )
