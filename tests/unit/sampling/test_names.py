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
    "ShardedSampler": lambda **seed: sampling.ShardedSampler(
        torch.utils.data.RandomSampler(range(11)), 2, rank=1, world_size=2, **seed
    ),
    "TokenBatches": lambda **seed: sampling.TokenBatches(range(1, 12), 20, window=5, **seed),
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


def test_ranks_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sampler = sampling.ShardedSampler([1, 2])
    assert (sampler.rank, sampler.world_size) == (1, 2)


ARGUMENTS = {
    "ShardedSampler": {"sampler": [1, 2]},
    "TokenBatches": {"lengths": [1, 2], "max_tokens": 3},
}


@pytest.mark.parametrize(
    ("name", "argument", "value", "text"),
    [
        ("ShardedSampler", "batch_size", 0, "1 or more"),
        ("ShardedSampler", "last_batch", "divide", ""),
        ("ShardedSampler", "seed", -1, "0 or more"),
        ("ShardedSampler", "rank", 0, "be given both or not"),
        ("TokenBatches", "lengths", [1, 0], r"be whole numbers from 1 to 2\*\*63 - 1, but got"),
        ("TokenBatches", "max_tokens", 0, "1 or more"),
        ("TokenBatches", "window", 0.5, "an int"),
        ("TokenBatches", "shuffle", 0, "True or False"),
        ("TokenBatches", "seed", -1, "0 or more"),
    ],
)
def test_arguments_that_cannot_be_are_refused(name, argument, value, text):
    kind = TypeError if text in {"an int", "True or False"} else ValueError
    with pytest.raises(kind, match=rf"^{argument}\b.* should (be )?{text}"):
        getattr(sampling, name)(**{**ARGUMENTS[name], argument: value})
