"""A shuffled order: a permutation, evenly spread, the same everywhere."""

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
from shmloader.sampling.indices import Permutation

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
