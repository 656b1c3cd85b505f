"""Iterable datasets whose order is random, in every way that a user may draw it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

#: Samples of one worker.
LENGTH = 10


def worker_number() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


def order_by(source: str) -> list[int]:
    if source == "torch":
        return torch.randperm(LENGTH).tolist()
    if source == "numpy":
        return np.random.permutation(LENGTH).tolist()
    if source == "python":
        return random.sample(range(LENGTH), LENGTH)
    info = get_worker_info()  # "worker seed"
    seed = torch.initial_seed() if info is None else info.seed
    return torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).tolist()


class Shuffled(IterableDataset):
    """A generator without a state: a new order in each epoch.

    Attributes:
        source: Where the order is drawn from.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def sample(self, number: int) -> int:
        return worker_number() * 1000 + number

    def __iter__(self) -> Iterator[Any]:
        for number in order_by(self.source):
            yield self.sample(number)


class ShuffleBuffer(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        kept: list[int] = []
        for number in range(LENGTH):
            kept.append(number)
            if len(kept) == 4:
                yield self.sample(kept.pop(self.draw(4)))
        while kept:
            yield self.sample(kept.pop(self.draw(len(kept))))

    def draw(self, limit: int) -> int:
        if self.source == "torch":
            return int(torch.randint(limit, ()).item())
        if self.source == "numpy":
            return int(np.random.randint(limit))
        return random.randrange(limit)


class Augmented(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        for number in order_by(self.source):
            noise = torch.rand(()).item() + random.random() + float(np.random.random())
            yield [self.sample(number), noise + 1e-9]


class WithState(Shuffled):
    """A generator whose dataset knows how far it is; it draws its order when it begins."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        for number in order_by(self.source)[self.at :]:
            self.at += 1
            yield self.sample(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Eager(WithState):
    """One that draws its order at `iter()`, before the first sample is asked for."""

    def __iter__(self) -> Iterator[Any]:
        return self.rest_of(order_by(self.source))

    def rest_of(self, order: list[int]) -> Iterator[Any]:
        for number in order[self.at :]:
            self.at += 1
            yield self.sample(number)
        self.at = 0


class Numbers:
    """An iterator that knows how far it is, in an order that it draws when it is made."""

    def __init__(self, dataset: Shuffled) -> None:
        self.dataset = dataset
        self.order = order_by(dataset.source)
        self.at = 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Any:
        if self.at == LENGTH:
            raise StopIteration
        self.at += 1
        return self.dataset.sample(self.order[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class IteratorWithState(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        return Numbers(self)


KINDS: dict[str, type[Shuffled]] = {
    kind.__name__: kind
    for kind in (Shuffled, ShuffleBuffer, Augmented, WithState, Eager, IteratorWithState)
}
SOURCES = ("torch", "numpy", "python", "worker seed")


def drawing_collate(samples: list[Any]) -> torch.Tensor:
    """A collate function that draws: what follows in the stream depends on its having run."""
    torch.rand(3)
    random.random()
    np.random.random()
    return torch.tensor(samples, dtype=torch.double)
