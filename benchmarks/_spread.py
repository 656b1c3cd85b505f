"""How figures are told: the median, and the least and the most."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def with_spread(values: Sequence[float], spec: str) -> str:
    """Median, and least and most in brackets.

    Args:
        values: One of each run, or round.
        spec: How ``format`` is to write each.
    """
    return f"{statistics.median(values):{spec}} ({min(values):{spec}}–{max(values):{spec}})"


def with_spread_if_any(values: Sequence[float], spec: str) -> str:
    """The same, without brackets where least and most read alike."""
    low, high = format(min(values), spec), format(max(values), spec)
    return low if low == high else with_spread(values, spec)
