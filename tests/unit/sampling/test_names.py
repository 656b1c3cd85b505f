"""What the package exports, and what holds for all of its samplers."""

import inspect
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

import shmloader
from shmloader import sampling

SAMPLERS = {
    "ShardedSampler": lambda **seed: sampling.ShardedSampler(
        torch.utils.data.RandomSampler(range(11)), 2, rank=1, world_size=2, **seed
    ),
    "TokenBatches": lambda **seed: sampling.TokenBatches(range(1, 12), 20, window=5, **seed),
}


def test_the_names_are_these():
    assert sampling.__all__ == sorted(SAMPLERS)
    assert all(issubclass(getattr(sampling, name), Sampler) for name in sampling.__all__)


class Echo:
    """Gives back the index."""

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 11


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_our_loader_gives_what_torchs_gives(name):
    role = "batch_sampler" if name == "TokenBatches" else "sampler"

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


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_copy_goes_on_with_the_next_epoch_and_a_named_one_comes_again(name):
    sampler = SAMPLERS[name]()
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1]
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_seed_gives_another_order(name):
    assert list(SAMPLERS[name](seed=1)) != list(SAMPLERS[name]())
