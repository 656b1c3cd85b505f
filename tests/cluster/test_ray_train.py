"""The adapter of Ray Train divides a loader among training processes, and loses no argument."""

import types
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data import WeightedRandomSampler as Weighted

from shmloader import DataLoader
from shmloader.sampling import ShardedSampler
from tests.cluster.needed import needed

needed("ray.train.torch")
adapter = needed("shmloader.integrations.ray")

pytestmark = pytest.mark.filterwarnings("default")

ROWS = torch.arange(22)


class DividedBatches(BatchSampler):
    rank, num_replicas = 0, 2


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class Shuffled(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([0] * len(self))


@pytest.fixture
def of_two(monkeypatch) -> None:
    context = types.SimpleNamespace(get_world_size=lambda: 2, get_world_rank=lambda: 0)
    monkeypatch.setattr(adapter.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(adapter.ray.train.torch, "get_device", lambda: torch.device("cpu"))


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        ({}, [4, 4, 3]),
        ({"drop_last": True}, [4, 4]),
        ({"last_batch": "keep"}, [4, 4, 3]),
        ({"last_batch": "discard"}, [4, 4]),
        ({"last_batch": "rollover"}, [4, 4]),
        ({"shuffle": True, "seed": 7, "last_batch": "rollover"}, [4, 4]),
    ],
)
def test_the_last_batch_is_treated_as_the_loader_says(arguments, lengths) -> None:
    loader = adapter.prepare_data_loader(DataLoader(ROWS, 4, **arguments))
    assert type(loader) is DataLoader
    assert loader.sampler.shuffle == arguments.get("shuffle", False)
    assert [len(batch) for batch in loader] == lengths
    if loader.last_batch == "rollover":
        assert [len(batch) for batch in loader] == [4, 4, 4]  # 3 of the epoch before, and 11


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(5)),
        Weighted([1.0] * 22, 22),
        RandomSampler(ROWS, replacement=True),
        RandomSampler(ROWS, num_samples=5),
        SequentialSampler(range(5)),
        Backwards(ROWS),
        Shuffled(ROWS),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_cannot_be_divided_is_refused_and_not_replaced(sampler) -> None:
    loader = DataLoader(ROWS, 4, sampler=sampler)
    name = type(sampler).__name__
    with pytest.raises(ValueError, match=rf"replace your {name} by .*\. Give batch_size"):
        adapter.prepare_data_loader(loader)
    assert loader.sampler is sampler


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize(
    "order",
    [
        {"sampler": DistributedSampler(ROWS, 2, 1), "batch_size": 4},
        {"sampler": ShardedSampler(SequentialSampler(ROWS), rank=1, world_size=2), "batch_size": 4},
        {"batch_sampler": DividedBatches(SequentialSampler(range(11)), 4, False)},
    ],
)
def test_a_loader_that_is_divided_already_is_kept(order) -> None:
    loader = DataLoader(ROWS, **order)
    assert adapter.prepare_data_loader(loader) is loader


@pytest.mark.usefixtures("of_two")
def test_a_loader_that_is_refused_stays_as_it_was(monkeypatch) -> None:
    monkeypatch.setattr(adapter.ray.train.torch, "get_device", lambda: torch.device("cuda", 0))
    loader = DataLoader(ROWS, None)
    with pytest.raises(ValueError, match="Give batch_size"):
        adapter.prepare_data_loader(loader)
    assert loader.device is None
