"""Which objects have a state of the protocol: a state_dict without arguments, one to load it."""

import functools

import pytest
import torch

from shmloader import DataLoader
from shmloader.sampling.hooks import has_own_state, has_state_methods


class Given:
    """An object with these two methods."""

    def __init__(self, save, load) -> None:
        self.state_dict = save
        self.load_state_dict = load


def load(state, strict=True):
    """Take one argument, and another if it is given."""


SAVES = {
    "no argument": lambda: None,
    "only defaults": lambda prefix="", *, keep_vars=False: {},
    "any": lambda *args, **kwargs: {},
    "a part": functools.partial(lambda prefix: {}, "x"),
    "without a signature": dict,
}

NO_SAVES = {
    "litdata's": lambda num_samples_yielded, num_workers, batch_size: {},
    "MosaicML's": lambda num_samples, from_beginning: {},
    "a keyword": lambda *, epoch: {},
    "no method": {},
    "none": None,
}


@pytest.mark.parametrize("name", SAVES)
def test_a_state_dict_that_needs_no_argument_is_one(name) -> None:
    assert has_own_state(Given(SAVES[name], load))


@pytest.mark.parametrize("name", NO_SAVES)
def test_a_state_dict_that_needs_an_argument_is_none(name) -> None:
    assert not has_own_state(Given(NO_SAVES[name], load))


@pytest.mark.parametrize("wrong", [lambda: None, lambda state, more: None, lambda *, state: None])
def test_a_load_state_dict_takes_the_state_and_needs_nothing_else(wrong) -> None:
    assert has_own_state(Given(dict, load))
    assert not has_own_state(Given(dict, wrong))


def test_the_weights_of_a_module_are_none() -> None:
    assert not has_own_state(torch.nn.Linear(2, 2))
    assert has_state_methods(torch.nn.Linear(2, 2))


class ForeignSampler:
    """A sampler of another protocol."""

    def __iter__(self):
        return iter(range(12))

    def __len__(self) -> int:
        return 12

    def state_dict(self, num_samples):
        raise AssertionError("called without knowing how")

    def load_state_dict(self, state):
        raise AssertionError("given a state that it has not saved")


@pytest.mark.parametrize("seed", [None, 1])
def test_a_sampler_of_another_protocol_is_drawn_again_from_its_beginning(seed) -> None:
    def make():
        return DataLoader(torch.arange(12), 4, sampler=ForeignSampler(), seed=seed)

    loader = make()
    iterator = iter(loader)
    next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert torch.cat(list(other)).tolist() == list(range(4, 12))
