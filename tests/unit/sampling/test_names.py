"""What the package exports, and what holds for all of its samplers."""

import inspect
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import shmloader
from shmloader import sampling

SAMPLERS = {
    "SplitSampler": lambda **seed: sampling.SplitSampler(
        11, 4, 3, even_size=True, repeat=2, **seed
    ),
    "IntervalSampler": lambda: sampling.IntervalSampler(11, 3),
    "FilterSampler": lambda: sampling.FilterSampler(lambda sample: sample % 3, range(11)),
    "BucketBatchSampler": lambda **seed: sampling.BucketBatchSampler(
        range(11), 2, 2, 3, shuffle=True, **seed
    ),
    "ShardedSampler": lambda **seed: sampling.ShardedSampler(
        torch.utils.data.RandomSampler(range(11)), 2, rank=1, world_size=2, **seed
    ),
    "TokenBatches": lambda **seed: sampling.TokenBatches(range(1, 12), 20, window=5, **seed),
    "DistributedWeightedSampler": lambda **seed: sampling.DistributedWeightedSampler(
        range(1, 12), 9, rank=1, world_size=2, **seed
    ),
}


SEEDED = [name for name in SAMPLERS if name not in {"IntervalSampler", "FilterSampler"}]


def test_the_names_are_these():
    assert sampling.__all__ == sorted(SAMPLERS)
    assert all(issubclass(getattr(sampling, name), Sampler) for name in sampling.__all__)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_streams_of_the_process_stay_where_they_are(name):
    def seeded(draw):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        drawn = draw()
        return drawn, random.random(), np.random.random(), torch.rand(()).item()

    _, *undisturbed = seeded(lambda: None)
    first, *after = seeded(lambda: list(SAMPLERS[name]()))
    assert after == undisturbed
    random.seed(4)
    np.random.seed(4)
    torch.manual_seed(4)
    assert list(SAMPLERS[name]()) == first


class Echo:
    """Gives back the index, be it a list of them for each shard."""

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 11


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_our_loader_gives_what_torchs_gives(name):
    role = "batch_sampler" if name in {"BucketBatchSampler", "TokenBatches"} else "sampler"

    def two_epochs(kind):
        loader = kind(Echo(), num_workers=1, collate_fn=list, **{role: SAMPLERS[name]()})
        return list(loader), list(loader)

    assert two_epochs(shmloader.DataLoader) == two_epochs(DataLoader)


@pytest.mark.parametrize("name", SAMPLERS)
def test_arguments_are_attributes_and_indices_ints(name):
    sampler = SAMPLERS[name]()
    for argument in inspect.signature(type(sampler)).parameters:
        assert hasattr(sampler, argument)
    indices = list(sampler)
    while isinstance(indices[0], list):
        indices = [*itertools.chain(*indices)]
    assert {type(index) for index in indices} == {int}


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "FilterSampler"])
def test_a_copy_goes_on_with_the_next_epoch_and_a_named_one_comes_again(name):
    sampler = SAMPLERS[name]()
    epochs = [list(sampler) for _ in range(3)]
    assert (epochs[0] == epochs[1]) == (name == "IntervalSampler")
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(sampler)
    if name != "IntervalSampler":
        sampler.set_epoch(1)
        assert list(sampler) == epochs[1]


@pytest.mark.parametrize("name", SEEDED)
def test_another_seed_gives_another_order(name):
    assert list(SAMPLERS[name](seed=1)) != list(SAMPLERS[name]())


@pytest.mark.parametrize("name", ["ShardedSampler", "DistributedWeightedSampler"])
def test_ranks_are_those_of_the_environment(name, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"ShardedSampler": [1, 2], "DistributedWeightedSampler": [1, 1]}[name]
    sampler = getattr(sampling, name)(given)
    assert (sampler.rank, sampler.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("name", "given"),
    [("BucketBatchSampler", {"batch_size": 2}), ("DistributedWeightedSampler", {"num_samples": 3})],
)
@pytest.mark.parametrize(
    "kind", [tuple, np.float32, lambda numbers: torch.tensor(numbers, dtype=torch.bfloat16)]
)
def test_lengths_and_weights_of_any_kind_give_the_same(name, given, kind):
    cls, numbers = getattr(sampling, name), [5, 1, 3, 3, 8, 1]
    assert list(cls(kind(numbers), **given)) == list(cls(numbers, **given))


