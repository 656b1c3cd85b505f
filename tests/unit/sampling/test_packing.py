"""Packing by length: exact, within the budget, and each sample once."""

from itertools import chain
from operator import ge, sub, truediv

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.sampling.balancing import GROUP, divide, order_by_cost
from shmloader.sampling.packing import best_fit_decreasing, cut_by_longest, sort

# Few distinct lengths, so that runs and equal spaces are common.
LENGTHS = st.lists(st.tuples(st.integers(1, 24)), max_size=80)
BUDGETS = 16, 8
PAIRS = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 8)), max_size=40)


def batches_of(packing):
    return [part.tolist() for part in np.split(packing.order, packing.ends)[:-1]]


def best_fit_one_by_one(lengths, budgets):
    """Best-fit decreasing as the textbook has it; of several measures, by shares of the budgets."""

    def shares(measures):
        return map(truediv, measures, budgets)

    batches, spaces = [], []
    for row in sorted(range(len(lengths)), key=lambda row: -max(shares(lengths[row]))):
        fitting = [at for at, space in enumerate(spaces) if all(map(ge, space, lengths[row]))]
        at = min(fitting, key=lambda at: sum(shares(spaces[at])), default=len(spaces))
        if at == len(spaces):
            spaces.append(budgets)
            batches.append([])
        spaces[at] = tuple(map(sub, spaces[at], lengths[row]))
        batches[at].append(row)
    return batches


@given(st.tuples(LENGTHS, st.just((24,))) | st.tuples(PAIRS, st.just(BUDGETS)))
@settings(derandomize=True, max_examples=400)
def test_packing_is_best_fit_decreasing_to_the_sample(given):
    lengths, budgets = given
    packing = best_fit_decreasing(np.array(lengths).reshape(-1, len(budgets)), budgets)
    assert batches_of(packing) == best_fit_one_by_one(lengths, budgets)


@pytest.mark.parametrize("budget", [16_384, 70_000])  # of which the first are sorted by radix
def test_a_window_of_log_normal_lengths_is_packed_so_too(budget):
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(5.7, 1.0, 2000), 1, budget).astype(np.int64)
    packing = best_fit_decreasing(lengths[:, None], (budget,))
    assert batches_of(packing) == best_fit_one_by_one(lengths[:, None].tolist(), (budget,))


@given(PAIRS, st.booleans())
@settings(derandomize=True)
def test_padded_batches_keep_the_budget_and_could_take_no_further_sample(pairs, has_one):
    lengths = np.array(pairs, np.int64).reshape(-1, 2)[:, : 1 if has_one else 2]
    budget = BUDGETS[: lengths.shape[1]]
    batches = batches_of(cut_by_longest(lengths, budget))
    assert sorted(chain(*batches)) == list(range(len(pairs)))
    for batch, following in zip(batches, [*batches, []][1:], strict=True):
        assert (lengths[batch].max(axis=0) * len(batch) <= budget).all()
        if following:
            more = [*batch, following[0]]
            assert (lengths[more].max(axis=0) * len(more) > budget).any()


@pytest.mark.parametrize("largest", [5, 70_000])
def test_equal_keys_stay_in_order(largest):
    keys = np.array([largest, 0, 3, 0, largest, 3])
    assert sort(keys).tolist() == [1, 3, 2, 5, 0, 4]


# Orders by cost ----------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 1000), max_size=5 * GROUP),
    st.integers(0, 1000),
    st.none() | st.integers(0, 9),
)
@settings(derandomize=True)
def test_the_batches_of_any_step_are_neighbours_by_cost(costs, first, seed):
    random = None if seed is None else np.random.default_rng(seed)
    costs = np.array([1000.0 * cost + number for number, cost in enumerate(costs)])
    order = order_by_cost(costs, first, random)
    assert sorted(order.tolist()) == list(range(len(costs)))
    ranks = np.argsort(np.argsort(costs))[order]
    for world_size in (1, 2, 4, 8, 16, 32, 64):
        positions = np.arange(first, first + len(costs)) // world_size
        for step in np.unique(positions):
            own = ranks[positions == step]
            if len(own) == world_size:  # a whole step in this window
                assert own.max() - own.min() == world_size - 1, (world_size, step)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=48, max_size=48),
    st.integers(0, 60),
)
@settings(derandomize=True)
def test_batches_are_divided_into_as_many_parts_as_are_wanted(sizes, costs, more):
    numbers = iter(range(48))
    batches = [[next(numbers) for _ in range(size)] for size in sizes]
    parts = divide(batches, dict(enumerate(costs)), len(batches) + more)
    assert len(parts) == min(len(batches) + more, sum(sizes))
    assert all(parts)
    for batch in batches:  # no part has samples of two
        own = [part for part in parts if set(part) <= set(batch)]
        assert sorted(chain(*own)) == batch


def test_the_most_expensive_batch_is_divided_and_evenly():
    costs = dict(enumerate([5.0, 4.0, 3.0, 2.0, 1.0, 9.0]))
    parts = divide([[0, 1, 2, 3], [4], [5]], costs, 4)
    assert parts == [[0, 3], [4], [5], [1, 2]]


def test_orders_differ_from_seed_to_seed():
    costs = np.arange(3.0 * GROUP)
    orders = {tuple(order_by_cost(costs, 5, np.random.default_rng(seed))) for seed in range(20)}
    assert len(orders) == 20


def test_the_ends_of_windows_have_costs_of_the_middle():
    costs = np.arange(4.0 * GROUP + 30)
    order = order_by_cost(costs, 50, np.random.default_rng(0))
    head, tail = order[: GROUP - 50], order[-16:]
    assert min(*head, *tail) >= 2 * GROUP
    assert max(*head, *tail) < 2 * GROUP + 30
