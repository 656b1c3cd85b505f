"""Steps of an order come as arrays, or as lists of the same indices."""

import pytest

from shmloader.sampling.indices import IndexArray, as_list
from shmloader.sampling.steps import Cut, Order, OrderSteps


@pytest.mark.parametrize("last_batch", ["pad", "keep", "discard", "rollover"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [3, 24, 29])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("carried", [[], [2, 1, 0]])
def test_arrays_and_ranges_hold_the_indices_of_the_lists(
    last_batch, shuffle, length, rank, carried
) -> None:
    found = []
    for as_arrays in (False, True):
        order = Order(length, 7, 1, is_shuffled=shuffle, carried=carried)
        steps = OrderSteps(order, Cut(4, rank, 2), last_batch)
        steps.as_arrays = as_arrays
        drawn = list(steps)
        assert {type(step) for step in drawn} <= ({range, IndexArray} if as_arrays else {list})
        found.append(([*map(as_list, drawn)], steps.left_over, steps.repeats))
    assert found[0] == found[1]


def test_an_order_without_shuffling_comes_as_ranges_until_it_wraps_around() -> None:
    steps = OrderSteps(Order(10, is_shuffled=False), Cut(4), "pad")
    steps.as_arrays = True
    *full, last = steps
    assert full == [range(4), range(4, 8)]
    assert last.tolist() == [8, 9, 0, 1]
