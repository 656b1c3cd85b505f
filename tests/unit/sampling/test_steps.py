"""Steps of an order as arrays or lists, and how far an epoch has come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.sampling.indices import IndexArray, Permutation, as_list
from shmloader.sampling.progress import Progress
from shmloader.sampling.steps import Cut, OrderSteps


@pytest.mark.parametrize("last_batch", ["pad", "keep", "discard"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [3, 24, 29])
@pytest.mark.parametrize("rank", [0, 1])
def test_arrays_and_ranges_hold_the_indices_of_the_lists(last_batch, shuffle, length, rank) -> None:
    found = []
    for as_arrays in (False, True):
        order = Permutation(length, 7, 1) if shuffle else None
        steps = OrderSteps(length, order, Cut(4, rank, 2), last_batch)
        steps.as_arrays = as_arrays
        drawn = list(steps)
        assert {type(step) for step in drawn} <= ({range, IndexArray} if as_arrays else {list})
        found.append(([*map(as_list, drawn)], steps.repeats))
    assert found[0] == found[1]


def test_an_order_without_shuffling_comes_as_ranges_until_it_wraps_around() -> None:
    steps = OrderSteps(10, None, Cut(4), "pad")
    steps.as_arrays = True
    *full, last = steps
    assert full == [range(4), range(4, 8)]
    assert last.tolist() == [8, 9, 0, 1]


def done_of(progress):
    ahead = itertools.chain.from_iterable(range(*run) for run in progress.ahead)
    return {*range(progress.position), *ahead}


@given(st.data())
def test_what_is_done_is_known_over_any_number_of_resumes(data):
    unit = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(0, 20)) * unit
    progress = Progress(unit=unit)
    expected: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        # What is drawn after a resume: all that is not done, in order.
        numbers = range(0, count, unit)
        drawn = list(progress.left_to_do(iter(numbers[progress.start // unit :])))
        assert drawn == [number for number in numbers if number not in expected]
        order = data.draw(st.permutations(range(len(drawn))))
        for seq in order[: data.draw(st.integers(0, len(drawn)))]:
            mark, before = (progress.position, progress.ahead), done_of(progress)
            progress.done(seq)
            progress.go_back(mark)
            assert done_of(progress) == before
            progress.done(seq)
            expected |= {*range(drawn[seq], drawn[seq] + unit)}
            assert done_of(progress) == expected
            assert progress.position not in {first for first, _ in progress.ahead}
        progress = Progress.load(progress.dump(), unit)


@given(st.sets(st.integers(1, 12)))
def test_in_order_what_was_given_ahead_is_passed_over(given_before):
    progress = Progress(0, tuple((number, number + 1) for number in sorted(given_before)))
    drawn = [number for number in range(14) if number not in given_before]
    for seq, number in enumerate(drawn):
        progress.done_until(seq)
        assert done_of(progress) == given_before | set(drawn[: seq + 1])
        assert progress.position > number


def test_one_late_ticket_costs_the_others_nothing():
    progress = Progress()
    for seq in range(1, 200_000):  # seconds, and not hours
        progress.done(seq)
    assert progress.ahead == ((1, 200_000),)
    again = Progress.load(progress.dump())
    for seq in range(1000):
        again.done_until(seq)
    assert again.position == 200_999
