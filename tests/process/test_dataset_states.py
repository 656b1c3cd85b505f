"""Map-style datasets with a state of their own: one state for each worker, as torchdata has it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset, get_worker_info

from shmloader import DataLoader
from tests.process.support import Deaths, Numbers

LENGTH = 24


class Counting(Dataset):
    """Gives with each index how many samples this copy of it has given before.

    It calls a function with each index, once it has counted the sample.
    """

    def __init__(self, then: Callable[[int], object] = id) -> None:
        self.count = 0
        self.then = then

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        self.count += 1
        self.then(index)
        return index, self.count + 1000 * (0 if info is None else info.id)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def make(workers: int, dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Counting(), 2, num_workers=workers, **options)


def read(batch: Any) -> Any:
    return [part.tolist() for part in batch]


def resumed(state: dict[str, Any], workers: int, **options: Any) -> DataLoader[Any]:
    loader = make(workers, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_workers_dataset_goes_on_from_its_own_state(workers, every) -> None:
    options = {"persistent_workers": workers > 0, "snapshot_every_n_steps": every}
    with make(workers, **options) as loader:
        epochs: list[list[Any]] = []
        states: dict[Any, Any] = {}
        for epoch in range(3):
            epochs.append([])
            iterator = iter(loader)
            states[epoch, 0] = loader.state_dict()
            for batch in iterator:
                epochs[epoch].append(read(batch))
                states[epoch, len(epochs[epoch])] = loader.state_dict()
            states[epoch, "end"] = loader.state_dict()
    for epoch, at in ((0, 0), (0, 1), (1, 0), (1, 5), (0, 12), (1, "end")):
        with resumed(states[epoch, at], workers, **options) as other:
            number, given = (epoch + 1, 0) if at == "end" else (epoch, at)
            assert [read(batch) for batch in other] == epochs[number][given:], (epoch, at)
            if number < 2:
                assert [read(batch) for batch in other] == epochs[number + 1], (epoch, at)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_under_other_start_methods_as_well(method) -> None:
    with make(1) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        expected = [read(batch) for batch in iterator]
    with resumed(state, 1, multiprocessing_context=method) as other:
        assert [read(batch) for batch in other] == expected


def test_where_any_worker_takes_any_batch_each_goes_on_counting() -> None:
    with make(2, seed=3) as loader:
        iterator = iter(loader)
        given = [read(next(iterator)) for _ in range(5)]
        state = loader.state_dict()
    with resumed(state, 2, seed=3) as other:
        given += [read(batch) for batch in other]
    assert sorted(index for batch in given for index in batch[0]) == list(range(LENGTH))
    counts = [count for batch in given for count in batch[1]]
    assert len(set(counts)) == LENGTH, "a worker has counted from its beginning again"


@pytest.mark.parametrize("options", [{"thread_pool": True}, {"seed": 1}])
def test_where_the_state_cannot_be_saved_that_is_said(options) -> None:
    workers: Any = 2 if "thread_pool" in options else "auto"
    with make(workers, **options) as loader:
        next(iter(loader))
        with pytest.warns(UserWarning, match="does not contain that of the dataset"):
            loader.state_dict()


@pytest.mark.parametrize("every", [0, None])
@pytest.mark.parametrize("options", [{}, {"thread_pool": True}])
def test_it_is_never_asked_where_the_user_wants_so(every, options) -> None:
    class Asked(Counting):
        def state_dict(self) -> dict[str, int]:
            raise AssertionError("asked")

    with make(2, Asked(), snapshot_every_n_steps=every, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert "datasets" not in state
    with make(2, Asked(), snapshot_every_n_steps=every, **options) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == LENGTH // 2 - 1


def test_a_state_without_the_datasets_own_is_refused_and_so_is_one_too_many() -> None:
    with make(2) as loader, make(2, Numbers(LENGTH)) as plain:
        next(iter(loader))
        next(iter(plain))
        with pytest.raises(ValueError, match="does not contain the states of the dataset, which"):
            loader.load_state_dict(plain.state_dict())
        state = loader.state_dict()
        with pytest.raises(ValueError, match="this loader cannot load"):
            plain.load_state_dict(state)
    for options in (
        {"thread_pool": True},
        {"snapshot_every_n_steps": 0},
        {"num_workers": "auto", "seed": 1},
    ):
        with make(2, seed=options.get("seed")) as loader:
            next(iter(loader))
            state = loader.state_dict()
        others = {"num_workers": 2, **options}
        told = pytest.raises(ValueError, match="contains the states of the dataset")
        with make(others.pop("num_workers"), **others) as other, told:
            other.load_state_dict(state)


class Foreign(Counting):
    """A map-style dataset whose state takes arguments, as that of litdata and of MosaicML."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> Any:
        raise AssertionError("called without knowing how")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_dict_that_takes_arguments_is_none_of_the_protocol(workers) -> None:
    with make(workers, Foreign()) as loader:
        first = read(next(iter(loader)))
        assert "datasets" not in loader.state_dict()
    with make(workers, Foreign()) as other:
        other.load_state_dict(loader.state_dict())
        assert [first[0], *(read(batch)[0] for batch in other)] == [
            [index, index + 1] for index in range(0, LENGTH, 2)
        ]


def test_a_sample_that_failed_has_changed_the_dataset_as_well() -> None:
    dataset = Counting(lambda index: 1 // (index - 1))
    with make(1, dataset) as loader:
        iterator = iter(loader)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        state = loader.state_dict()
        expected = [read(batch) for batch in iterator]
    with resumed(state, 1, dataset=dataset) as other:
        assert [read(batch) for batch in other] == expected


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_last_batch_of_which_nothing_is_left_has_changed_the_dataset_as_well(workers) -> None:
    def make_failing() -> Counting:
        return Counting(lambda index: 1 // (index < LENGTH - 4))

    options = {"on_error": "skip", "persistent_workers": workers > 0}
    with make(workers, make_failing(), **options) as loader:
        assert len(list(loader)) == LENGTH // 2 - 2
        state = loader.state_dict()
        expected = [read(batch) for batch in loader]
    with resumed(state, workers, dataset=make_failing(), **options) as other:
        assert [read(batch) for batch in other] == expected


def test_a_worker_that_is_replaced_has_its_predecessors_state() -> None:
    def run(count: int) -> list[Any]:
        with make(2, Counting(Deaths({13: count}).come), worker_restarts=1) as loader:
            return [read(batch) for batch in loader]

    assert run(1) == run(0)
