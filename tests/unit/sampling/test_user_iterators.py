"""Users' samplers: iterators that ``iter()`` begins anew, as Lightning's, and own states."""

import functools
import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from shmloader import DataLoader, ShardedDataLoader
from shmloader.sampling import ShardedSampler
from shmloader.sampling.hooks import has_own_state, has_state_methods

LENGTH = 20


class Restarting:
    """A wrapper that is its own iterator, which each call of ``iter()`` begins anew."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self):
        self.items = iter(self.inner)
        return self

    def __next__(self):
        return next(self.items)


class Stateful(Restarting):
    """The same with a state of its own: how many items were drawn."""

    drawn = 0

    def __iter__(self):
        self.items = itertools.islice(iter(self.inner), self.drawn, None)
        return self

    def __next__(self):
        item = next(self.items)
        self.drawn += 1
        return item

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state) -> None:
        self.drawn = state["drawn"]


def shuffled():
    return RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(0))


def batches():
    return BatchSampler(shuffled(), 8, drop_last=False)


def read(loader, at_most=10):
    return [batch.tolist() for batch in itertools.islice(loader, at_most)]


WAYS = {
    "plain": lambda wrap: DataLoader(torch.arange(LENGTH), batch_sampler=wrap(batches())),
    "seeded": lambda wrap: DataLoader(torch.arange(LENGTH), batch_sampler=wrap(batches()), seed=1),
    "sampler": lambda wrap: DataLoader(torch.arange(LENGTH), 8, sampler=wrap(shuffled())),
    "seeded sampler": lambda wrap: DataLoader(
        torch.arange(LENGTH), 8, sampler=wrap(shuffled()), seed=1
    ),
    "sharded": lambda wrap: ShardedDataLoader(torch.arange(LENGTH), 8, sampler=wrap(shuffled())),
    "dealt": lambda wrap: ShardedDataLoader(torch.arange(LENGTH), batch_sampler=wrap(batches())),
}

# Not under torch's own batch sampler, which restarts it for each batch.
CELLS = [cell for cell in itertools.product(WAYS, [Restarting, Stateful])
         if cell[0] != "sampler"]  # fmt: skip


@pytest.mark.parametrize(("way", "wrap"), CELLS)
def test_an_iterator_that_restarts_is_drawn_to_its_end_and_once(way, wrap) -> None:
    expected = read(WAYS[way](lambda inner: inner))
    assert read(WAYS[way](wrap)) == expected
    assert 2 <= len(expected) <= 3


@pytest.mark.parametrize(("way", "wrap"), CELLS)
def test_an_epoch_of_it_continues_in_another_loader(way, wrap) -> None:
    whole = read(WAYS[way](wrap))
    for count in range(len(whole)):
        loader = WAYS[way](wrap)
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(count)] == whole[:count]
        state = loader.state_dict()  # where none was taken, it draws the first batch ahead
        assert read(iterator) == whole[count:]
        resumed = WAYS[way](wrap)
        resumed.load_state_dict(state)
        assert read(resumed) == whole[count:]


def test_a_sharded_sampler_takes_such_samplers_too() -> None:
    plain = ShardedSampler(shuffled(), 4, rank=1, world_size=2)
    assert list(ShardedSampler(Restarting(shuffled()), 4, rank=1, world_size=2)) == list(plain)


class RestartingStream(IterableDataset):
    """An iterable dataset whose iterator restarts."""

    def __iter__(self):
        return iter(Restarting(range(LENGTH)))


@pytest.mark.parametrize("seed", [None, 1])
def test_an_iterable_dataset_is_iterated_by_next_alone(seed) -> None:
    loader = DataLoader(RestartingStream(), 8, seed=seed)
    whole = read(loader)
    assert [len(batch) for batch in whole] == [8, 8, 4]
    again = DataLoader(RestartingStream(), 8, seed=seed)
    next(iter(again))
    resumed = DataLoader(RestartingStream(), 8, seed=seed)
    resumed.load_state_dict(again.state_dict())
    assert read(resumed) == whole[1:]


class Empty:
    """Cannot be iterated: its ``iter()`` raises what a generator would end with."""

    def __iter__(self):
        return iter([next(iter([]))])


@pytest.mark.parametrize("options", [{}, {"seed": 1}])
def test_an_iter_that_raises_stop_iteration_is_an_error_and_not_an_empty_epoch(options) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(torch.utils.data.DataLoader(torch.arange(LENGTH), 8, sampler=Empty()))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(DataLoader(torch.arange(LENGTH), 8, sampler=Empty(), **options))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(ShardedSampler(Empty(), rank=0, world_size=1))


# States of their own: a state_dict without arguments, and a load_state_dict of one -------------


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
