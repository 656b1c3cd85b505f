"""``loader.epoch``: the epoch that is iterated, and between epochs the one that comes next."""

import functools
import itertools

import pytest
import torch
from torch.utils.data import DistributedSampler

from shmloader import DataLoader, ShardedDataLoader, TooManyFailures
from tests.process.support import Bad, Numbers, Streams

LENGTH = 12


ROWS = torch.arange(LENGTH)
KINDS = {
    "plain": functools.partial(DataLoader, ROWS, 4),
    "seeded": functools.partial(DataLoader, ROWS, 4, seed=1, shuffle=True),
    "sharded": functools.partial(ShardedDataLoader, ROWS, 4),
    "stream": functools.partial(DataLoader, Streams(lambda: iter(range(LENGTH))), 4),
}
WAYS = {
    "in process": {},
    "workers": {"num_workers": 1},
    "persistent": {"num_workers": 1, "persistent_workers": True},
    "a thread": {"num_workers": 1, "thread_pool": True},
}
CELLS = [
    pytest.param(KINDS[kind], WAYS[way], id=f"{kind}, {way}")
    for kind in KINDS
    for way in WAYS
    if (kind, way) != ("stream", "a thread")
]


@pytest.mark.parametrize(("make", "options"), CELLS)
def test_it_is_the_epoch_that_is_iterated_and_then_the_next_one(make, options) -> None:
    with make(**options) as loader:
        for number in range(3):
            assert loader.epoch == loader.state_dict()["epoch"] == number
            iterator = iter(loader)
            assert loader.epoch == number
            for _ in iterator:
                assert loader.epoch == loader.state_dict()["epoch"] == number
            assert loader.epoch == number + 1
        loader.set_epoch(9)
        assert loader.epoch == loader.state_dict()["epoch"] == 9
        for _ in loader:
            assert loader.epoch == 9
        assert loader.epoch == 10


@pytest.mark.parametrize(("make", "options"), CELLS)
def test_an_epoch_that_is_left_is_over_when_its_iterator_is_dropped_or_closed(
    make, options
) -> None:
    is_persistent = options.get("persistent_workers", False)
    with make(**options) as loader:
        for _ in loader:
            break
        assert loader.epoch == (0 if is_persistent else 1)  # the loader keeps the iterator
        iterator = iter(loader)
        next(iterator)
        assert loader.epoch == 1
        iterator.close()
        assert loader.epoch == 2
        iterator = iter(loader)
        assert loader.epoch == 2
    assert loader.epoch == 3  # closing the loader closes the iterator


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_an_epoch_that_is_named_while_another_is_iterated_comes_after_it(options) -> None:
    with KINDS["seeded"](**options) as loader:
        iterator = iter(loader)
        loader.set_epoch(5)
        assert loader.epoch == 0
        list(iterator)
        assert loader.epoch == 5
        iterator = iter(loader)
        assert loader.epoch == 5
        loader.set_epoch(5)  # the same once more
        list(iterator)
        assert loader.epoch == 5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["seeded", "sharded"])
def test_the_sampler_names_the_epoch_of_the_next_iter(kind, way) -> None:
    def read(batches):
        return [str(batch) for batch in batches]

    with KINDS[kind]() as whole:
        epochs = [read(whole) for _ in range(6)]
    with KINDS[kind](**WAYS[way]) as loader:
        for before, number in itertools.pairwise((0, 4, 2)):
            iterator = iter(loader)
            loader.sampler.set_epoch(number)
            assert loader.epoch == loader.state_dict()["epoch"] == before
            assert loader.sampler.epoch == number
            assert read(iterator) == epochs[before]
            assert loader.epoch == number
        assert read(loader) == epochs[number]
        assert read(loader) == epochs[number + 1]
        assert loader.stats().epoch == number + 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", [1, 3])
def test_a_sampler_of_the_users_names_it_too_with_a_seed(named, way) -> None:
    def make():
        sampler = DistributedSampler(range(LENGTH), 1, 0, seed=3)
        return DataLoader(ROWS, 4, sampler=sampler, seed=1, **WAYS[way])

    with make() as whole:
        expected = [torch.cat(list(whole)).tolist()]
        whole.set_epoch(named)
        expected += [torch.cat(list(whole)).tolist() for _ in range(2)]
    with make() as loader:
        iterator = iter(loader)
        loader.sampler.set_epoch(named)
        assert torch.cat(list(iterator)).tolist() == expected[0]
        assert torch.cat(list(loader)).tolist() == expected[1]
        assert loader.stats().epoch == named
        assert torch.cat(list(loader)).tolist() == expected[2]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_epoch_that_is_resumed_has_its_own_number(make) -> None:
    loader = make()
    list(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    assert other.epoch == other.state_dict()["epoch"] == 1
    for _ in other:
        assert other.epoch == 1
    assert other.epoch == 2


def test_an_epoch_that_raised_goes_on_and_one_that_ended_by_an_error_is_over() -> None:
    dataset = Numbers(LENGTH, 5, 6)
    loader = DataLoader(dataset, 1)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    with pytest.raises(Bad):
        next(iterator)
    assert loader.epoch == 0
    loader = DataLoader(dataset, 1, on_error="skip", max_failures=1)
    iterator = iter(loader)
    with pytest.raises(TooManyFailures):
        list(iterator)
    assert loader.epoch == 1
