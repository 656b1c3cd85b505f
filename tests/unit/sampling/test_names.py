"""What the package exports, and what holds for all of it."""

import inspect
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import shmloader
from shmloader import sampling

SAMPLERS = {
    "SplitSampler": lambda: sampling.SplitSampler(11, 4, 3, even_size=True, repeat=2),
    "IntervalSampler": lambda: sampling.IntervalSampler(11, 3),
    "FilterSampler": lambda: sampling.FilterSampler(lambda sample: sample % 3, range(11)),
    "BucketBatchSampler": lambda: sampling.BucketBatchSampler(range(11), 2, 2, 3, shuffle=True),
    "ShardedSampler": lambda: sampling.ShardedSampler(
        torch.utils.data.RandomSampler(range(11)), 2, rank=1, world_size=2
    ),
    "DistributedWeightedSampler": lambda: sampling.DistributedWeightedSampler(
        range(1, 12), 9, rank=1, world_size=2
    ),
}


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
    role = "batch_sampler" if name == "BucketBatchSampler" else "sampler"

    def two_epochs(kind):
        loader = kind(Echo(), num_workers=1, collate_fn=list, **{role: SAMPLERS[name]()})
        return list(loader), list(loader)

    assert two_epochs(shmloader.DataLoader) == two_epochs(DataLoader)


@pytest.mark.parametrize("name", SAMPLERS)
def test_arguments_are_attributes_of_the_same_name(name):
    sampler = SAMPLERS[name]()
    for argument in inspect.signature(type(sampler)).parameters:
        assert hasattr(sampler, argument)
