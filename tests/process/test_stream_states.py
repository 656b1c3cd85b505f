"""States of iterable datasets: saved anywhere, gone on from exactly, and by workers as well."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shmloader import DataLoader
from tests.process.support import Deaths


def worker_number() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class Stream(IterableDataset):
    """Numbers of a worker's own, as many as `lengths` says; `made` counts them."""

    #: How many samples were made, in any process.
    made: Any = None

    def __init__(self, lengths: list[int], made: Any = None) -> None:
        self.lengths = lengths
        self.made = made

    def numbers(self) -> range:
        worker_id = worker_number()
        return range(worker_id * 1000, worker_id * 1000 + self.lengths[worker_id])

    def note(self) -> None:
        if self.made is not None:
            self.made.add()


class Plain(Stream):
    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            self.note()
            yield number


class Saved(Stream):
    checkpoint = 0
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        numbers = self.numbers()
        while self.checkpoint < len(numbers):
            self.note()
            self.checkpoint += 1
            yield numbers[self.checkpoint - 1]
        self.checkpoint = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.checkpoint, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.checkpoint, self.epoch = state["place"], state["epoch"]


class Eager(Saved):
    """One that looks at its place when it is iterated, not when the first sample is wanted."""

    def __iter__(self) -> Iterator[int]:
        return self._numbers_from(self.checkpoint)

    def _numbers_from(self, checkpoint: int) -> Iterator[int]:
        for number in self.numbers()[checkpoint:]:
            self.checkpoint += 1
            yield number


class Numbers:
    def __init__(self, stream: SavedIterator) -> None:
        self.stream = stream
        self.numbers = stream.numbers()
        self.state: dict[str, Any] = {"place": [0]}

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        (checkpoint,) = self.state["place"]
        if checkpoint >= len(self.numbers):
            raise StopIteration
        self.stream.note()
        self.state["place"][0] += 1
        return self.numbers[checkpoint]

    def state_dict(self) -> dict[str, Any]:
        return self.state  # its own, which goes on changing

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class SavedIterator(Stream):
    def __iter__(self) -> Numbers:
        return Numbers(self)


class Itself(Saved):
    """A dataset that is its own iterator, and begins anew at `iter()`."""

    def __iter__(self) -> Iterator[int]:
        self.checkpoint = 0
        return self

    def __next__(self) -> int:
        numbers = self.numbers()
        if self.checkpoint >= len(numbers):
            raise StopIteration
        self.note()
        self.checkpoint += 1
        return numbers[self.checkpoint - 1]


KINDS: dict[str, type[Stream]] = {
    kind.__name__: kind for kind in (Plain, Saved, Eager, SavedIterator, Itself)
}


class Count:
    def __init__(self) -> None:
        self._value = multiprocessing.get_context("fork").Value("q", 0)

    def add(self) -> None:
        with self._value.get_lock():
            self._value.value += 1

    def take(self) -> int:
        with self._value.get_lock():
            found, self._value.value = self._value.value, 0
        return found


def noisy(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) + torch.rand(())


def streams_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """What a loader's state has of each worker's stream."""
    return state["datasets"]["checkpoints"]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def rest(batches: Iterator[Any]) -> list[Any]:
    return [plain(batch) for batch in batches]


def saved_everywhere(loader: DataLoader) -> tuple[list[Any], list[dict[str, Any]]]:
    batches, seen = iter(loader), []
    states = [loader.state_dict()]
    for batch in batches:
        seen.append(plain(batch))
        states.append(loader.state_dict())
    return seen, states


def check_everywhere(make: Callable[[], DataLoader], *, any_order: bool = False) -> list[Any]:
    """A new loader goes on from each state as the old one did; the old one's batches."""
    loader = make()
    seen, states = saved_everywhere(loader)
    kept = copy.deepcopy(states)
    assert len(states) == len(seen) + 1
    for stop, state in enumerate(states):
        other = make()
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        again = rest(iter(other))
        if any_order:
            assert sorted(map(str, seen[:stop] + again)) == sorted(map(str, seen))
        else:
            assert again == seen[stop:], f"after {stop} batches"
    assert str(states) == str(kept), "a state has changed after it was returned"
    return seen


WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "in process": ([11], {"num_workers": 0}),
    "one worker": ([11], {"num_workers": 1}),
    "two workers": ([9, 4], {}),
    "three workers": ([7, 0, 10], {"num_workers": 3}),
    "no batching": ([3, 6], {"batch_size": None}),
    "drop_last": ([3, 6], {"batch_size": 3, "drop_last": True}),
    "in any order": ([3, 6], {"in_order": False}),
    "far ahead": ([3, 6], {"batch_size": 1, "prefetch_factor": 6}),
    "persistent": ([3, 6], {"persistent_workers": True}),
    "a seed": ([3, 6], {"seed": 3, "collate_fn": noisy}),
    "a seed, in process": ([9], {"num_workers": 0, "seed": 3, "collate_fn": noisy}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_goes_on_from_any_batch(kind, way) -> None:
    lengths, options = WAYS[way]
    seen = check_everywhere(
        lambda: DataLoader(KINDS[kind](lengths), **{"batch_size": 2, "num_workers": 2, **options}),
        any_order=way == "in any order",
    )
    if "workers" in way:
        assert sum(map(len, seen)) == sum(lengths)


@pytest.mark.parametrize(
    ("kind", "why"), [(Plain, "reads its own part of an Iter"), (Saved, "has a state of its own:")]
)
@pytest.mark.parametrize(("before", "after"), [(0, 1), (2, 3), (2, 0)])
def test_another_number_of_workers_is_refused(kind, why, before, after) -> None:
    with DataLoader(kind([9, 9, 9]), 3, num_workers=before) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = DataLoader(kind([9, 9, 9]), 3, num_workers=after)
    with pytest.raises(ValueError, match=f"num_workers: {before} in the state, {after} in .*{why}"):
        other.load_state_dict(state)


class AsLitdata(Plain):
    """Its state takes arguments, as that of litdata's StreamingDataset."""

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> Any:
        raise AssertionError("called without knowing how")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("given a state that it has not saved")


@pytest.mark.parametrize(("workers", "lengths"), [(0, [8]), (2, [5, 3])])
def test_a_dataset_without_both_methods_of_the_protocol_has_no_state(workers, lengths) -> None:
    loader = DataLoader(AsLitdata(lengths), batch_size=2, num_workers=workers)
    batches = iter(loader)
    next(batches)
    assert {each["snapshot"] for each in streams_of(loader.state_dict())} == {None}
    other = DataLoader(AsLitdata(lengths), batch_size=2, num_workers=workers)
    other.load_state_dict(loader.state_dict())
    assert rest(iter(other)) == rest(batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("every", "skipped"), [(1, 0), (3, 2), (4, 1), (1000, 5)])
def test_what_a_snapshot_has_passed_is_not_made_again(every, skipped) -> None:
    made = Count()
    options: dict[str, Any] = {
        "batch_size": 1, "num_workers": 1, "snapshot_every_n_steps": every
    }  # fmt: skip
    loader = DataLoader(Saved([12]), **options)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    other = DataLoader(Saved([12], made), **options)
    other.load_state_dict(loader.state_dict())
    assert rest(iter(other)) == [[number] for number in range(5, 12)]
    assert made.take() == 7 + skipped


class Epochs(Saved):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number in super().__iter__():
            yield self.epoch, number


def told_epochs(batches: Iterator[Any]) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [1, 1000])
def test_persistent_workers_hand_their_dataset_s_epoch_on(every) -> None:
    def make() -> DataLoader:
        return DataLoader(
            Epochs([5, 2]), batch_size=2, num_workers=2, persistent_workers=True,
            snapshot_every_n_steps=every,
        )  # fmt: skip

    loader = make()
    first, second, third = (told_epochs(iter(loader)) for _ in range(3))
    assert [batch[0][0] for batch in third] == [2] * 4
    loader = make()
    assert told_epochs(iter(loader)) == first
    other = make()
    other.load_state_dict(loader.state_dict())
    assert told_epochs(iter(other)) == second
    # And in the midst of an epoch that the workers began with a state.
    batches = iter(loader)
    assert told_epochs(itertools.islice(batches, 3)) == second[:3]
    other.load_state_dict(loader.state_dict())
    assert told_epochs(iter(other)) == second[3:]
    assert told_epochs(iter(other)) == third


