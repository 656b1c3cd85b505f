"""Checks of arguments, called by constructors: a mistake is told at once, with name and value."""

from numbers import Integral


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
