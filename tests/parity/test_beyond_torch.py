"""Where torch's loader warns, fails or hangs, ours works or says why; torch's does not run here."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader
from tests.parity.compare import run_ours
from tests.parity.data import Made, Squares, only
from tests.parity.objects import floats


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class FailsToLoad:
    """Pickles well, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def explode() -> None:
    raise ValueError("cannot be rebuilt")


LONG = ".{21}"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda n: Unpicklable(), LONG),
        (lambda n: {"good": floats(3), "bad": threading.Lock()}, LONG),
        (lambda n: (k for k in range(n)), LONG),
        (lambda n: floats(3).requires_grad_() * 2, LONG),
        (lambda n: [floats(99), FailsToLoad()], "cannot be rebuilt"),
    ],
    ids=["a lock in an object", "a lock in a dict", "a generator", "a grad history", "unpickling"],
)
def test_a_batch_that_cannot_be_sent_raises_and_the_epoch_goes_on(make: Any, told: str) -> None:
    steps = run_ours(
        lambda: {
            "dataset": Made(lambda n: make(n) if n == 1 else n, 4),
            "collate_fn": only,
            "num_workers": 2,
        },
        epochs=1,
    )
    assert [step.event for step in steps] == ["iter", "batch", "error", "batch", "batch", "end"]
    assert [step.value for step in steps if step.event == "batch"] == [0, 2, 3]
    assert re.search(told, steps[2].value.text, re.DOTALL)


def test_a_tensor_of_indices_starts_no_thread() -> None:
    before = set(threading.enumerate())
    loader = DataLoader(Squares(), sampler=torch.tensor([3, 1, 2]), num_workers=1)
    next(iter(loader))
    assert not [t for t in threading.enumerate() if t not in before and "_serve" in t.name]


def test_thousands_of_tensors_are_kept_without_a_descriptor_each() -> None:
    def drive(loader: Any) -> int:
        before = len(list(Path("/proc/self/fd").iterdir()))
        kept = list(loader)
        return len(list(Path("/proc/self/fd").iterdir())) - before + 0 * len(kept)

    grown = run_ours(
        lambda: {
            "dataset": Made(lambda n: [torch.tensor([n, k]) for k in range(200)], 20),
            "collate_fn": only,
            "num_workers": 2,
            "persistent_workers": True,
        },
        drive,
    )
    assert grown < 100


class Nested(Dataset):
    """Each sample is what becomes of a loader in the worker."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            return str([batch.tolist() for batch in self.kind(**self.options)])
        except BaseException as error:
            return f"{type(error).__name__}: {error}"


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(2))


@pytest.mark.parametrize("dataset", [[0, 1], Stream()])
def test_a_loader_in_a_worker_raises_as_with_torch(dataset: Any) -> None:
    def in_a_worker(outer: Any, inner: Any, **options: Any) -> Any:
        nested = Nested(inner, dataset=dataset, batch_size=2, **options)
        (found,) = outer(nested, batch_size=None, num_workers=1, multiprocessing_context="fork")
        return found

    theirs = in_a_worker(TorchLoader, TorchLoader, num_workers=1)
    assert theirs == "AssertionError: daemonic processes are not allowed to have children"
    for outer in (DataLoader, TorchLoader):
        assert in_a_worker(outer, DataLoader, num_workers=1) == theirs
        assert in_a_worker(outer, DataLoader) == "[[0, 1]]"
    if isinstance(dataset, list):
        assert in_a_worker(DataLoader, DataLoader, num_workers=1, thread_pool=True) == "[[0, 1]]"
