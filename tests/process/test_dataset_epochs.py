"""The loader's ``set_epoch()`` reaches datasets that have one, here and in all workers."""

import concurrent.futures
import multiprocessing
from typing import Any

import pytest
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, IterableDataset, Subset

from shmloader import DataLoader, ShardedDataLoader
from tests.process.support import Deaths

pytestmark = pytest.mark.usefixtures("quick_spawn")


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
