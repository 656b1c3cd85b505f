"""Batches of similar length."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader.sampling.samplers import BucketBatchSampler

LENGTHS = st.lists(st.integers(0, 12), max_size=60)
SIZES = st.integers(1, 7)
BUCKET_COUNTS = st.integers(1, 9)
SHARD_COUNTS = st.integers(1, 5)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def ranges(sampler):
    """The places, in order of length, of each bucket's samples."""
    edges = [0, *itertools.accumulate(sampler.bucket_sizes)]
    return [range(*pair) for pair in itertools.pairwise(edges)]


@given(LENGTHS, SIZES, BUCKET_COUNTS, st.booleans())
@settings(derandomize=True)
def test_each_sample_comes_once(lengths, batch_size, num_buckets, shuffle):
    sampler = BucketBatchSampler(lengths, batch_size, num_buckets, shuffle=shuffle)
    for _ in range(3):
        batches = list(sampler)
        assert sorted(flat(batches)) == list(range(len(lengths)))
        assert len(batches) == len(sampler)
        assert {len(batch) for batch in batches[:-1]} <= {batch_size}


@given(LENGTHS, SIZES, BUCKET_COUNTS, st.integers(0, 5))
@settings(derandomize=True)
def test_buckets_are_as_many_as_asked_for_and_of_nearly_equal_size(
    lengths, batch_size, num_buckets, num_shards
):
    sampler = BucketBatchSampler(lengths, batch_size, num_buckets, num_shards)
    sizes = sampler.bucket_sizes
    step_size = batch_size * max(1, num_shards)
    assert sum(sizes) == len(lengths)
    assert max(sizes) - min(sizes) <= step_size
    assert all(size % step_size == 0 for size in sizes[:-1])
    assert len(sizes) == max(1, min(num_buckets, len(sampler)))


@given(st.permutations(range(40)), SIZES, BUCKET_COUNTS, st.integers(0, 5), st.booleans())
@settings(derandomize=True)
def test_a_steps_samples_are_of_one_bucket(lengths, batch_size, num_buckets, num_shards, shuffle):
    # Each length is its sample's place in order of length.
    sampler = BucketBatchSampler(lengths, batch_size, num_buckets, num_shards, shuffle=shuffle)
    is_short = len(lengths) % (batch_size * max(1, num_shards)) > 0
    steps = [flat(step) if num_shards else step for step in sampler]
    for step in steps[: len(steps) - (num_shards > 0 and is_short)]:
        places = {lengths[index] for index in step}
        assert any(places <= set(bucket) for bucket in ranges(sampler))


def test_batches_of_a_sorted_epoch_ascend():
    lengths = [3, 1, 2, 3, 1, 2, 3]
    assert list(BucketBatchSampler(lengths, 2, 3)) == [[1, 4], [2, 5], [0, 3], [6]]
    assert list(BucketBatchSampler(lengths, 2, 1)) == [[1, 4], [2, 5], [0, 3], [6]]


def test_buckets_save_padding():
    lengths = np.random.default_rng(0).lognormal(3, 1, 4000)

    def padding(num_buckets):
        batches = BucketBatchSampler(lengths, 16, num_buckets, shuffle=True)
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        return padded / lengths.sum() - 1

    assert padding(1) > 3
    assert padding(10) < 0.6
    assert padding(250) < 0.04


@given(LENGTHS, SIZES, BUCKET_COUNTS, SHARD_COUNTS, st.booleans())
@settings(derandomize=True)
def test_every_shard_gets_a_batch_in_every_step(
    lengths, batch_size, num_buckets, num_shards, shuffle
):
    sampler = BucketBatchSampler(lengths, batch_size, num_buckets, num_shards, shuffle=shuffle)
    steps = list(sampler)
    assert len(steps) == len(sampler)
    for step in steps:
        assert len(step) == num_shards
        assert all(1 <= len(batch) <= batch_size for batch in step)
    assert set(flat(flat(steps))) == set(range(len(lengths)))


@given(LENGTHS, SIZES, BUCKET_COUNTS, SHARD_COUNTS, st.booleans())
@settings(derandomize=True)
def test_only_what_completes_the_last_step_comes_twice(
    lengths, batch_size, num_buckets, num_shards, shuffle
):
    sampler = BucketBatchSampler(lengths, batch_size, num_buckets, num_shards, shuffle=shuffle)
    batches = flat(sampler)
    distinct = {tuple(batch) for batch in batches}
    assert len(distinct) == -(-len(lengths) // batch_size)  # none was cut in another way
    counts = Counter(flat(distinct))
    assert set(counts.values()) <= {1}
    full_count = len(lengths) // (batch_size * num_shards)
    assert len(set(map(tuple, batches[: full_count * num_shards]))) == full_count * num_shards


def test_the_last_step_is_completed_by_the_batches_before_it():
    assert list(BucketBatchSampler(range(19), 2, 2, 3)) == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9], [10, 11]],
        [[12, 13], [14, 15], [16, 17]],
        [[14, 15], [16, 17], [18]],
    ]


@given(st.permutations(range(40)), SIZES, BUCKET_COUNTS, SHARD_COUNTS)
@settings(derandomize=True)
def test_a_last_step_that_is_completed_is_of_the_longest(
    lengths, batch_size, num_buckets, num_shards
):
    sampler = BucketBatchSampler(lengths, batch_size, num_buckets, num_shards, shuffle=True)
    *_, last = sampler
    if len(lengths) % (batch_size * num_shards):
        first_batch = max(0, -(-len(lengths) // batch_size) - num_shards)
        bucket = next(each for each in ranges(sampler) if first_batch * batch_size in each)
        assert all(lengths[index] >= bucket.start for index in flat(last))


def test_shuffled_epochs_differ_and_can_be_had_again():
    sampler = BucketBatchSampler(range(60), 4, 5, shuffle=True)
    epochs = [list(sampler) for _ in range(4)]
    for one, other in itertools.combinations(epochs, 2):
        assert one != other
        assert {tuple(sorted(batch)) for batch in one} != {tuple(sorted(batch)) for batch in other}
        assert [batch[0] // 12 for batch in one] != [batch[0] // 12 for batch in other]
    sampler.set_epoch(2)
    assert list(sampler) == epochs[2]
    assert list(BucketBatchSampler(range(60), 4, 5, shuffle=True)) == epochs[0]
    assert list(BucketBatchSampler(range(60), 4, 5, shuffle=True, seed=1)) != epochs[0]


def test_buckets_take_turns_when_shuffled():
    sampler = BucketBatchSampler(range(1000), 10, 10, shuffle=True)
    turns = [batch[0] // 100 for batch in sampler]
    assert sum(one != other for one, other in itertools.pairwise(turns)) > 70  # 90 by chance


def test_equal_lengths_are_spread_over_buckets():
    sampler = BucketBatchSampler([7] * 400, 10, 10, shuffle=True)
    first, second = next(iter(sampler)), next(iter(sampler))
    assert max(first) - min(first) > 200
    assert max(second) - min(second) > 200