def test_an_epoch_that_was_left_leaves_its_datasets_where_they_were() -> None:
    def make() -> DataLoader:
        return DataLoader(
            Saved([9, 9]), batch_size=1, num_workers=2, prefetch_factor=1,
            persistent_workers=True, snapshot_every_n_steps=1000,
        )  # fmt: skip

    loader = make()
    batches = iter(loader)
    next(batches)
    batches = iter(loader)  # the same iterator, begun anew
    begun = loader.state_dict()
    assert [stream["given"] for stream in streams_of(begun)] == [0, 0]
    assert [s["snapshot"]["state"]["place"] for s in streams_of(begun)] == [2, 1]
    seen = [plain(next(batches))]
    state = loader.state_dict()
    seen += rest(batches)
    assert seen[0] == [2]
    for stop, one in enumerate((begun, state)):
        other = make()
        other.load_state_dict(one)
        assert rest(iter(other)) == seen[stop:]


def test_without_persistence_a_new_epoch_begins_at_the_beginning() -> None:
    loader = DataLoader(Epochs([4, 2]), batch_size=2, num_workers=2)
    first = told_epochs(iter(loader))
    assert "snapshot" not in str(loader.state_dict())
    loader.load_state_dict(loader.state_dict())
    assert told_epochs(iter(loader)) == first
    assert told_epochs(iter(loader)) == first


class Dies(Saved):
    deaths: Deaths

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 7:
                self.deaths.come()
            yield number


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("every", "made_again"), [(1, 2), (2, 4), (1000, 8)])
def test_a_new_worker_goes_on_from_its_predecessor_s_last_state(every, made_again) -> None:
    made = Count()
    dataset = Dies([12, 3], made)
    dataset.deaths = Deaths(0)
    options: dict[str, Any] = {
        "batch_size": 2, "num_workers": 2, "snapshot_every_n_steps": every
    }  # fmt: skip
    expected = rest(iter(DataLoader(dataset, **options)))
    whole = made.take()
    dataset.deaths = Deaths(1)
    assert rest(iter(DataLoader(dataset, **options, worker_restarts=1))) == expected
    assert dataset.deaths.left == 0
    assert made.take() == whole + made_again


class Fails(Saved):
    def state_dict(self) -> dict[str, Any]:
        if self.checkpoint == 4:
            raise LookupError("no state here")
        return super().state_dict()


def test_a_state_that_cannot_be_taken_is_an_error_until_the_next_one() -> None:
    loader = DataLoader(Fails([8, 8]), batch_size=2, num_workers=2)
    batches = iter(loader)
    seen = [plain(next(batches)) for _ in range(3)]
    with pytest.raises(RuntimeError, match="Fails cannot be saved: LookupError: no state here"):
        loader.state_dict()
    seen += [plain(next(batches)) for _ in range(3)]
    state = loader.state_dict()
    expected = rest(batches)
    assert seen + expected == rest(iter(DataLoader(Saved([8, 8]), batch_size=2, num_workers=2)))
    other = DataLoader(Saved([8, 8]), batch_size=2, num_workers=2)
    other.load_state_dict(state)
    assert rest(iter(other)) == expected


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_state_dict_ends_neither_the_stream_nor_the_worker(error) -> None:
    class Ends(Saved):
        def state_dict(self) -> dict[str, Any]:
            if self.checkpoint == 1:
                raise error
            return super().state_dict()

    batches = iter(DataLoader(Ends([3]), num_workers=1))
    with pytest.raises(RuntimeError):
        next(batches)
    assert rest(batches) == [[1], [2]]
