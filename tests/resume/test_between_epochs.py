"""A state before the first epoch, or between two, gives the epoch that follows in that run."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import shmloader
from tests.parity.compare import seed_everything as seed
from tests.resume.kinds import LENGTH, GlobalShuffle, Noisy, Squares


class EagerShuffle(Sampler):
    """Draws its batches when it is iterated, and not with the first of them."""

    def __iter__(self):
        order = torch.randperm(LENGTH).tolist()
        random.shuffle(order)
        return iter([order[at : at + 4] for at in range(0, LENGTH, 4)])


class Counting(Squares):
    loaded = 100

    def __getitem__(self, index):
        self.loaded += 1
        return torch.tensor([index, self.loaded])

    def state_dict(self):
        return {"loaded": self.loaded}

    def load_state_dict(self, state):
        self.loaded = state["loaded"]


def part_of(count):
    info = get_worker_info()
    return range(count) if info is None else range(info.id, count, info.num_workers)


class Shuffled(IterableDataset):
    """A stream without a state, whose order is drawn with its first sample."""

    def __iter__(self):
        order = torch.randperm(LENGTH).tolist()
        random.shuffle(order)
        for number in part_of(LENGTH):
            yield order[number]


class EagerlyShuffled(Shuffled):
    def __iter__(self):
        order = torch.randperm(LENGTH)[np.random.permutation(LENGTH)].tolist()
        return iter([order[number] for number in part_of(LENGTH)])


class Endless(IterableDataset):
    """A stream with a state, of which each epoch is a part."""

    at, end = 0, None

    def __iter__(self):
        if self.end is None:
            self.end = self.at + len(part_of(LENGTH))
        while self.at < self.end:
            self.at += 1
            yield self.at - 1
        self.end = None

    def state_dict(self):
        return {"at": self.at, "end": self.end}

    def load_state_dict(self, state):
        self.at, self.end = state["at"], state["end"]


LOADERS = {
    "shuffled": lambda: (Squares(), {"shuffle": True}),
    "shuffled by a generator": lambda: (
        Squares(),
        {"shuffle": True, "generator": torch.Generator().manual_seed(7)},
    ),
    "a generator of the loader's alone": lambda: (
        Squares(),
        {"sampler": RandomSampler(Squares()), "generator": torch.Generator().manual_seed(7)},
    ),
    "weighted": lambda: (
        Squares(), {"sampler": WeightedRandomSampler([1.0] * LENGTH, 45)},
    ),
    "a user's": lambda: (Squares(), {"sampler": GlobalShuffle()}),
    "a user's batches": lambda: (Squares(), {"batch_sampler": EagerShuffle(), "batch_size": 1}),
    "by a seed": lambda: (Noisy(), {"shuffle": True, "seed": 5}),
    "a dataset with a state": lambda: (Counting(), {"shuffle": True, "snapshot_every_n_steps": 1}),
    "a stream": lambda: (Shuffled(), {}),
    "a stream that is drawn at once": lambda: (EagerlyShuffled(), {}),
    "a stream by a seed": lambda: (Shuffled(), {"seed": 5}),
    "a stream with a state": lambda: (Endless(), {}),
}  # fmt: skip


def make(kind, workers, **options):
    dataset, order = LOADERS[kind]()
    if workers:
        options = {"multiprocessing_context": "fork", **options}
    return shmloader.DataLoader(
        dataset, **{"batch_size": 4, "num_workers": workers, **order, **options}
    )


def read(loader):
    return [batch.tolist() for batch in loader]


def generators():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize("epochs", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_epoch_that_follows_is_that_of_the_run_that_saved_the_state(kind, workers, epochs):
    seed(1)
    with make(kind, workers) as loader:
        for _ in range(epochs):
            read(loader)
        before = generators()
        state = loader.state_dict()
        assert generators() == before
        expected = read(loader)
    state = json.loads(json.dumps(state))
    seed(2)  # another process has other numbers
    before = generators()
    with make(kind, workers) as other:
        other.load_state_dict(state)
        assert other.state_dict() == state
        iterator = iter(other)
        torch.rand(1)  # whatever is drawn now
        assert read(iterator) == expected
    if "generator" not in kind:
        seed(2)
        assert generators() == before


@pytest.mark.parametrize("kind", ["shuffled", "a user's", "a stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_where_the_generators_are_restored_all_later_epochs_follow(kind, workers):
    seed(1)
    with make(kind, workers) as loader:
        state = loader.state_dict()
        expected = [read(loader), torch.rand(1).item(), read(loader)]
    seed(1)
    with make(kind, workers) as other:
        other.load_state_dict(state)
        assert [read(other), torch.rand(1).item(), read(other)] == expected


@pytest.mark.parametrize("stays", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("kind", ["shuffled", "a user's", "shuffled by a generator"])
def test_workers_may_persist_in_one_run_and_not_in_the_other(kind, epochs, stays):
    seed(1)
    with make(kind, 1, persistent_workers=stays[0]) as loader:
        for _ in range(epochs):
            read(loader)
        state = loader.state_dict()
        expected = read(loader)
    seed(2)
    with make(kind, 1, persistent_workers=stays[1]) as other:
        read(other)  # so that workers are there already, if they persist
        other.load_state_dict(state)
        assert read(other) == expected


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", ["a dataset with a state", "a stream with a state"])
def test_a_datasets_state_before_an_epoch_is_that_of_this_moment(kind, workers):
    with make(kind, 0) as loader:
        loader.dataset.load_state_dict({"loaded": 1000, "at": 1000, "end": None})
        state = loader.state_dict()
        loader.dataset.load_state_dict({"loaded": 0, "at": 0, "end": None})
    with make(kind, workers) as other:
        other.load_state_dict(state)  # whatever the number of workers
        batches = read(other)
        if kind == "a stream with a state":
            assert batches[0] == [1000, 1001, 1002, 1003]
        else:
            assert batches[0][0][1] == 1001
        # The next epoch's workers begin from the dataset in this process.
        following = read(other)
    least = min(itertools.chain(*following)) if kind.startswith("a stream") else following[0][0][1]
    assert least >= 1000


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["a dataset with a state", "a stream with a state"])
def test_workers_that_have_delivered_nothing_begin_from_the_dataset_of_the_saved_run(
    kind, persistent
):
    with make(kind, 3, persistent_workers=persistent) as loader:
        loader.dataset.load_state_dict({"loaded": 1000, "at": 1000, "end": None})
        seed(1)
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = read(batches)
    with make(kind, 3, persistent_workers=persistent) as other:
        other.load_state_dict(state)
        assert read(other) == expected


class Drawing(IterableDataset):
    count = 0

    def __iter__(self):
        while self.count < 12:
            self.count += 1
            yield torch.rand(()).item()
        self.count = 0

    def state_dict(self):
        return {"count": self.count, "torch": torch.get_rng_state().tolist()}

    def load_state_dict(self, state):
        self.count = state["count"]
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


class DrawingSamples(Dataset):
    count = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.double)

    state_dict, load_state_dict = Drawing.state_dict, Drawing.load_state_dict


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [None, 1, 3])
@pytest.mark.parametrize(
    ("dataset", "shuffle"), [(Drawing, False), (DrawingSamples, False), (DrawingSamples, True)]
)
def test_what_a_datasets_state_sets_comes_last_before_its_first_sample(
    dataset, taken, shuffle, workers
):
    def new():
        order = {"shuffle": True} if shuffle else {}
        return shmloader.DataLoader(
            dataset(), 2, num_workers=workers, snapshot_every_n_steps=1, **order
        )

    seed(5)
    with new() as loader:
        if taken is None:
            state = loader.state_dict()
            rest = iter(loader)
        else:
            rest = iter(loader)
            for _ in range(taken):
                next(rest)
            state = loader.state_dict()
        expected = read(rest)
    seed(99)
    with new() as other:
        other.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(other)
        if taken is not None:
            torch.rand(3)  # drawn by other code in between
        assert read(batches) == expected
