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


def test_all_epochs_are_alike():
    sampler = IntervalSampler(5, 2)
    assert [list(sampler), list(sampler)] == [[0, 2, 4, 1, 3]] * 2


def test_two_iterators_do_not_disturb_each_other():
    sampler = IntervalSampler(5, 2)
    assert list(zip(sampler, sampler, strict=True)) == [(index, index) for index in sampler]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((-1, 2), ValueError, "length should be 0 or more, but got length=-1"),
        (("5", 2), TypeError, "length should be an int, but got length='5'"),
        ((5, 0), ValueError, "interval should be 1 or more, but got interval=0"),
        ((5, True), TypeError, "interval should be an int, but got interval=True"),
        ((5, 2, 1), TypeError, "rollover should be True or False, but got rollover=1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, kind, text):
    with pytest.raises(kind, match=f"^{text}$"):
        IntervalSampler(*arguments)
