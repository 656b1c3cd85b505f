"""Indices at a regular distance."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.sampling.samplers import IntervalSampler


@pytest.mark.parametrize(
    ("length", "interval", "runs"),
    [
        (10, 4, [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
        (6, 3, [[0, 3], [1, 4], [2, 5]]),
        (3, 1, [[0, 1, 2]]),
        (3, 3, [[0], [1], [2]]),
        (3, 10**12, [[0], [1], [2]]),
        (1, 1, [[0]]),
        (0, 2, []),
    ],
)
def test_runs_follow_one_another(length, interval, runs):
    assert list(IntervalSampler(length, interval)) == list(itertools.chain(*runs))
    alone = IntervalSampler(length, interval, rollover=False)
    assert list(alone) == list(itertools.chain(*runs[:1]))


@given(st.integers(0, 80), st.integers(1, 100), st.booleans())
@settings(derandomize=True)
def test_the_length_is_what_comes(length, interval, rollover):
    sampler = IntervalSampler(length, interval, rollover)
    assert len(sampler) == len(list(sampler))


@given(st.integers(0, 80), st.integers(1, 100))
@settings(derandomize=True)
def test_with_rollover_each_index_comes_once(length, interval):
    assert sorted(IntervalSampler(length, interval)) == list(range(length))
