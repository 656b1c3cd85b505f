"""Datasets, samplers and functions of the parity cases, importable in spawned workers."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Sized:
    """As long as its owner says."""

    size: int

    def __init__(self, size: int | None = None) -> None:
        if size is not None:
            self.size = size

    def __len__(self) -> int:
        return self.size


class Squares(Sized, Dataset):
    """Sample i holds tensors, an array and numbers made from i."""

    size = 23

    def __getitem__(self, index: Any) -> dict[str, Any]:
        number = int(index)
        if not 0 <= number < self.size:
            raise IndexError(number)
        return {
            "index": number,
            "square": torch.tensor([number, number**2], dtype=torch.float64),
            "row": np.full((2, 3), number, dtype=np.int16),
            "type": type(index).__name__,
        }


class Keyed(Dataset):
    """A dataset whose keys are anything hashable."""

    def __init__(self, keys: list[Any]) -> None:
        self.values = {key: torch.tensor([n, -n]) for n, key in enumerate(keys)}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> tuple[str, torch.Tensor]:
        return repr(key), self.values[key]


class Growing(Sized, Dataset):
    """As long as its owner says, at the time."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index >= self.size:
            raise IndexError(index)
        return index, self.size


class Dice(Sized, Dataset):
    """Each sample draws from random, numpy.random and torch, and says in which worker."""

    size = 17

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, **throw()}


def throw() -> dict[str, Any]:
    info = get_worker_info()
    return {
        "worker": -1 if info is None else info.id,
        "seed": 0 if info is None else info.seed,
        "random": random.random(),
        "bits": random.getrandbits(40),
        "numpy": np.random.standard_normal(2),
        "integers": np.random.randint(1 << 30),
        "torch": torch.rand(2),
        "permutation": torch.randperm(5),
    }


def dice_collate(samples: list[Any]) -> dict[str, Any]:
    """Draws once more for each batch."""
    return {"samples": samples, "collate": throw()}


class ByList(Sized, Dataset):
    """Has __getitems__; each sample tells by which of the two methods it came."""

    size = 11

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, "getitem"

    def __getitems__(self, indices: list[int]) -> list[tuple[int, str]]:
        return [(index, f"getitems of {type(indices).__name__}") for index in indices]


class WithoutByList(Sized, Dataset):
    """Its __getitems__ is None, so that it counts as none."""

    size, __getitems__ = 7, None

    def __getitem__(self, index: int) -> int:
        return index * 10


class Made(Sized, Dataset):
    """Sample i is what a function makes of i."""

    def __init__(self, make: Callable[[int], Any], size: int = 4) -> None:
        super().__init__(size)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Whoami(Sized, Dataset):
    """Each sample is the repr-able part of get_worker_info()."""

    size = 12
    marked_by: int | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "marked_by": self.marked_by, **describe_worker(self)}


def describe_worker(dataset: Any = None) -> dict[str, Any]:
    info = get_worker_info()
    if info is None:
        return {"info": None}
    return {
        "info": type(info).__name__,
        "id": info.id,
        "num_workers": info.num_workers,
        "seed": info.seed,
        # Later torch has these.
        "rng": getattr(info, "rng", "no such attribute"),
        "worker_method": getattr(info, "worker_method", "no such attribute"),
        "dataset type": type(info.dataset).__name__,
        "dataset is mine": dataset is None or info.dataset is dataset,
    }


def mark_dataset(worker_id: int) -> None:
    """A worker_init_fn that changes its worker's copy of the dataset."""
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id
    info.dataset.marked_by = worker_id + 100


def seed_numpy(worker_id: int) -> None:
    """The worker_init_fn of many recipes."""
    np.random.seed(torch.initial_seed() % 2**31 + worker_id)
    random.seed(worker_id)


def draw_some(worker_id: int) -> None:
    """A worker_init_fn that moves its worker's random streams on."""
    torch.rand(worker_id + 1)
    random.random()
    np.random.rand(worker_id + 2)


def as_is(samples: Any) -> Any:
    return samples


def only(samples: list[Any]) -> Any:
    """A collate_fn for batches of one sample: the sample itself."""
    (sample,) = samples
    return sample


class Sharded(IterableDataset):
    """0 … size-1, dealt to the workers like cards."""

    def __init__(self, size: int = 25) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.size, step):
            yield {"number": number, "worker": first, "tensor": torch.tensor([number])}


class Uneven(IterableDataset):
    """Worker w yields sizes[w] samples."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for number in range(self.sizes[worker]):
            yield torch.tensor([worker, number])


class Measured(IterableDataset):
    """Says one length and yields another; not sharded, so that n workers yield n times it."""

    def __init__(self, says: int, yields: int) -> None:
        self.says = says
        self.yields = yields

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.yields))

    def __str__(self) -> str:
        return f"<{self.says} or so>"


class Counting(IterableDataset):
    """Endless."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


class Epochs(IterableDataset):
    """Counts its own iter() calls: persistent workers' copies live on, others start anew."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.epoch += 1
        return ((self.epoch, number) for number in range(5 + self.epoch))


class OneShot(IterableDataset):
    """Is its own iterator, so that it is used up after one pass."""

    def __init__(self, size: int) -> None:
        self.left = size

    def __iter__(self) -> "OneShot":
        return self

    def __next__(self) -> int:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        return self.left


class DiceStream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (throw() for _ in range(6))


class WhoamiStream(IterableDataset):
    marked_by: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            yield {"marked_by": self.marked_by, **describe_worker(self)}


class TwoArgumentsError(Exception):
    """Cannot be made from one string."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)
        self.first = first
        self.second = second


class WithMessageError(Exception):
    """Its class has a message and it is made by keyword."""

    message = "yes"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class OwnError(ValueError):
    pass


class Failing(Sized, Dataset):
    """Raises at some indices what a function makes of the index."""

    size = 12

    def __init__(self, error: Callable[[int], BaseException], at: tuple[int, ...] = (3,)) -> None:
        self.error = error
        self.at = at

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            raise self.error(index)
        return index


class FailingStream(IterableDataset):
    """Fails at iter() or at a sample."""

    def __init__(self, at_iter: bool, at: int = 3) -> None:
        self.at_iter = at_iter
        self.at = at

    def __iter__(self) -> Iterator[int]:
        if self.at_iter:
            raise OwnError("no stream today")
        return self.stream()

    def stream(self) -> Iterator[int]:
        for number in range(8):
            if number == self.at:
                raise OwnError(f"sample {number} is bad")
            yield number


class Moody(IterableDataset):
    """An iterator of its own that fails once and goes on afterwards."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> "Moody":
        self.number = 0
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 4:
            raise OwnError("once")
        if self.number > 9:
            raise StopIteration
        return self.number


def fail_in_worker_1(worker_id: int) -> None:
    if worker_id == 1:
        raise OwnError(f"worker {worker_id} will not start")


def fail_on_5(samples: list[int]) -> list[int]:
    if 5 in samples:
        raise OwnError("cannot collate 5")
    return samples


class Backwards(Sized, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


class Jumping(Sized, Sampler[int]):
    """Draws from the global random streams of torch for each index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield int(torch.randint(self.size, ()))


class Forever(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(23).tolist()


class Swelling:
    """A batch sampler without len(): batches of 1, 2, 3, … indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        start, count = 0, 1
        while start < self.size:
            yield list(range(start, min(start + count, self.size)))
            start, count = start + count, count + 1


class Breaking(Sampler[int]):
    """Gives some indices and then fails."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __iter__(self) -> Iterator[int]:
        yield from range(self.good)
        raise OwnError("no more indices")
