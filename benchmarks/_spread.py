"""Formats figures: the median, with the least and the most."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def with_spread(values: Sequence[float], spec: str) -> str:
    """Return the median, with least and most in brackets.

    Args:
        values: One value for each run, or each round.
        spec: Format of a value, as ``format`` takes it.
    """
    return f"{statistics.median(values):{spec}} ({min(values):{spec}}–{max(values):{spec}})"


def with_spread_if_any(values: Sequence[float], spec: str) -> str:
    """Return the same, but without brackets if least and most have the same text."""
    low, high = format(min(values), spec), format(max(values), spec)
    return low if low == high else with_spread(values, spec)
