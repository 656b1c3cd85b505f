"""``num_workers=0``: what the engine must not change about batches that this thread makes."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from shmloader import ClosedLoaderError, DataLoader
from tests.process.support import Numbers


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.has_ended = False

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(8)
        finally:
            self.has_ended = True


class Stateful(Numbers):
    def __init__(self, order: list[int]) -> None:
        super().__init__(len(order))
        self.order = order

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


@pytest.mark.usefixtures("no_collector")
def test_a_stream_that_is_left_is_ended_at_once_without_the_collector() -> None:
    dataset = Stream()
    for _ in DataLoader(dataset, batch_size=2):
        break
    assert dataset.has_ended


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["torch's", "seed"])
@pytest.mark.parametrize("make", [Stream, lambda: Stateful([0, 1, 2, 3])], ids=["stream", "map"])
def test_the_dataset_is_not_kept_by_an_iterator_that_was_dropped(make, options) -> None:
    dataset = make()
    loader = DataLoader(dataset, batch_size=2, **options)
    kept = weakref.ref(dataset)
    iterator = iter(loader)
    next(iterator)
    del iterator, loader, dataset
    assert kept() is None


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_an_epoch_that_the_dataset_closes_does_not_just_end(on_error) -> None:
    class Closing(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index in {2, 3}:
                loader.close()
                if on_error == "skip":
                    raise ValueError(index)
            return index

    loader = DataLoader(Closing(), batch_size=2, on_error=on_error)
    iterator = iter(loader)
    given = [next(iterator).tolist()]
    if on_error == "raise":
        given.append(next(iterator).tolist())
    with pytest.raises(ClosedLoaderError, match="the iterator is closed: close"):
        next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, len(given))


def test_a_sampler_that_is_iterated_after_a_resume_finds_the_datasets_state() -> None:
    class OrderOfDataset:
        def __init__(self, dataset: Stateful) -> None:
            self._dataset = dataset

        def __iter__(self) -> Iterator[int]:
            return iter(list(self._dataset.order))

    def make(order: list[int]) -> DataLoader[Any]:
        dataset = Stateful(order)
        return DataLoader(dataset, batch_size=None, sampler=OrderOfDataset(dataset))

    loader = make([3, 1, 2, 0])
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [3, 1]
    other = make([0, 1, 2, 3])
    other.load_state_dict(loader.state_dict())
    assert list(other) == [2, 0]
