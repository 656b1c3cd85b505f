"""A seeded loader's sampler is the order it delivers, however it is read, wrapped or iterated."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from shmloader import DataLoader, ShardedDataLoader

LENGTH = 23


def read(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def make(kind=DataLoader, *, shuffle=True, **options):
    return kind(torch.arange(LENGTH), 4, shuffle=shuffle, seed=3, **options)


@pytest.mark.parametrize("drop_last", [False, True])
def test_sampler_and_batch_sampler_are_the_order_that_is_delivered(drop_last) -> None:
    loader = make(drop_last=drop_last)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        indices, batches = list(loader.sampler), list(loader.batch_sampler)
        assert sorted(indices) == list(range(LENGTH))
        assert [*itertools.chain(*batches)] == indices[: sum(map(len, batches))]
        assert read(loader) == batches
        assert loader.sampler.epoch == loader.epoch == epoch + 1


def test_frameworks_know_its_kind() -> None:
    assert isinstance(make().sampler, RandomSampler)
    assert type(make().batch_sampler) is BatchSampler
    assert isinstance(make(shuffle=False).sampler, SequentialSampler)
    assert type(make(shuffle=False).batch_sampler) is BatchSampler


@pytest.mark.parametrize("seed", [None, 3])
def test_iterating_the_samplers_disturbs_no_epoch(seed) -> None:
    def epochs(disturb):
        torch.manual_seed(1)
        generator = None if seed is not None else torch.Generator().manual_seed(2)
        loader = DataLoader(torch.arange(LENGTH), 4, shuffle=True, seed=seed, generator=generator)
        found = []
        for _ in range(3):
            for batch in loader:
                found.append(batch.tolist())
                if disturb:
                    state = generator and generator.get_state()
                    list(loader.batch_sampler)
                    next(iter(loader.batch_sampler))
                    if generator is not None:
                        generator.set_state(state)
        return found

    assert epochs(disturb=True) == epochs(disturb=False)


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_an_order_of_its_own(kind, way) -> None:
    expected = make(kind)
    epochs = [read(expected) for _ in range(3)]
    loader = make(kind)
    assert read(loader) == epochs[0]
    copied = way(loader)
    assert copied.sampler is not loader.sampler
    assert copied.batch_sampler.sampler is copied.sampler
    begun = iter(loader)  # epoch 1, while the copy has its own
    first = next(begun).tolist()
    assert [read(copied), read(copied)] == epochs[1:]
    assert [first, *read(begun)] == epochs[1]
    assert loader.sampler.epoch == loader.epoch == 2
    assert read(loader) == epochs[2]


class Counting:
    """A sampler that counts its epochs as it is iterated."""

    epoch = 0

    def set_epoch(self, epoch) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.epoch += 1
        return iter(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


def test_a_sampler_that_counts_by_itself_does_not_overrule_the_epoch_that_was_named() -> None:
    loader = DataLoader(torch.arange(LENGTH), 4, sampler=Counting(), seed=1)
    first = iter(loader)
    loader.set_epoch(9)
    next(first)  # only now the sampler is told of epoch 0, and counts on
    iter(loader)
    assert loader.state_dict()["epoch"] == 9


def test_the_sampler_told_of_the_next_number_before_the_first_epoch_names_it() -> None:
    # As Lightning does where it goes on after a checkpoint at the end of epoch 0: it tells the
    # samplers the number, and calls no load_state_dict.
    whole = make()
    epochs = [read(whole) for _ in range(3)]
    for number in range(3):
        for tell in (lambda x: x.sampler, lambda x: x.batch_sampler, lambda x: x):
            loader = make()
            tell(loader).set_epoch(number)
            assert loader.epoch == loader.sampler.epoch == number
            assert read(loader) == epochs[number]
            tell(loader).set_epoch(number)  # and once more
            assert read(loader) == epochs[number]
    loader.sampler.set_epoch(1)
    loader.set_epoch(0)  # the later call counts, and it counts on from there
    assert [read(loader), read(loader), loader.epoch] == [*epochs[:2], 2]


def test_a_samplers_own_next_number_before_the_first_epoch_counts() -> None:
    def distributed():
        sampler = DistributedSampler(range(LENGTH), 1, 0, seed=5)
        return DataLoader(torch.arange(LENGTH), 4, sampler=sampler, seed=1)

    whole = distributed()
    epochs = [read(whole) for _ in range(2)]
    loader = distributed()
    loader.sampler.set_epoch(1)
    assert loader.epoch == 1
    assert read(loader) == epochs[1]


class Skipping(BatchSampler):
    """A batch sampler without the first batches of another: as accelerate's SkipBatchSampler."""

    def __init__(self, batch_sampler, skip_batches) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self):
        for number, batch in enumerate(self.batch_sampler):
            if number >= self.skip_batches:
                yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


@pytest.mark.parametrize("rebuild", [DataLoader, torch.utils.data.DataLoader])
def test_batches_that_a_framework_skips_are_those_that_were_delivered(rebuild) -> None:
    whole = make()
    epochs = [read(whole) for _ in range(2)]
    loader = make()
    loader.sampler.set_epoch(1)
    rest = rebuild(loader.dataset, batch_sampler=Skipping(loader.batch_sampler, 2))
    assert read(rest) == epochs[1][2:]
    assert read(loader) == epochs[1]


def test_it_is_iterated_inside_a_running_epoch_as_that_epoch() -> None:
    loader = make()
    read(loader)
    iterator = iter(loader)
    next(iterator)
    assert loader.sampler.epoch == 1
    running = list(loader.batch_sampler)
    loader.sampler.set_epoch(7)
    assert loader.sampler.epoch == 7
    assert list(loader.batch_sampler) != running
    assert loader.epoch == 1  # the one that is iterated
    assert [batch.tolist() for batch in iterator] == running[1:]
    assert loader.epoch == 7


def test_a_loaded_state_of_another_epoch_than_the_sampler_is_told_is_discarded(caplog) -> None:
    whole = make()
    epochs = [read(whole) for _ in range(3)]
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    other.sampler.set_epoch(0)
    assert read(other) == epochs[0][1:]
    other.load_state_dict(state)
    other.sampler.set_epoch(2)
    assert read(other) == epochs[2]
    assert "set_epoch(2)" in caplog.text