ARGUMENTS = {
    "SplitSampler": {"length": 10, "num_parts": 2},
    "IntervalSampler": {"length": 5, "interval": 2},
    "FilterSampler": {"fn": bool, "dataset": [1]},
    "BucketBatchSampler": {"lengths": [1, 2], "batch_size": 2},
    "ShardedSampler": {"sampler": [1, 2]},
    "TokenBatches": {"lengths": [1, 2], "max_tokens": 3},
    "DistributedWeightedSampler": {
        "weights": [1, 0, 2], "num_samples": 2, "rank": 0, "world_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "argument", "value", "text"),
    [
        ("SplitSampler", "length", -1, "0 or more"),
        ("SplitSampler", "length", 2.5, "an int"),
        ("SplitSampler", "num_parts", 0, "1 or more"),
        ("SplitSampler", "part_index", 2, "below num_parts=2"),
        ("SplitSampler", "part_index", "0", "an int"),
        ("SplitSampler", "even_size", 1, "True or False"),
        ("SplitSampler", "repeat", 0, "1 or more"),
        ("SplitSampler", "shuffle", "yes", "True or False"),
        ("SplitSampler", "seed", -3, "0 or more"),
        ("IntervalSampler", "length", "5", "an int"),
        ("IntervalSampler", "interval", 0, "1 or more"),
        ("IntervalSampler", "rollover", 1, "True or False"),
        ("FilterSampler", "fn", "even", "callable"),
        ("BucketBatchSampler", "lengths", [1, -1], "have no negative"),
        ("BucketBatchSampler", "lengths", [[1, 2]], "have one dimension"),
        ("BucketBatchSampler", "batch_size", 0, "1 or more"),
        ("BucketBatchSampler", "num_buckets", None, "an int"),
        ("BucketBatchSampler", "num_buckets", 0, "1 or more"),
        ("BucketBatchSampler", "num_shards", -1, "0 or more"),
        ("BucketBatchSampler", "shuffle", 1, "True or False"),
        ("BucketBatchSampler", "seed", 2**64, "below 18446744073709551616"),
        ("ShardedSampler", "batch_size", 0, "1 or more"),
        ("ShardedSampler", "last_batch", "rollover", ""),
        ("ShardedSampler", "seed", -1, "0 or more"),
        ("ShardedSampler", "rank", 0, "be given both or not"),
        ("TokenBatches", "lengths", [1, 0], r"be whole numbers from 1 to 2\*\*63 - 1, but got"),
        ("TokenBatches", "max_tokens", 0, "1 or more"),
        ("TokenBatches", "window", 0.5, "an int"),
        ("TokenBatches", "shuffle", 0, "True or False"),
        ("TokenBatches", "seed", -1, "0 or more"),
        ("DistributedWeightedSampler", "weights", [1, -1], "have no negative"),
        ("DistributedWeightedSampler", "weights", [0, 0], "have a positive number, but got 2"),
        ("DistributedWeightedSampler", "weights", [], "have a positive number, but got 0"),
        ("DistributedWeightedSampler", "num_samples", 0, "1 or more"),
        ("DistributedWeightedSampler", "num_samples", 1, "at least one .*=2 ranks, but"),
        ("DistributedWeightedSampler", "replacement", 0, "True or False"),
        ("DistributedWeightedSampler", "rank", 2, "below world_size=2"),
        ("DistributedWeightedSampler", "rank", None, "be given both or not"),
        ("DistributedWeightedSampler", "seed", True, "an int"),
    ],
)
def test_arguments_that_cannot_be_are_refused(name, argument, value, text):
    kind = TypeError if text in {"an int", "True or False", "callable"} else ValueError
    with pytest.raises(kind, match=rf"^{argument}\b.* should (be )?{text}"):
        getattr(sampling, name)(**{**ARGUMENTS[name], argument: value})


def test_as_many_weighted_samples_come_without_replacement_as_there_are_weights():
    with pytest.raises(ValueError, match=r"at most 2 without replacement, .* got num_samples=3"):
        sampling.DistributedWeightedSampler([1, 0, 2], 3, False)
    sampler = sampling.DistributedWeightedSampler([1] * 7, rank=1, world_size=3)
    assert (sampler.num_samples, len(sampler)) == (7, 2)
