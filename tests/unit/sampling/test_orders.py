"""Orders: permutations that are the same everywhere, their steps, and how far an epoch has come."""

import collections
import itertools
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.sampling import indices
from shmloader.sampling.indices import IndexArray, Permutation, as_list
from shmloader.sampling.progress import Progress
from shmloader.sampling.steps import Cut, OrderSteps

KNOWN_SORTED = [7, 3, 1, 2, 6, 8, 0, 5, 4, 9]
KNOWN_COMPUTED = [271114896, 865706976, 416857383, 665275945, 45467214]


def whole(length: int, *key: int) -> list[int]:
    return Permutation(length, *key).at(np.arange(length)).tolist()


@pytest.fixture(params=["sorted", "computed"])
def way(request, monkeypatch) -> str:
    """Both ways of making it, whatever the length."""
    if request.param == "computed":
        monkeypatch.setattr(indices, "_SORTED", 1)
    return request.param


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_each_number_comes_once(way, length) -> None:
    assert sorted(whole(length, 3, 1)) == list(range(length))


def test_long_orders_are_computed_and_short_ones_sorted() -> None:
    assert Permutation(indices._SORTED)._order is not None
    length = indices._SORTED + 1
    assert Permutation(length)._order is None
    assert sorted(whole(length, 1)) == list(range(length))


@given(st.data())
def test_any_part_is_that_of_the_whole(data) -> None:
    length = data.draw(st.integers(1, 300))
    order = Permutation(length, 5)
    positions = data.draw(st.lists(st.integers(0, length - 1)))
    found = order.at(np.array(positions, dtype=np.int64))
    assert found.tolist() == [whole(length, 5)[position] for position in positions]
    assert found.dtype == np.int64


def test_length_seed_and_epoch_choose_the_order(way) -> None:
    orders = {tuple(whole(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert whole(50, 1, 2) == whole(50, 1, 2)
    assert whole(51, 1, 2)[:50] != whole(50, 1, 2)


def test_short_orders_are_all_equally_likely() -> None:
    count = 12_000
    seen = collections.Counter(tuple(whole(4, seed)) for seed in range(count))
    mean = count / 24
    chi_squared = sum(
        (seen[order] - mean) ** 2 / mean for order in itertools.permutations(range(4))
    )
    assert chi_squared < 49.7  # one in a thousand of random ones is above


@pytest.mark.sampled(1)
def test_every_number_is_equally_likely_everywhere_and_after_every_other(way) -> None:
    length, count = 30, 3000
    at, after = np.zeros((length, length)), np.zeros((length, length))
    for seed in range(count):
        order = whole(length, seed)
        at[range(length), order] += 1
        after[order[:-1], order[1:]] += 1
    mean = count / length
    # Means of the chi-squared distributions are 841 and 840; 987 is one in a thousand.
    assert ((at - mean) ** 2 / mean).sum() < 987
    mean = count * (length - 1) / (length * (length - 1))
    apart = after[~np.eye(length, dtype=bool)]
    assert ((apart - mean) ** 2 / mean).sum() < 987


@pytest.mark.slow
def test_every_process_and_machine_has_this_order() -> None:
    # Written down once: another order would make runs that are resumed go on elsewhere.
    assert whole(10, 0, 0) == KNOWN_SORTED
    assert Permutation(10**9, 0, 0).at(np.arange(5)).tolist() == KNOWN_COMPUTED
    program = (
        "from shmloader.sampling.indices import Permutation; import numpy;"
        "print(Permutation(10, 0, 0).at(numpy.arange(10)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(KNOWN_SORTED)


def test_a_hundred_million_take_no_memory() -> None:
    tracemalloc.start()
    try:
        order = Permutation(100_000_000, 7)
        order.at(np.arange(50_000_000, 50_008_192))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


# Steps of an order as arrays or lists, and how far an epoch has come ---------------------------


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
