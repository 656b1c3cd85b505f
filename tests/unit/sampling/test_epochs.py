"""Epochs of samplers, their random numbers, and the samplers that the package exports."""

import inspect
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

import shmloader
from shmloader import sampling
from shmloader.sampling.hooks import set_epoch_of
from shmloader.sampling.samplers import EpochSampler, random_numbers

WORDS = st.integers(0, 2**64 - 1)


class Numbered(EpochSampler[int]):
    """Gives the epoch's number, twice."""

    def _draw(self, epoch):
        return [epoch, epoch]


def test_an_epoch_begins_with_its_first_index():
    sampler = Numbered(0)
    iter(sampler)
    second = iter(sampler)
    assert sampler.epoch == 0
    assert next(second) == 0
    assert sampler.epoch == 1


def test_an_epoch_can_be_named():
    sampler = Numbered(0)
    unborn = iter(sampler)
    sampler.set_epoch(7)
    assert list(unborn) == [7, 7]
    assert list(sampler) == [8, 8]
    sampler.set_epoch(0)
    assert list(sampler) == [0, 0]


def test_an_epoch_that_has_begun_goes_on_as_it_is():
    sampler = Numbered(0)
    begun = iter(sampler)
    next(begun)
    sampler.set_epoch(5)
    assert next(begun) == 0
    assert sampler.epoch == 5


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_of_torchs_loader_count_one_each(persistent):
    loader = DataLoader(
        range(100), sampler=Numbered(0), num_workers=1, persistent_workers=persistent
    )
    assert [torch.cat(list(loader)).tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("value", [None, True, 1.5, "1", -1, 2**64])
def test_a_seed_or_an_epoch_is_a_word_without_sign(value):
    Numbered(2**64 - 1).set_epoch(2**64 - 1)
    kind = ValueError if type(value) is int else TypeError
    for name, call in (("seed", Numbered), ("epoch", Numbered(0).set_epoch)):
        with pytest.raises(kind, match=rf"{name} should be .*{name}={value!r}"):
            call(value)


def first_words(seed, epoch, part):
    return random_numbers(seed, epoch, part).bit_generator.random_raw(4).tolist()


@given(st.tuples(WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS, WORDS))
@settings(derandomize=True)
def test_random_numbers_differ_with_any_of_them(one, other):
    assert (first_words(*one) == first_words(*other)) == (one == other)


def test_random_numbers_stay_what_they_are():
    # Whoever goes on with an interrupted training under a later release relies on it.
    assert random_numbers(1, 2, 3).bit_generator.random_raw(2).tolist() == [
        0x89750718F70491EC,
        0xA6E8E1B7706835E2,
    ]


def test_epochs_do_not_overlap():
    # 2**128 blocks lie between two parts: what is drawn in one never reaches the next.
    state = random_numbers(0, 0, 0).bit_generator.state["state"]["counter"].tolist()
    other = random_numbers(0, 0, 1).bit_generator.state["state"]["counter"].tolist()
    following = random_numbers(0, 1, 0).bit_generator.state["state"]["counter"].tolist()
    assert [state, other, following] == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


class Counting(SequentialSampler):
    epochs = ()

    def set_epoch(self, epoch):
        self.epochs += (epoch,)


def test_the_sampler_in_a_batch_sampler_is_told_the_epoch_and_the_outer_one_first():
    inner = Counting(range(4))
    set_epoch_of(BatchSampler(inner, 2, drop_last=False), 3)
    set_epoch_of(inner, 4)
    assert inner.epochs == (3, 4)
    outer = Counting(range(4))
    outer.sampler = inner
    set_epoch_of(outer, 5)
    assert (outer.epochs, inner.epochs) == ((5,), (3, 4))
    set_epoch_of([1, 2], 5)


# What holds for all samplers of the package ---------------------------------------------------

SAMPLERS = {
    "ShardedSampler": lambda **seed: sampling.ShardedSampler(
        torch.utils.data.RandomSampler(range(11)), 2, rank=1, world_size=2, **seed
    ),
    "TokenBatches": lambda **seed: sampling.TokenBatches(range(1, 12), 20, window=5, **seed),
}


def test_the_names_are_these():
    assert sampling.__all__ == sorted(SAMPLERS)
    assert all(issubclass(getattr(sampling, name), Sampler) for name in sampling.__all__)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_our_loader_gives_what_torchs_gives(name):
    role = "batch_sampler" if name == "TokenBatches" else "sampler"

    def two_epochs(kind):
        loader = kind(range(11), num_workers=1, collate_fn=list, **{role: SAMPLERS[name]()})
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
