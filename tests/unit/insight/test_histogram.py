"""Percentiles in little memory."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.insight.histogram import Histogram

DURATIONS = st.lists(st.integers(0, 10**13), min_size=1, max_size=200)


def noted(durations: list[int]) -> Histogram:
    histogram = Histogram()
    histogram.note(*durations)
    return histogram


@given(DURATIONS, st.sampled_from([50, 90, 99, 100]))
def test_a_percentile_is_right_to_seven_per_cent(durations, percent) -> None:
    exact = sorted(durations)[math.ceil(len(durations) * percent / 100) - 1]
    found = noted(durations).percentile(percent)
    assert abs(found - exact) <= 0.07 * exact


@given(DURATIONS, DURATIONS)
def test_added_histograms_are_those_of_all_durations(some, others) -> None:
    both, together = noted(some), noted(some + others)
    both.add(noted(others))
    assert (both.count, both.total_ns, both.max_ns) == (
        together.count,
        together.total_ns,
        together.max_ns,
    )
    for percent in (50, 90, 99):
        assert both.percentile(percent) == together.percentile(percent)


def test_a_histogram_of_like_durations_does_not_grow() -> None:
    histogram = noted([10**6])
    before = len(pickle.dumps(histogram))
    for duration in range(10**6, 2 * 10**6, 100):
        histogram.note(duration)
    assert len(pickle.dumps(histogram)) < before + 100


def test_an_empty_histogram_has_a_percentile_of_zero() -> None:
    assert Histogram().percentile(99) == 0


@pytest.mark.parametrize("duration", [0, 1, 7, 8, 2**62])
def test_the_longest_is_exact(duration) -> None:
    assert noted([duration]).percentile(100) <= duration
    assert noted([duration]).max_ns == duration
