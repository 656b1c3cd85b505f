"""The number of an epoch: ``loader.epoch`` and ``set_epoch()``, also that of datasets."""

import concurrent.futures
import functools
import itertools
import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)

from shmloader import DataLoader, ShardedDataLoader, TooManyFailures
from tests.process.support import Bad, Deaths, Numbers, Streams

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


class Samples(Dataset):
    epoch = 0
    calls = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls += 1


class Stream(IterableDataset):
    epoch = 0

    def __iter__(self) -> Any:
        return iter([self.epoch] * 4)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def epochs_in(loader: Any) -> set[int]:
    return {int(number) for batch in loader for number in batch}


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "persistent_workers": True, "thread_pool": True},
]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("kind", [Samples, Stream])
def test_the_loaders_count_reaches_the_dataset(kind, workers, seed) -> None:
    if kind is Stream and "thread_pool" in workers:
        pytest.skip("threads load no iterable datasets")
    check_count(kind, workers, seed)


@pytest.mark.usefixtures("quick_spawn")
def test_the_loaders_count_reaches_spawned_workers() -> None:
    check_count(Stream, {**WORKERS[2], "multiprocessing_context": "spawn"}, None)


def check_count(kind, workers, seed) -> None:
    with DataLoader(kind(), 2, seed=seed, **workers) as loader:
        loader.set_epoch(0)
        assert [epochs_in(loader) for _ in range(3)] == [{0}, {1}, {2}]
        loader.set_epoch(7)
        assert [epochs_in(loader) for _ in range(2)] == [{7}, {8}]
        assert loader.dataset.epoch == 8


def test_an_executors_processes_are_told() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        for persists in (False, True):
            options: dict[str, Any] = {"executor": executor, "num_workers": 1, "seed": 0}
            with DataLoader(Samples(), 2, persistent_workers=persists, **options) as loader:
                loader.set_epoch(0)
                assert [epochs_in(loader) for _ in range(2)] == [{0}, {1}]
                loader.set_epoch(7)
                assert epochs_in(loader) == {7}


def test_a_sharded_loaders_dataset_is_told() -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "seed": 0}
    with ShardedDataLoader(Samples(), batch_size=2, **options) as loader:
        assert epochs_in(loader) == {0}
        loader.set_epoch(7)
        assert epochs_in(loader) == {7}


def test_a_worker_is_told_once_in_an_epoch() -> None:
    class Calls(Samples):
        def __getitem__(self, index: int) -> int:
            return self.calls

    with DataLoader(Calls(), 2, num_workers=1, persistent_workers=True) as loader:
        loader.set_epoch(0)
        assert [epochs_in(loader) for _ in range(3)] == [{1}, {2}, {3}]
        assert loader.dataset.calls == 3


@pytest.mark.usefixtures("quick_spawn")
def test_a_replaced_worker_is_in_the_present_epoch() -> None:
    class Dies(Samples):
        deaths: Any = None

        def __getitem__(self, index: int) -> int:
            if self.epoch == 1 and index == 5:
                self.deaths.come()
            return self.epoch

    dataset = Dies()
    dataset.deaths = Deaths(1)
    options: dict[str, Any] = {"multiprocessing_context": "forkserver", "worker_restarts": 1}
    options |= {"num_workers": 1, "persistent_workers": True}
    with DataLoader(dataset, 2, **options) as loader:
        loader.set_epoch(0)
        assert [epochs_in(loader) for _ in range(2)] == [{0}, {1}]


def test_a_resumed_epoch_has_its_number_before_the_dataset_loads_its_state() -> None:
    class Loads(Samples):
        loaded_in = -1

        def __getitem__(self, index: int) -> int:
            return self.loaded_in

        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            self.loaded_in = self.epoch

    for workers in (0, 1):
        with DataLoader(Loads(), 2, num_workers=workers) as loader:
            loader.set_epoch(5)
            next(iter(loader))
            state = loader.state_dict()
        with DataLoader(Loads(), 2, num_workers=workers) as other:
            other.load_state_dict(state)
            assert epochs_in(other) == {5}
            epochs_in(other)
            assert other.dataset.epoch == 6


def test_datasets_in_torchs_wrappers_are_told() -> None:
    samples = Subset(ConcatDataset([Samples(), Samples()]), range(16))
    for dataset in (samples, ChainDataset([Stream(), Stream()])):
        with DataLoader(dataset, 2, num_workers=1, persistent_workers=True) as loader:
            loader.set_epoch(0)
            assert [epochs_in(loader) for _ in range(2)] == [{0}, {1}]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}])
def test_nothing_is_told_before_the_loaders_set_epoch(workers) -> None:
    dataset = Samples()
    with DataLoader(dataset, 2, **workers) as loader:
        assert [epochs_in(loader) for _ in range(2)] == [{0}, {0}]
        for epoch in (5, 7, 3):
            dataset.set_epoch(epoch)
            assert epochs_in(loader) == {epoch}
        assert "tells_dataset" not in loader.state_dict()
        loader.set_epoch(9)
        assert epochs_in(loader) == {9}
        assert dataset.calls == 4


@pytest.mark.parametrize("kind", [Samples, Stream])
def test_what_set_epoch_raises_in_a_worker_is_raised_to_the_user(kind) -> None:
    class Fails(kind):
        def set_epoch(self, epoch: int) -> None:
            if epoch and multiprocessing.parent_process() is not None:
                raise LookupError("no such epoch")
            self.epoch = epoch

    with DataLoader(Fails(), 2, num_workers=1, persistent_workers=True) as loader:
        loader.set_epoch(0)
        assert epochs_in(loader) == {0}
        with pytest.raises(LookupError, match="Caught LookupError in DataLoader worker process 0"):
            next(iter(loader))
