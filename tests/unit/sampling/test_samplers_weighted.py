"""A weighted draw on several ranks."""

import itertools
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.sampling.samplers import DistributedWeightedSampler

WEIGHTS = st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any)
WORLD_SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 2**64 - 1)


def alone(*arguments, **options):
    return DistributedWeightedSampler(*arguments, rank=0, world_size=1, **options)


def on_all_ranks(world_size, *arguments, **options):
    return [
        list(DistributedWeightedSampler(*arguments, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]


@given(WEIGHTS, WORLD_SIZES, st.integers(0, 50), SEEDS)
@settings(derandomize=True)
def test_ranks_take_turns_in_one_draw(weights, world_size, more, seed):
    num_samples = world_size + more
    draw = list(alone(weights, num_samples, seed=seed))
    assert len(draw) == num_samples
    for rank, indices in enumerate(on_all_ranks(world_size, weights, num_samples, seed=seed)):
        assert indices == draw[rank::world_size][: num_samples // world_size]


@given(st.data(), WEIGHTS, SEEDS)
@settings(derandomize=True)
def test_without_replacement_no_index_is_on_two_ranks(data, weights, seed):
    positive_count = sum(weight > 0 for weight in weights)
    num_samples = data.draw(st.integers(1, positive_count))
    world_size = data.draw(st.integers(1, min(num_samples, 6)))
    ranks = on_all_ranks(world_size, weights, num_samples, False, seed=seed)
    assert {len(indices) for indices in ranks} == {num_samples // world_size}
    together = list(itertools.chain(*ranks))
    assert len(set(together)) == len(together)
    draw = list(alone(weights, num_samples, False, seed=seed))
    assert ranks == [
        draw[rank::world_size][: num_samples // world_size] for rank in range(world_size)
    ]


@given(WEIGHTS, WORLD_SIZES, st.integers(0, 50), st.booleans())
@settings(derandomize=True)
def test_the_length_is_what_comes(weights, world_size, more, replacement):
    weights = [*weights, *[1] * (world_size + more)]
    for rank in range(world_size):
        sampler = DistributedWeightedSampler(
            weights, world_size + more, replacement, rank=rank, world_size=world_size
        )
        assert len(sampler) == len(list(sampler)) == (world_size + more) // world_size


@given(WEIGHTS, st.booleans())
@settings(derandomize=True)
def test_an_index_of_weight_0_is_never_drawn(weights, replacement):
    num_samples = 50 if replacement else sum(weight > 0 for weight in weights)
    assert all(weights[index] > 0 for index in alone(weights, num_samples, replacement))


def test_weights_whose_sum_is_no_double_are_weights_all_the_same():
    assert Counter(alone([1.5e308] * 2, 400)).keys() == {0, 1}
    assert sorted(alone([1.5e308, 0, 1.5e308], 2, False)) == [0, 2]


def test_the_smallest_weight_is_still_more_than_none():
    weights = [0, 5e-324, 1e300, 0, 5e-324]
    sampler = alone(weights, 3, False)
    for _ in range(20):
        first, *rest = sampler
        assert (first, sorted(rest)) == (2, [1, 4])


def is_near(count, trials, share):
    """Within 4.5 standard deviations."""
    return abs(count - trials * share) < 4.5 * (trials * share * (1 - share)) ** 0.5


def test_with_replacement_indices_come_in_proportion():
    weights = [1, 0.5, 4, 0, 2.5]
    found = Counter(alone(weights, 40_000))
    assert all(is_near(found[index], 40_000, weights[index] / 8) for index in (0, 1, 2, 4))


def test_without_replacement_each_draw_is_in_proportion_to_what_remains():
    weights = [1, 5, 2, 2]
    sampler = alone(weights, 2, False)
    found = Counter(tuple(sampler) for _ in range(8000))
    for one, other in itertools.permutations(range(4), 2):
        share = weights[one] / 10 * weights[other] / (10 - weights[one])
        assert is_near(found[one, other], 8000, share)


@pytest.mark.parametrize("replacement", [True, False])
def test_an_epoch_is_a_function_of_the_seed_and_its_number(replacement):
    weights = range(1, 101)
    sampler = alone(weights, 50, replacement)
    epochs = [list(sampler) for _ in range(4)]
    assert len(set(map(tuple, epochs))) == 4
    sampler.set_epoch(2)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert list(sampler) == epochs[2]
    assert list(alone(weights, 50, replacement)) == epochs[0]
    assert list(alone(weights, 50, replacement, seed=1)) not in epochs
    assert list(pickle.loads(pickle.dumps(sampler))) == epochs[3]


@pytest.mark.parametrize("replacement", [True, False])
def test_ranks_agree_in_later_epochs(replacement):
    samplers = [
        DistributedWeightedSampler(range(1, 61), None, replacement, rank=rank, world_size=3)
        for rank in range(3)
    ]
    single = alone(range(1, 61), None, replacement)
    for _ in range(3):
        turns = zip(*samplers, strict=True)
        assert list(itertools.chain.from_iterable(turns)) == list(single)
