"""Attributes that are replaced after construction count when the next epoch begins."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader, ShardedDataLoader
from tests.process.support import Numbers, Streams

pytestmark = pytest.mark.filterwarnings("ignore:executor= lets any idle worker:UserWarning")

LENGTH = 12

WORKERS: dict[str, dict[str, Any]] = {
    "in process": {},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "thread_pool": True},
    "executor": {"num_workers": 2},
}


@pytest.fixture(params=WORKERS)
def workers(request) -> Iterator[dict[str, Any]]:
    """The arguments for each kind of workers."""
    if request.param != "executor":
        yield WORKERS[request.param]
        return
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        yield {**WORKERS["executor"], "executor": executor}


class Repeat:
    """Yields the batches of a batch sampler again and again, for ever."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Own:
    """A batch sampler of a user's, which says whether it was iterated."""

    def __init__(self, *batches: list[int]) -> None:
        self.batches = batches
        self.begun = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.begun += 1
        return iter(self.batches)


def put_by_setattr(loader: Any, name: str, value: object) -> None:
    object.__setattr__(loader, name, value)


def put_by_dict(loader: Any, name: str, value: object) -> None:
    loader.__dict__[name] = value


def put_by_unlocking(loader: Any, name: str, value: object) -> None:
    loader._DataLoader__initialized = False
    setattr(loader, name, value)
    loader._DataLoader__initialized = True


TRICKS = [put_by_setattr, put_by_dict, put_by_unlocking]


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def first_of(count: int, loader: Any) -> Iterator[Any]:
    return itertools.islice(loader, count)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("put", TRICKS)
def test_a_batch_sampler_put_in_before_and_between_epochs_is_iterated(workers, seed, put):
    loader = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=seed, **workers)
    first = Own([1, 2], [3])
    put(loader, "batch_sampler", first)
    assert len(loader) == 2
    assert values(loader) == [[1, 2], [3]]
    assert first.begun  # torch's iterators with workers iterate it twice
    put(loader, "batch_sampler", [[5, 6, 7]])
    assert len(loader) == 1
    assert values(loader) == [[5, 6, 7]]
    put(loader, "batch_sampler", BatchSampler(range(4), 3, drop_last=True))
    assert len(loader) == 1
    assert values(loader) == [[0, 1, 2]]
    loader.close()


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("put", TRICKS)
def test_a_sampler_put_in_is_iterated_where_samples_are_not_batched(workers, seed, put):
    loader = DataLoader(Numbers(LENGTH), batch_size=None, seed=seed, **workers)
    put(loader, "sampler", [4, 2])
    assert len(loader) == 2
    assert list(loader) == [4, 2]
    put(loader, "sampler", range(7, 10))
    assert list(loader) == [7, 8, 9]
    loader.close()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_sampler_put_into_the_batch_sampler_is_iterated(workers, seed):
    loader = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=seed, **workers)
    loader.batch_sampler.sampler = [3, 1, 2]
    loader.batch_sampler.batch_size = 2
    assert len(loader) == 2
    assert values(loader) == [[3, 1], [2]]
    loader.batch_sampler.drop_last = True
    assert len(loader) == 1
    assert values(loader) == [[3, 1]]
    loader.close()


@pytest.mark.parametrize("seed", [None, 3])
def test_an_endless_batch_sampler_goes_on_past_the_first_epoch(workers, seed):
    loader = DataLoader(Numbers(LENGTH), 4, seed=seed, **workers)
    put_by_setattr(loader, "batch_sampler", Repeat(loader.batch_sampler))
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(7)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2 + [[0, 1, 2, 3]]
    loader.close()


