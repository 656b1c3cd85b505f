"""What goes wrong around a resume: nothing is lost, or it is said."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import shmloader
from shmloader.interruptions import probe
from shmloader.sampling.rng import global_rng_state, set_global_rng_state
from tests.process.bytecodes import Preempted
from tests.process.test_interrupts import handler_that_raises


def make(dataset: Any, batch_size: int | None = 2, workers: int = 1, **options: Any) -> Any:
    options.setdefault("collate_fn", None if batch_size is None else list)
    return shmloader.DataLoader(dataset, batch_size, num_workers=workers, **options)


def take(loader: Any, count: int) -> tuple[list[Any], dict[str, Any]]:
    """The results of some calls of `next()`, exceptions among them, and the state then."""
    iterator, seen = iter(loader), []
    for _ in range(count):
        try:
            seen.append(next(iterator))
        except Exception as error:
            seen.append(type(error).__name__)
    state = loader.state_dict()
    loader.close()
    return seen, state


def rest_of(loader: Any, state: dict[str, Any]) -> list[Any]:
    with loader:
        loader.load_state_dict(state)
        return list(loader)


class Numbers(IterableDataset):
    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __iter__(self):
        for number in range(16):
            if number == self.bad:
                raise OSError("network")
            yield number


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_that_fails_moves_nothing_on_and_closes_the_iterator(workers):
    """However often the user tries, and saves the state then."""
    _, state = take(make(Numbers(), workers=workers), 3)
    loader = make(Numbers(bad=1), workers=workers)
    loader.load_state_dict(state)
    seen, again = take(loader, 3)
    assert seen == ["OSError", "ClosedLoaderError", "ClosedLoaderError"]
    assert again["position"] == 3
    assert rest_of(make(Numbers(), workers=workers), again)[0] == [6, 7]


def test_a_resume_that_fails_for_other_samples_moves_nothing_on():
    class Other(Numbers):
        def __iter__(self):
            return iter(range(100, 116))

    _, state = take(make(Numbers()), 3)
    loader = make(Other())
    loader.load_state_dict(state)
    seen, again = take(loader, 2)
    assert seen == ["ValueError", "ClosedLoaderError"]
    assert again["datasets"] == state["datasets"]


class Transient:
    def __init__(self, bad: bool) -> None:
        self.number, self.bad = 0, bad

    def __iter__(self):
        return self

    def __next__(self):
        if self.number >= 16:
            raise StopIteration
        number, self.number = self.number, self.number + 1
        if number == 4 and self.bad:
            self.bad = False
            raise OSError("transient")
        return number


class StatefulTransient(Transient):
    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Failing(IterableDataset):
    def __init__(self, kind: type[Transient], bad: bool) -> None:
        self.kind, self.bad = kind, bad

    def __iter__(self):
        return self.kind(self.bad)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_failed_and_does_not_fail_again_is_not_passed_over_wrongly(workers):
    seen, state = take(make(Failing(StatefulTransient, True), 3, workers), 2)
    assert seen == [[0, 1, 2], "OSError"]
    rest = rest_of(make(Failing(StatefulTransient, False), 3, workers), state)
    assert rest[0] == [5, 6, 7]
    _, state = take(make(Failing(Transient, True), 3, workers), 2)
    with pytest.raises(ValueError, match="yields other samples"):
        rest_of(make(Failing(Transient, False), 3, workers), state)
    assert rest_of(make(Failing(Transient, True), 3, workers), state)[0] == [5, 6, 7]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda number: [1] * 32 + [number] * 8,
        lambda number: {"ids": torch.tensor([number]), "text": "x" * 1000},
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_that_cannot_be_repeated_is_seen_in_lists_and_dicts(wrap, workers):
    class Clock(IterableDataset):
        def __iter__(self):
            yield from map(wrap, random.SystemRandom().sample(range(10**6), 20))

    _, state = take(make(Clock(), 2, workers), 1)
    with pytest.raises(ValueError, match="yields other samples"):
        rest_of(make(Clock(), 2, workers), state)


class Carrying:
    """A collate function that keeps the last sample for the next batch."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, samples):
        samples = [*self.kept, *samples]
        self.kept = samples[-1:]
        return samples[:-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 1])
