"""Parts of the indices."""

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.sampling.samplers import SplitSampler

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


def test_each_epoch_has_an_order_of_its_own():
    sampler = SplitSampler(50, 2, 1)
    orders = [tuple(sampler) for _ in range(5)]
    assert len(set(orders)) == 5
    sampler.set_epoch(3)
    assert tuple(sampler) == orders[3]


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