def test_each_pass_of_an_endless_seeded_order_is_that_of_a_further_epoch():
    plain = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=3)
    expected = [values(plain) for _ in range(3)]
    assert len({str(epoch) for epoch in expected}) == 3
    loader = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=3)
    put_by_setattr(loader, "batch_sampler", Repeat(loader.batch_sampler))
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(9)]
    assert got == [*expected[0], *expected[1], *expected[2]]
    following, state = values(plain), loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 9)
    for other in (loader, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        other.load_state_dict(state)
        assert values(first_of(3, other)) == following


@pytest.mark.parametrize("seed", [None, 3])
def test_what_torch_does_not_read_again_is_not_read_again(seed):
    """Where there is a batch sampler, torch's loader reads neither of these."""
    batches: list[Any] = []
    for make in (TorchLoader, lambda *args: DataLoader(*args, seed=seed)):
        loader = make(Numbers(LENGTH), 4)
        for name, value in (("sampler", [3, 1]), ("batch_size", 2), ("drop_last", True)):
            put_by_setattr(loader, name, value)
        batches.append((len(loader), values(loader)))
    assert batches[0] == batches[1]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_dataset_put_in_is_loaded_in_the_order_of_the_sampler(workers, seed):
    loader = DataLoader(Numbers(4), 2, seed=seed, **workers)
    put_by_setattr(loader, "dataset", torch.arange(100, 200))
    assert len(loader) == 2
    assert values(loader) == [[100, 101], [102, 103]]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arguments_of_a_stream_that_are_put_in_count_as_with_torch(num_workers):
    batches: list[Any] = []
    for kind in (TorchLoader, DataLoader):
        loader = kind(Streams(lambda: iter(range(7))), 4, num_workers=num_workers)
        put_by_setattr(loader, "drop_last", True)
        before = values(loader)
        put_by_setattr(loader, "batch_sampler", BatchSampler([None] * 9, 3, drop_last=False))
        batches.append((before, values(loader)))
    assert batches[0] == batches[1] == ([[0, 1, 2, 3]], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda loader: Repeat(loader.batch_sampler),
        lambda _: [[1, 2, 3, 4]],
        lambda _: BatchSampler(range(LENGTH), 3, drop_last=False),
        lambda _: BatchSampler(SubsetRandomSampler(range(LENGTH)), 4, drop_last=False),
        lambda _: BatchSampler(range(LENGTH), 4, drop_last=True),
    ],
    ids=["endless", "a list", "another size", "another sampler", "drop_last"],
)
def test_a_state_of_the_old_order_does_not_load_into_the_new_one(seed, make):
    loader = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=seed)
    next(iter(loader))
    old = loader.state_dict()
    put_by_setattr(loader, "batch_sampler", make(loader))
    with pytest.raises(ValueError, match="the state does not fit this loader"):
        loader.load_state_dict(old)
    assert len([*first_of(1, loader)]) == 1
    loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("make", [list, Repeat, lambda batches: Own(*batches)])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_sampler_that_differs_by_its_content_alone_is_told_by_the_first_batch(make, seed, ahead):
    loader = DataLoader(Numbers(6), batch_sampler=make([[0, 1], [2, 3], [4, 5]]), seed=seed)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    if ahead:  # a resumed epoch has what its own state began with
        loader.load_state_dict(state)
        assert len(values(first_of(1, loader))) == 1
        state = loader.state_dict()
    put_by_setattr(loader, "batch_sampler", make([[5, 4], [3, 2], [1, 0]]))
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=f"yields another batch {ahead}"):
        next(iter(loader))


