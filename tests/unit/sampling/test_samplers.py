"""The samplers: parts, regular distances, wanted samples, weighted draws."""

import itertools
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shmloader.sampling.samplers import FilterSampler, IntervalSampler, SplitSampler
from shmloader.sampling.sharded import DistributedWeightedSampler


class Watched(list):
    """A dataset that notes which samples were looked at."""

    def __init__(self, samples):
        super().__init__(samples)
        self.looked_at = []

    def __getitem__(self, index):
        self.looked_at.append(index)
        return super().__getitem__(index)


def is_even(sample):
    return sample % 2 == 0


@given(st.lists(st.booleans(), max_size=30))
@settings(derandomize=True)
def test_those_that_satisfy_it_come_in_order(samples):
    sampler = FilterSampler(bool, samples)
    wanted = [index for index, sample in enumerate(samples) if sample]
    assert list(sampler) == wanted
    assert len(sampler) == len(wanted)
    assert list(sampler) == wanted


def test_samples_are_looked_at_only_as_they_are_drawn():
    dataset = Watched([1, 2, 3, 4, 5])
    indices = iter(FilterSampler(is_even, dataset))
    assert dataset.looked_at == []
    assert next(indices) == 1
    assert dataset.looked_at == [0, 1]
    assert next(indices) == 3
    assert dataset.looked_at == [0, 1, 2, 3]
    assert next(indices, None) is None
    assert dataset.looked_at == [0, 1, 2, 3, 4]


def test_the_length_is_unknown_before_a_full_pass():
    sampler = FilterSampler(is_even, [1, 2, 3, 4, 5])
    unknown = "first full pass, since fn has to be called with each of the 5 samples"
    with pytest.raises(TypeError, match=unknown):
        len(sampler)
    assert list(itertools.islice(sampler, 2)) == [1, 3]  # all that there are, but not to the end
    with pytest.raises(TypeError, match=unknown):
        len(sampler)
    assert list(sampler) == [1, 3]
    assert len(sampler) == 2


def test_the_length_is_that_of_the_last_full_pass():
    dataset = [2, 4]
    sampler = FilterSampler(is_even, dataset)
    list(sampler)
    dataset += [5, 6]
    next(iter(sampler))
    assert len(sampler) == 2
    assert list(sampler) == [0, 1, 3]
    assert len(sampler) == 3


def test_what_fn_raises_goes_through_and_leaves_the_length_unknown():
    sampler = FilterSampler(lambda sample: 1 / sample, [1, 0, 1])
    indices = iter(sampler)
    assert next(indices) == 0
    with pytest.raises(ZeroDivisionError):
        next(indices)
    with pytest.raises(TypeError, match="full pass"):
        len(sampler)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2, 3])

    def __len__(self):
        return 3


class Endless:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("dataset", [Stream(), Endless(), iter([1]), {1, 2}, None])
def test_a_dataset_that_is_not_map_style_is_refused(dataset):
    with pytest.raises(TypeError, match="dataset should be map-style, with") as caught:
        FilterSampler(is_even, dataset)
    assert f"got dataset={dataset!r}" in str(caught.value)


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
def test_with_rollover_each_index_comes_once_and_the_length_is_what_comes(
    length, interval, rollover
):
    sampler = IntervalSampler(length, interval, rollover)
    assert len(sampler) == len(list(sampler))
    assert not rollover or sorted(sampler) == list(range(length))


LENGTHS = st.integers(0, 60)
PART_COUNTS = st.integers(1, 12)
SEEDS = st.integers(0, 2**64 - 1)


def parts(length, num_parts, **options):
    return [list(SplitSampler(length, num_parts, part, **options)) for part in range(num_parts)]


@given(LENGTHS, PART_COUNTS, SEEDS)
@settings(derandomize=True)
def test_parts_are_contiguous_and_together_are_everything(length, num_parts, seed):
    found = parts(length, num_parts, shuffle=False)
    assert list(itertools.chain(*found)) == list(range(length))
    size, longer_count = divmod(length, num_parts)
    assert [*map(len, found)] == [size + 1] * longer_count + [size] * (num_parts - longer_count)
    assert [sorted(part) for part in parts(length, num_parts, seed=seed)] == found


def test_seed_and_part_change_the_order():
    def order(part, seed):
        return tuple(index - 25 * part for index in SplitSampler(50, 2, part, seed=seed))

    assert len({order(part, seed) for part in range(2) for seed in range(3)}) == 6
    assert order(1, 2) == order(1, 2)


@given(LENGTHS, PART_COUNTS, st.booleans(), SEEDS)
@settings(derandomize=True)
def test_even_parts_have_the_size_of_the_longest(length, num_parts, shuffle, seed):
    even = parts(length, num_parts, even_size=True, shuffle=shuffle, seed=seed)
    assert {len(part) for part in even} == {-(-length // num_parts)}
    for part, own in zip(even, parts(length, num_parts, shuffle=False), strict=True):
        added = Counter(part) - Counter(own)
        assert Counter(part) - added == Counter(own)  # its own are all there
        assert all(0 <= index < length for index in added)


def test_what_fills_a_part_is_of_the_whole_set_and_another_in_each_epoch():
    sampler = SplitSampler(11, 4, 3, even_size=True, shuffle=False)
    epochs = [list(sampler) for _ in range(300)]
    assert {tuple(indices[:-1]) for indices in epochs} == {(9, 10)}
    assert {indices[-1] for indices in epochs} == set(range(11))
    again = SplitSampler(11, 4, 3, even_size=True, shuffle=False)
    assert [list(again) for _ in range(300)] == epochs


def test_what_fills_differs_with_part_and_seed():
    def fills(part, seed):
        sampler = SplitSampler(1001, 4, part, even_size=True, shuffle=False, seed=seed)
        return tuple(list(sampler)[-1] for _ in range(5))

    assert len({fills(part, seed) for part in (1, 2, 3) for seed in range(3)}) == 9


@given(LENGTHS, PART_COUNTS, st.integers(1, 4), st.booleans(), st.booleans(), SEEDS)
@settings(derandomize=True)
def test_each_time_through_gives_the_whole_part(
    length, num_parts, repeat, even_size, shuffle, seed
):
    options = {"even_size": even_size, "shuffle": shuffle, "seed": seed}
    for part in range(num_parts):
        once = sorted(SplitSampler(length, num_parts, part, **options))
        sampler = SplitSampler(length, num_parts, part, repeat=repeat, **options)
        indices = list(sampler)
        assert len(sampler) == len(indices) == repeat * len(once)
        for time in range(repeat):
            assert sorted(indices[time * len(once) : (time + 1) * len(once)]) == once


def test_each_time_through_has_an_order_of_its_own():
    indices = list(SplitSampler(30, repeat=4))
    assert len({tuple(indices[time * 30 : (time + 1) * 30]) for time in range(4)}) == 4


WEIGHTS = st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any)
WORLD_SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 2**64 - 1)


def alone(*arguments, **options):
    return DistributedWeightedSampler(*arguments, rank=0, world_size=1, **options)


def on_all_ranks(world_size, *arguments, **options):
    ranks = [
        DistributedWeightedSampler(*arguments, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    found = [list(sampler) for sampler in ranks]
    assert [*map(len, ranks)] == [*map(len, found)]
    return found


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
