"""Where torch's loader warns, fails or hangs, ours works or says why; torch's does not run here."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shmloader import DataLoader
from tests.parity.compare import assert_same, outcome, run_ours
from tests.parity.data import Made, Squares, only
from tests.parity.objects import floats


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_lambdas_closures_and_local_classes_reach_workers_started_by(method: str) -> None:
    offset = [100.0]

    class Local(Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([offset[0] + index])

    def make(method: str | None) -> dict[str, Any]:
        return {
            "dataset": Local(),
            "batch_size": 2,
            "collate_fn": lambda samples: {"sum": sum(samples), "who": get_worker_info().id},
            "worker_init_fn": lambda worker: offset.append(offset.pop() + 1000 * (worker + 1)),
            "num_workers": 2,
            "multiprocessing_context": method,
        }

    done = outcome(lambda: run_ours(lambda: make(method), list))
    assert done.failure is None
    assert done.warned == []
    assert_same(
        done.value,
        [
            {"sum": torch.tensor([2 * (100.0 + 1000) + 1]), "who": 0},
            {"sum": torch.tensor([2 * (100.0 + 2000) + 5]), "who": 1},
            {"sum": torch.tensor([2 * (100.0 + 1000) + 9]), "who": 0},
        ],
    )
    assert offset == [100.0]


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Unpicklable(),
        lambda n: {"good": floats(3), "bad": threading.Lock()},
        lambda n: (k for k in range(n)),
        lambda n: floats(3).requires_grad_() * 2,
    ],
    ids=["an object with a lock", "a lock in a dict", "a generator", "a grad history"],
)
def test_a_batch_that_cannot_be_pickled_raises_and_the_epoch_goes_on(make: Any) -> None:
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
    assert len(steps[2].value.text) > 20


class FailsToLoad:
    """Pickles well, and raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def explode() -> None:
    raise ValueError("cannot be rebuilt")


def test_a_batch_that_cannot_be_unpickled_raises_and_the_epoch_goes_on() -> None:
    steps = run_ours(
        lambda: {
            "dataset": Made(lambda n: [floats(99), FailsToLoad()] if n == 1 else n, 4),
            "collate_fn": only,
            "num_workers": 2,
        },
        epochs=1,
    )
    assert [step.event for step in steps] == ["iter", "batch", "error", "batch", "batch", "end"]
    assert "cannot be rebuilt" in steps[2].value.text


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