def test_a_state_that_was_loaded_before_the_order_was_replaced_is_refused_by_iter():
    loader = DataLoader(Numbers(LENGTH), 4)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    usual = loader.batch_sampler
    put_by_setattr(loader, "batch_sampler", [[1, 2]])
    with pytest.raises(ValueError, match="the state does not fit this loader"):
        iter(loader)
    put_by_setattr(loader, "batch_sampler", usual)
    assert values(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_running_epoch_keeps_its_order_and_its_state(workers, seed):
    loader = DataLoader(Numbers(LENGTH), 4, seed=seed, **workers)
    iterator = iter(loader)
    next(iterator)
    put_by_setattr(loader, "batch_sampler", [[1], [2]])
    assert len(loader) == 2
    assert len(iterator) == 3
    state = loader.state_dict()
    assert values(iterator) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert values(loader) == [[1], [2]]
    loader.close()
    again = DataLoader(Numbers(LENGTH), 4, seed=seed)
    again.load_state_dict(state)
    assert values(again) == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_have_what_was_put_in(seed, duplicate):
    loader = DataLoader(Numbers(LENGTH), 4, seed=seed)
    put_by_setattr(loader, "batch_sampler", [[1], [2]])
    other = duplicate(loader)
    assert values(other) == [[1], [2]]
    put_by_setattr(other, "batch_sampler", [[3]])
    assert (values(other), values(loader)) == ([[3]], [[1], [2]])


def test_samples_that_were_rolled_over_stay_until_the_batch_sampler_is_replaced():
    for seed in (None, 3):
        loader = DataLoader(Numbers(5), 2, last_batch="rollover", seed=seed)
        assert values(loader) == [[0, 1], [2, 3]]
        assert len(loader) == 3
        usual = loader.batch_sampler
        put_by_setattr(loader, "batch_sampler", [[1]])
        assert values(loader) == [[1]]
        put_by_setattr(loader, "batch_sampler", usual)
        assert values(loader) == [[4, 0], [1, 2], [3, 4]]


@pytest.mark.parametrize("kind", ["in process", "processes", "persistent"])
@pytest.mark.parametrize("seed", [None, 3])
def test_installed_loaders_follow_what_is_put_in(kind, seed):
    with shmloader.installed(seed=seed):
        loader = TorchLoader(Numbers(LENGTH), 4, **WORKERS[kind])
        assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        put_by_setattr(loader, "batch_sampler", Own([1, 2], [3]))
        assert values(loader) == [[1, 2], [3]]


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(range(4)), RandomSampler(range(LENGTH), generator=torch.Generator())],
    ids=["fewer samples", "a generator"],
)
def test_a_random_sampler_of_the_users_is_drawn_with_an_installed_seed(sampler):
    with shmloader.installed(seed=3):
        loader = TorchLoader(Numbers(LENGTH), 4, sampler=sampler)
        assert sorted(itertools.chain(*values(loader))) == [*range(len(sampler))]


# Sharded loaders ---------------------------------------------------------------------------


def ranks_of(change: Callable[[Any], object], **options: Any) -> list[list[Any]]:
    both = []
    for rank in (0, 1):
        loader = ShardedDataLoader(torch.arange(8), 2, rank=rank, world_size=2, **options)
        change(loader)
        both.append(values(loader))
        assert len(loader) == len(both[-1])
    return both


def test_a_sharded_loader_deals_the_batches_of_a_batch_sampler_that_is_put_in():
    def change(loader: Any) -> None:
        put_by_setattr(loader, "batch_sampler", [[1, 2], [3], [4], [5, 6]])

    assert ranks_of(change) == [[[1, 2], [4]], [[3], [5, 6]]]


def test_a_wrapper_of_a_ranks_share_is_not_dealt_again():
    class Reversed:
        def __init__(self, batches: Any) -> None:
            self.sampler = batches

        def __len__(self) -> int:
            return len(self.sampler)

        def __iter__(self) -> Iterator[list[int]]:
            return iter([*self.sampler][::-1])

    def change(loader: Any) -> None:
        put_by_setattr(loader, "batch_sampler", Reversed(loader.batch_sampler))

    assert ranks_of(change) == [[[4, 5], [0, 1]], [[6, 7], [2, 3]]]


def test_a_sharded_loader_refuses_samplers_of_ranks_that_are_put_in():
    loader = ShardedDataLoader(torch.arange(8), 2, rank=0, world_size=2)
    loader.batch_sampler.sampler = DistributedSampler(range(8), 2, 0)
    with pytest.raises(ValueError, match="DistributedSampler gives a part"):
        iter(loader)


def test_the_number_of_devices_counts_when_an_epoch_begins():
    loader = ShardedDataLoader(torch.arange(6), 1, devices=["cpu"])
    assert len(loader) == 6
    loader.devices = ["cpu", "cpu", "cpu"]
    assert len(loader) == 2
    assert [values(step) for step in loader] == [[[0], [1], [2]], [[3], [4], [5]]]
