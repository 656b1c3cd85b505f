"""Iterable datasets, stopped anywhere: by their own state, by their iterator's, or by neither."""

import copy
import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import shmloader

LENGTH = 37
#: Worker 1 ends before the others.
EARLY = 20


def mine():
    """This worker's first number, and how far it is to its next."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def sample(number, *, noisy):
    draws = [random.random(), float(np.random.random()), torch.rand(()).item()] if noisy else []
    return [float(number), *draws]


def is_over(number, worker):
    return number >= LENGTH or (worker == 1 and number > EARLY)


class WithoutState(IterableDataset):
    def __init__(self, *, noisy):
        self.noisy = noisy

    def __iter__(self):
        number, distance = worker, _ = mine()
        while not is_over(number, worker):
            yield sample(number, noisy=self.noisy)
            number += distance


class OwnState(WithoutState):
    """A generator, whose dataset knows where it is."""

    number: int | None = None

    def __iter__(self):
        worker, distance = mine()
        if self.number is None:
            self.number = worker
        while not is_over(self.number, worker):
            number, self.number = self.number, self.number + distance
            yield sample(number, noisy=self.noisy)
        self.number = None

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class IteratorState(WithoutState):
    def __iter__(self):
        return Numbers(*mine(), noisy=self.noisy)


class Numbers:
    def __init__(self, worker, distance, *, noisy):
        self.worker = self.number = worker
        self.distance = distance
        self.noisy = noisy

    def __iter__(self):
        return self

    def __next__(self):
        number = self.number
        if is_over(number, self.worker):
            raise StopIteration
        self.number += self.distance
        return sample(number, noisy=self.noisy)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


DATASETS = (WithoutState, OwnState, IteratorState)


def make(dataset, workers, *, seed=None, batch_size=3, **options):
    if workers:
        options.setdefault("multiprocessing_context", "fork")
    return shmloader.DataLoader(
        dataset(noisy=seed is not None), batch_size, num_workers=workers, seed=seed, **options
    )


def read(batch):
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]


def states_of(loader, epochs):
    """The batches of some epochs, and the state after each."""
    given, states = [], {}
    for epoch in range(epochs):
        given.append([])
        iterator = iter(loader)
        states[epoch, 0] = json.dumps(loader.state_dict())
        for batch in iterator:
            given[epoch].append(read(batch))
            states[epoch, len(given[epoch])] = json.dumps(loader.state_dict())
        states[epoch, "end"] = json.dumps(loader.state_dict())
    return given, states


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("dataset", DATASETS)
def test_a_stream_goes_on_exactly_where_it_stopped(dataset, workers, seed, whole):
    ways = ((1, 3, False), (4, None, True), (4, 3, False))
    for way, (every, batch_size, stays) in enumerate(ways):
        persistent = stays and workers > 0
        options = {
            "seed": seed,
            "batch_size": batch_size,
            "snapshot_every_n_steps": every,
            "persistent_workers": persistent,
        }
        with make(dataset, workers, **options) as loader:
            epochs, states = states_of(loader, 3)
        last = len(epochs[0])
        stops = [(0, 0), (0, 5), (1, 1), (0, last), (0, "end"), (1, "end")]
        # Each way has its own, unless all are wanted.
        for epoch, stop in stops if whole else stops[way :: len(ways)]:
            state = json.loads(states[epoch, stop])
            with make(dataset, workers, **options) as loader:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
                at, given = (epoch + 1, 0) if stop == "end" else (epoch, stop)
                where = f"{options}, epoch {epoch}, {stop}"
                assert [read(batch) for batch in loader] == epochs[at][given:], where
                if at + 1 < len(epochs):
                    assert [read(batch) for batch in loader] == epochs[at + 1], where


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("dataset", DATASETS)
def test_a_stream_goes_on_in_workers_that_are_not_forked(dataset, method):
    with make(dataset, 2) as loader:
        epochs, states = states_of(loader, 1)
    with make(dataset, 2, multiprocessing_context=method) as loader:
        loader.load_state_dict(json.loads(states[0, 3]))
        assert [read(batch) for batch in loader] == epochs[0][3:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dataset", DATASETS)
def test_in_any_order_nothing_is_lost_and_nothing_twice(dataset):
    with make(dataset, 3) as loader:
        epoch = sorted(read(batch) for batch in loader)
    with make(dataset, 3, in_order=False) as loader:
        first = [read(batch) for batch in itertools.islice(loader, 4)]
        state = loader.state_dict()
    with make(dataset, 3, in_order=False) as loader:
        loader.load_state_dict(state)
        assert sorted(first + [read(batch) for batch in loader]) == epoch


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize(("before", "after"), [(0, 1), (2, 3), (2, 0)])
def test_another_number_of_workers_is_refused_for_a_reason_that_is_true(dataset, before, after):
    with make(dataset, before) as loader:
        next(iter(loader))
        state = loader.state_dict()
    other = make(dataset, after)
    why = "reads its own part" if dataset is WithoutState else "has that of each worker's dataset"
    with pytest.raises(
        ValueError, match=f"num_workers: {before} in the state, {after} in .*{why}.*="
    ):
        other.load_state_dict(state)


def test_workers_that_stay_are_ended_by_a_state_to_go_on_from():
    with make(OwnState, 2, persistent_workers=True) as loader:
        epochs, states = states_of(loader, 2)
        loader.load_state_dict(json.loads(states[0, 4]))
        assert [read(batch) for batch in loader] == epochs[0][4:]
        assert [read(batch) for batch in loader] == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_a_stream_never_changes_afterwards(workers):
    with make(OwnState, workers) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        before = copy.deepcopy(state)
        list(iterator)
        assert state == before
        state["datasets"]["checkpoints"][0]["snapshot"]["state"]["number"] = 100
        loader.load_state_dict(before)
        assert loader.state_dict() == before
