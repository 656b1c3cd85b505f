"""Checks of arguments, called by constructors: a mistake is told at once, with name and value."""

import reprlib
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch


def whole_number(
    value: object, name: str, *, minimum: int, below: int | None = None, kind: str = "option"
) -> int:
    """Check a number that counts or names something.

    Args:
        value: What the user gave; an int or a numpy integer will do, a bool will not.
        name: The argument's name, for the message.
        minimum: The least that it may be.
        below: What it must stay under; None for no bound.
        kind: What ``name`` is the name of.

    Returns:
        The same as an int.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is out of bounds.
    """
    got = f"but got {name}={value!r}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} {kind} should be an int, {got}")
    number = int(value)
    if number < minimum:
        raise ValueError(f"{name} {kind} should be {minimum} or more, {got}")
    if below is not None and number >= below:
        raise ValueError(f"{name} {kind} should be below {below}, {got}")
    return number


def flag(value: object, name: str) -> bool:
    """Check what is either so or not so.

    Args:
        value: What the user gave.
        name: The option's name, for the message.

    Returns:
        The same.

    Raises:
        TypeError: If it is no bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} option should be True or False, but got {name}={value!r}")
    return value


def non_negatives(values: object, name: str) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Check a 1-d sequence of numbers that are finite and not negative.

    Args:
        values: What the user gave: a sequence, a numpy array or a tensor, of ints or floats.
        name: The option's name, for the message.

    Returns:
        A copy that cannot be written to, int64 if the values are ints that fit, else float64.

    Raises:
        TypeError: If these are no numbers.
        ValueError: If there is other than one dimension, or one of them is negative, infinite or
            not a number.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # for one, rows of different lengths
        raise _no_numbers(values, name) from error
    if array.dtype.kind not in "iuf":
        raise _no_numbers(values, name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} option should have one dimension, but got {name} of shape {array.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"{name} option should have no negative or infinite numbers and no NaN, "
            f"but got {name}[{first}]={array[first]}"
        )
    is_int = array.dtype.kind in "iu" and not (array > np.iinfo(np.int64).max).any()
    # A copy also where there is nothing to convert.
    checked = array.astype(np.int64) if is_int else array.astype(np.float64)
    checked.flags.writeable = False
    return checked


def _no_numbers(values: object, name: str) -> TypeError:
    return TypeError(
        f"{name} option should be a sequence of ints or floats, "
        f"but got {name}={reprlib.repr(values)}"
    )
