"""Attributes that are replaced after construction count when the next epoch begins."""

import concurrent.futures
import copy
import gc
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SubsetRandomSampler

from shmloader import DataLoader, ShardedDataLoader
from tests.process.loader_classes import Endlessly
from tests.process.support import Numbers

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
    if request.param != "executor":
        yield WORKERS[request.param]
        return
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        yield {**WORKERS["executor"], "executor": executor}


class Own:
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


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("put", TRICKS)
def test_a_sampler_put_in_is_iterated_where_samples_are_not_batched(workers, seed, put):
    loader = DataLoader(Numbers(LENGTH), batch_size=None, seed=seed, **workers)
    put(loader, "sampler", [4, 2])
    assert len(loader) == 2
    assert list(loader) == [4, 2]
    put(loader, "sampler", range(7, 10))
    assert list(loader) == [7, 8, 9]


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


def test_each_pass_of_an_endless_seeded_order_is_that_of_a_further_epoch():
    plain = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=3)
    expected = [values(plain) for _ in range(3)]
    assert len({str(epoch) for epoch in expected}) == 3
    loader = DataLoader(Numbers(LENGTH), 4, shuffle=True, seed=3)
    put_by_setattr(loader, "batch_sampler", Endlessly(loader.batch_sampler))
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(9)]
    assert got == [*expected[0], *expected[1], *expected[2]]
    following, state = values(plain), loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 9)
    for other in (loader, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        other.load_state_dict(state)
        assert values(first_of(3, other)) == following


@pytest.mark.parametrize("seed", [None, 3])
def test_a_dataset_put_in_is_loaded_in_the_order_of_the_sampler(workers, seed):
    loader = DataLoader(Numbers(4), 2, seed=seed, **workers)
    put_by_setattr(loader, "dataset", torch.arange(100, 200))
    assert len(loader) == 2
    assert values(loader) == [[100, 101], [102, 103]]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda loader: Endlessly(loader.batch_sampler),
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


@pytest.mark.parametrize("make", [list, Endlessly, lambda batches: Own(*batches)])
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


def test_a_sampler_that_knows_its_loader_does_not_keep_the_workers() -> None:
    class Knows:
        loader: Any = None

        def __iter__(self) -> Any:
            return iter([n for n in range(6) if self.loader is not None])

    sampler = Knows()
    loader = DataLoader(Numbers(6), sampler=sampler, num_workers=1, batch_size=None)
    sampler.loader = loader
    batches = iter(loader)
    sampler.batches = batches  # type: ignore[attr-defined]
    assert next(batches) == 0
    pid = batches._workers[0].pid
    del batches, loader, sampler
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
