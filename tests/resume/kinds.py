"""Loaders of every kind of order, and what an unbroken run of each gives."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import shmloader
from shmloader.sampling import ShardedSampler, TokenBatches

#: Whether ``make test-all`` runs all cells, and not a part of them.
IS_WHOLE = os.environ.get("SHMLOADER_TEST_ALL", "") == "1"

LENGTH = 41
BATCH = 4
EPOCHS = 3


class Squares(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index])


class Noisy(Squares):
    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [random.random(), float(np.random.random()), torch.rand(()).item()]
        return torch.tensor([index, *numbers], dtype=torch.double)


class GlobalShuffle(Sampler):
    """A user's sampler: the whole order by Python's global stream, when it is begun."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return LENGTH


class Stateful(Sampler):
    """A user's sampler whose epochs depend on how many there were; it can save its state."""

    def __init__(self) -> None:
        self._epoch = self._next = 0

    def __iter__(self) -> Iterator[int]:
        while self._next < LENGTH:
            self._next += 1
            yield (self._next * 7 + self._epoch) % LENGTH
        self._epoch, self._next = self._epoch + 1, 0

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._next = state["epoch"], state["next"]


class Runs(Sampler):
    """A user's batch sampler, with batches of 1, 2, … samples."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        size = 1
        while order:
            yield order[:size]
            order, size = order[size:], size + 1


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _shuffle() -> dict[str, Any]:
    return {"batch_size": BATCH, "shuffle": True, "generator": _generator()}


def _replacement() -> dict[str, Any]:
    generator = _generator()
    sampler = RandomSampler(Squares(), replacement=True, num_samples=50, generator=generator)
    return {"batch_size": BATCH, "sampler": sampler, "generator": generator}


def _weighted() -> dict[str, Any]:
    weights = torch.arange(LENGTH, dtype=torch.double) + 1
    sampler = WeightedRandomSampler(weights, 45, generator=_generator())
    return {"batch_size": BATCH, "sampler": sampler}


def _tokens() -> TokenBatches:
    """A plan of five windows, with 10 to 12 batches an epoch."""
    lengths = [1 + number * 7 % 13 for number in range(LENGTH)]
    return TokenBatches(lengths, 24, window=8, balance="attention", seed=3)


def _distributed() -> dict[str, Any]:
    return {"batch_size": BATCH, "sampler": DistributedSampler(Squares(), 2, 1)}


@dataclass(frozen=True)
class Kind:
    """A kind of order.

    Attributes:
        options: Of the loader, made anew for each.
        goes_on: Whether epochs after the resumed one are exact, too.
        names_epochs: Whether its user calls the sampler's ``set_epoch``.
        dataset: Its dataset.
    """

    options: Callable[[], dict[str, Any]]
    goes_on: bool = True
    names_epochs: bool = False
    dataset: Callable[[], Dataset[Any]] = Squares


KINDS = {
    "in order": Kind(lambda: {"batch_size": BATCH}),
    "short last batch left out": Kind(lambda: {**_shuffle(), "drop_last": True}),
    "shuffled by a generator": Kind(_shuffle),
    "shuffled by the global stream": Kind(
        lambda: {"batch_size": BATCH, "shuffle": True}, goes_on=False
    ),
    "no batching": Kind(lambda: {**_shuffle(), "batch_size": None}),
    "with replacement": Kind(_replacement),
    "weighted": Kind(_weighted),
    "weighted by the global stream": Kind(
        lambda: {"batch_size": BATCH, "sampler": WeightedRandomSampler([1.0] * LENGTH, 45)},
        goes_on=False,
    ),
    "a list": Kind(lambda: {"batch_size": BATCH, "sampler": list(range(LENGTH, 0, -1))}),
    "torch's for ranks": Kind(_distributed, names_epochs=True),
    "a user's": Kind(lambda: {"batch_size": BATCH, "sampler": GlobalShuffle()}, goes_on=False),
    "a user's with a state": Kind(lambda: {"batch_size": BATCH, "sampler": Stateful()}),
    "a user's batches": Kind(lambda: {"batch_sampler": Runs()}, names_epochs=True),
    "token batches": Kind(lambda: {"batch_sampler": _tokens()}),
    "token batches of a rank": Kind(
        lambda: {"batch_sampler": ShardedSampler(_tokens(), rank=1, world_size=3)}
    ),
}


def _seeded(options: Callable[[], dict[str, Any]]) -> Kind:
    return Kind(lambda: {**options(), "seed": 5}, dataset=Noisy)


KINDS |= {
    "by a seed": _seeded(lambda: {"batch_size": BATCH, "shuffle": True}),
    "by a seed, without batching": _seeded(lambda: {"batch_size": None, "shuffle": True}),
    "by a seed, weighted": _seeded(KINDS["weighted by the global stream"].options),
    "by a seed, a user's generator": _seeded(
        lambda: {"batch_size": BATCH, "sampler": RandomSampler(Squares(), generator=_generator())}
    ),
    **{
        f"by a seed, {name}": _seeded(KINDS[name].options)
        for name in ("a user's", "a user's with a state", "a user's batches", "token batches")
    },
}


def make_loader(kind: str, workers: int, **options: Any) -> shmloader.DataLoader[Any]:
    given = {"num_workers": workers, **KINDS[kind].options(), **options}
    if not workers:
        given.pop("multiprocessing_context", None)
    return shmloader.DataLoader(KINDS[kind].dataset(), **given)


def read(batch: Any) -> Any:
    return batch.tolist()


def disturb() -> None:
    """Draw from the process's streams, as training does."""
    torch.rand(3)
    random.random()


def name_epoch(kind: str, loader: shmloader.DataLoader[Any], epoch: int) -> None:
    """What a user does before an epoch, where a sampler has to be told."""
    if KINDS[kind].names_epochs:
        sampler: Any = loader.sampler
        (sampler if hasattr(sampler, "set_epoch") else loader.batch_sampler).set_epoch(epoch)


@dataclass
class Run:
    """What a run that was never stopped gave.

    Attributes:
        epochs: The batches of each epoch.
        states: By epoch and number of batches handed over, what ``state_dict()`` gave then, as
            JSON; by epoch and "end", what it gave after StopIteration.
    """

    epochs: list[list[Any]] = field(default_factory=list)
    states: dict[tuple[int, int | str], str] = field(default_factory=dict)


@functools.cache
def unbroken(kind: str, workers: int, *, in_order: bool, persistent: bool = False) -> Run:
    """The run; by fork, since a state does not tell how workers are started."""
    torch.manual_seed(11)
    random.seed(11)
    run = Run()
    options: dict[str, Any] = {"persistent_workers": persistent} if persistent else {}
    with make_loader(
        kind, workers, in_order=in_order, multiprocessing_context="fork", **options
    ) as loader:
        for epoch in range(EPOCHS):
            name_epoch(kind, loader, epoch)
            batches: list[Any] = []
            run.epochs.append(batches)
            iterator = iter(loader)
            run.states[epoch, 0] = json.dumps(loader.state_dict())
            for batch in iterator:
                batches.append(read(batch))
                run.states[epoch, len(batches)] = json.dumps(loader.state_dict())
                disturb()
            run.states[epoch, "end"] = json.dumps(loader.state_dict())
    return run