def test_what_a_collate_function_keeps_is_there_again(seed, workers):
    def loader():
        return make(Numbers(), 3, workers, seed=seed, collate_fn=Carrying())

    whole = list(loader())
    seen, state = take(loader(), 2)
    assert seen + rest_of(loader(), state) == whole


class Buffered(IterableDataset):
    def __iter__(self):
        kept: list[int] = []
        for number in range(12):
            kept.append(number)
            if len(kept) > 2:
                yield kept.pop(int(torch.randint(len(kept), ())))
        while kept:
            yield kept.pop(int(torch.randint(len(kept), ())))


def test_in_process_with_restored_generators_a_stream_may_be_resumed_again_and_again():
    torch.manual_seed(0)
    whole = list(make(Buffered(), None, 0))
    torch.manual_seed(0)
    loader = make(Buffered(), None, 0)
    iterator, seen = iter(loader), []
    for count in (0, 1, 2, 0, 3):
        seen += [next(iterator) for _ in range(count)]
        state, streams = loader.state_dict(), global_rng_state()
        torch.manual_seed(99)
        loader = make(Buffered(), None, 0)
        loader.load_state_dict(state)
        set_global_rng_state(streams)
        iterator = iter(loader)
    assert seen + list(iterator) == whole


class Stub(IterableDataset):
    def __iter__(self):
        return iter(range(8))

    def state_dict(self):
        raise NotImplementedError

    def load_state_dict(self, state):
        raise NotImplementedError


class MapStub(Dataset):
    __getitem__ = range(8).__getitem__
    __len__ = range(8).__len__
    state_dict = Stub.state_dict
    load_state_dict = Stub.load_state_dict


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Stub, MapStub])
def test_a_state_that_is_not_implemented_may_be_left_out(dataset, workers):
    options = {"snapshot_every_n_steps": 0}
    seen, state = take(make(dataset(), workers=workers, **options), 2)
    assert seen + rest_of(make(dataset(), workers=workers, **options), state) == [
        [0, 1], [2, 3], [4, 5], [6, 7]
    ]  # fmt: skip


class Where(IterableDataset):
    """Knows how far it is; may fail to be set there, once."""

    at = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __iter__(self):
        for number in range(self.at, 20):
            self.at = number + 1
            yield number

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_a_dataset_could_not_take_is_still_to_come(workers):
    _, state = take(make(Where(), workers=workers), 3)
    loader = make(Where(OSError("network")), workers=workers)
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="network"):
        next(iter(loader))
    again = loader.state_dict()
    assert again["datasets"] == state["datasets"]
    assert rest_of(make(Where(), workers=workers), again)[0] == [6, 7]


class Interrupted(Dataset):
    def __init__(self, at: int = -1) -> None:
        self.count, self.at = 0, at

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.count += 1
        if self.count == self.at:
            signal.raise_signal(signal.SIGUSR1)
        return index, self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_in_process_the_state_of_a_dataset_is_of_what_was_delivered(on_error):
    loader = make(Interrupted(at=7), 2, 0, on_error=on_error)
    with handler_that_raises(), pytest.raises(Preempted):
        list(loader)
    state = loader.state_dict()
    assert state["position"] == 3
    rest = rest_of(make(Interrupted(), 2, 0, on_error=on_error), state)
    assert rest[0] == [(6, 7), (7, 8)]


def test_what_a_handler_raises_where_an_attribute_is_looked_for_arrives():
    class Busy:
        def __getattr__(self, name):
            signal.raise_signal(signal.SIGUSR1)

    with handler_that_raises(), pytest.raises(Preempted):
        probe(Busy(), "state_dict")
