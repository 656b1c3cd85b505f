"""Indices of the samples that are wanted."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shmloader.sampling.samplers import FilterSampler


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


def test_the_answer_may_be_a_tensor():
    assert list(FilterSampler(lambda sample: sample > 2, torch.tensor([1, 5, 2, 3]))) == [1, 3]


def test_a_pickled_one_keeps_what_it_knows():
    sampler = FilterSampler(is_even, [1, 2])
    list(sampler)
    assert len(pickle.loads(pickle.dumps(sampler))) == 1


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
