"""The same batches from every kind of dataset: map-style, iterable, torch's own, odd ones."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from torch.utils.data import (
    DataLoader as TorchLoader,
)

from shmloader import DataLoader
from tests.parity.compare import (
    TORCH_VERSION,
    both_outcomes,
    one_step,
    outcome,
    run_both,
    run_ours,
    run_torch,
    settle_torch,
)
from tests.parity.data import (
    ByList,
    Counting,
    Epochs,
    Growing,
    Keyed,
    Measured,
    OneShot,
    Sharded,
    Squares,
    Uneven,
    WithoutByList,
    as_is,
)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WAYS: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "one worker": {"num_workers": 1},
    "two workers": {"num_workers": 2},
    "three workers, one batch ahead": {"num_workers": 3, "prefetch_factor": 1},
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
}
WAYS_OF_LEN = ["in-process", "two workers"]


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(18.0).reshape(9, 2), torch.arange(9))


# ---------------------------------------------------------------- map-style

MAPS: dict[str, Callable[[], Any]] = {
    "a class without a base": lambda: Squares(9),
    "a list": lambda: [torch.full((2,), n) for n in range(7)],
    "a tuple of numbers": lambda: (1.5, 2.5, 3.5),
    "a string": lambda: "seven letters",
    "bytes": lambda: b"bytes",
    "a range": lambda: range(5, 12),
    "a tensor": lambda: torch.arange(20).reshape(10, 2),
    "an array": lambda: np.arange(20, dtype=np.uint16).reshape(10, 2),
    "an array of numbers": lambda: np.linspace(0, 1, 9),
    "a dict by number": lambda: {n: {"n": n, "s": str(n)} for n in range(6)},
    "__getitems__": ByList,
    "__getitems__ that is None": WithoutByList,
    "a TensorDataset": tensors,
    "a Subset": lambda: Subset(Squares(), [3, 1, 4, 1, 5]),
    "a Subset with __getitems__": lambda: Subset(ByList(), [3, 1, 4, 1, 5]),
    "a Subset of a Subset": lambda: Subset(Subset(ByList(), [5, 4, 3, 2]), [0, 2, 1]),
    "a ConcatDataset": lambda: ConcatDataset([ByList(3), WithoutListNumbers(5), ByList(2)]),
    "a StackDataset": lambda: StackDataset(ByList(6), Growing(6)),
    "a StackDataset by name": lambda: StackDataset(left=ByList(6), right=tensors_of(6)),
    "a part of random_split": lambda: random_split(
        Squares(), [0.4, 0.6], generator=torch.Generator().manual_seed(3)
    )[0],
}


class WithoutListNumbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, str]:
        return -index, "other"


def tensors_of(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size) * 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("way", ["in-process", "two workers"])
@pytest.mark.parametrize("case", MAPS)
def test_a_map_style_dataset_can_be(case: str, way: str, batch_size: int | None) -> None:
    assert run_both(lambda: {"dataset": MAPS[case](), "batch_size": batch_size, **WAYS[way]})


def test_getitems_is_asked_for_a_batch_and_only_then() -> None:
    batches = run_both(lambda: {"dataset": ByList(), "batch_size": 3, "num_workers": 2})
    assert batches[0][1] == ("getitems of list",) * 3
    batches = run_both(lambda: {"dataset": ByList(), "batch_size": None, "num_workers": 2})
    assert batches[0] == [0, "getitem"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_datasets_smaller_than_the_pool_or_the_batch(size: int, drop_last: bool, way: str) -> None:
    batches = run_both(
        lambda: {
            "dataset": Squares(size),
            "batch_size": 2,
            "drop_last": drop_last,
            **WAYS[way],
        }
    )
    assert len(batches) == 2 * (size // 2 if drop_last else -(-size // 2))


def test_an_empty_dataset_cannot_be_shuffled() -> None:
    ours, theirs = both_outcomes(lambda cls: cls([], shuffle=True, num_workers=2))
    assert theirs.failure is not None
    assert ours == theirs


def test_changes_made_in_main_reach_the_workers_of_the_next_epoch() -> None:
    class Scaled(Dataset):
        factor = 1

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            return index * self.factor

    def scale(loader: Any, epoch: int) -> None:
        loader.dataset.factor = 10**epoch

    def make(way: str) -> dict[str, Any]:
        return {"dataset": Scaled(), "batch_size": None, **WAYS[way]}

    for way in ("in-process", "two workers"):
        assert run_both(lambda way=way: make(way), before_epoch=scale)[6:] == list(range(0, 60, 10))
    persistent = run_both(lambda: make("two persistent workers"), before_epoch=scale)
    assert persistent[6:] == list(range(6))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_sample_changes_in_its_dataset_stays_where_it_is(way: str) -> None:
    class Remembering(Dataset):
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> list[int]:
            self.asked.append(index)
            return list(self.asked)

    def drive(loader: Any) -> tuple[list[Any], list[int]]:
        return [*loader, *loader], loader.dataset.asked

    def make() -> dict[str, Any]:
        return {"dataset": Remembering(), "batch_size": 2, "collate_fn": as_is, **WAYS[way]}

    theirs = run_torch(make, drive)
    assert run_ours(make, drive) == theirs
    assert bool(theirs[1]) == (way == "in-process")


@pytest.mark.slow
def test_the_collate_fn_and_the_dataset_are_copied_for_each_epoch() -> None:
    """A stateful collate_fn counts anew in each epoch's workers, and on in persistent ones."""

    class CallCounter:
        count = 0

        def __call__(self, samples: list[Any]) -> tuple[int, int]:
            self.count += 1
            return self.count, len(samples)

    for way, options in WAYS.items():
        batches = run_both(
            lambda options=options: {
                "dataset": Squares(12),
                "batch_size": 2,
                "collate_fn": CallCounter(),
                **options,
            }
        )
        assert (batches[-1][0] > 6) == (way == "in-process")


# ---------------------------------------------------------------- iterable

STREAMS: dict[str, Callable[[], Any]] = {
    "cards dealt to the workers": Sharded,
    "fewer samples than workers": lambda: Sharded(1),
    "no samples": lambda: Sharded(0),
    "uneven streams": lambda: Uneven([9, 3, 6]),
    "an empty stream among others": lambda: Uneven([0, 7, 2]),
    "the last stream the longest": lambda: Uneven([1, 2, 13]),
    "streams that end together": lambda: Uneven([4, 4, 4]),
    "an iterator of its own": lambda: OneShot(7),
    "a count of its epochs": Epochs,
    "a chain": lambda: ChainDataset([Uneven([3, 2, 1]), Uneven([1, 5, 2])]),
    "a sum of datasets": lambda: Uneven([2, 2, 2]) + Uneven([1, 0, 3]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", STREAMS)
def test_an_iterable_dataset_can_be(case: str, way: str) -> None:
    run_both(lambda: {"dataset": STREAMS[case](), "batch_size": 2, **WAYS[way]})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [{"batch_size": 4, "drop_last": True}, {"batch_size": None}, {"batch_size": 100}],
    ids=["drop_last", "no batching", "a batch longer than the stream"],
)
def test_an_iterable_dataset_with(options: dict[str, Any], way: str) -> None:
    run_both(lambda: {"dataset": Uneven([9, 3, 6]), **options, **WAYS[way]}, epochs=3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_an_endless_stream_can_be_left(way: str) -> None:
    batches = run_both(
        lambda: {"dataset": Counting(), "batch_size": 3, **WAYS[way]}, epochs=3, take=[5, 0, 8]
    )
    assert len(batches) == 13


@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_ready_made_batches_pass_through_a_stream_without_batching(way: str) -> None:
    class Batches(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for size in (3, 1, 0, 4):
                yield {"x": torch.ones(size, 2), "names": [str(n) for n in range(size)]}

    assert run_both(lambda: {"dataset": Batches(), "batch_size": None, **WAYS[way]})


LEN_CASES = [
    *((says, size, way) for says in (0, 2, 5, 50) for size in (1, 3, None) for way in WAYS_OF_LEN),
    *((2, 1, way) for way in WAYS if way not in WAYS_OF_LEN),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("says", "batch_size", "way"), LEN_CASES)
def test_a_stream_longer_than_its_len_warns_in_torchs_words(
    says: int, batch_size: int | None, way: str
) -> None:
    def go(cls: Any) -> tuple[int, list[int], int | None]:
        loader = cls(Measured(says, 6), batch_size=batch_size, **WAYS[way])
        length = len(loader)
        counts = [sum(1 for _ in loader), sum(1 for _ in loader)]
        return length, counts, loader._IterableDataset_len_called

    ours, theirs = both_outcomes(go)
    assert ours == theirs
    warned = sum("Length of IterableDataset <" in text for _, text in theirs.warned)
    batches = sum(theirs.value[1])
    assert warned == max(0, batches - 2 * says)


def test_a_stream_without_a_call_of_len_never_warns() -> None:
    def go(cls: Any) -> int:
        return sum(1 for _ in cls(Measured(2, 6), num_workers=1))

    assert outcome(go, DataLoader) == (6, None, [])


def test_len_called_in_the_middle_of_an_epoch_counts_from_the_next() -> None:
    def go(cls: Any) -> list[int]:
        loader = cls(Measured(2, 4), num_workers=1, persistent_workers=True)
        iterator = iter(loader)
        next(iterator)
        len(loader)
        return [sum(1 for _ in iterator), sum(1 for _ in loader)]

    ours, theirs = both_outcomes(go)
    assert ours == theirs
    assert theirs.value == [3, 4]
    assert len(theirs.warned) == 2


# ---------------------------------------------------------------- in_order=False


def content(batches: list[Any]) -> Counter[str]:
    return Counter(repr(batch) for batch in batches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "way", ["one worker", "two workers", "three workers, one batch ahead", "two persistent workers"]
)
@pytest.mark.parametrize(
    "dataset",
    [Squares, lambda: Uneven([9, 3, 6]), lambda: Sharded(25), lambda: Squares(0)],
    ids=["map-style", "uneven streams", "dealt streams", "empty"],
)
def test_any_order_gives_the_same_batches_as_a_set(dataset: Any, way: str) -> None:
    def make() -> dict[str, Any]:
        return {"dataset": dataset(), "batch_size": 2, "in_order": False, **WAYS[way]}

    def drive(loader: Any) -> list[Counter[str]]:
        return [content(list(loader)) for _ in range(3)]

    theirs = run_torch(make, drive)
    assert theirs[0] == theirs[1] == theirs[2]
    if isinstance(dataset(), IterableDataset) and isinstance(dataset(), Sharded):
        # Which worker makes a batch is fixed for streams: the shards are the same.
        assert theirs[0].total() == len(list(TorchLoader(dataset(), 2, **WAYS[way])))
        settle_torch()
    assert run_ours(make, drive) == theirs


@pytest.mark.parametrize("way", ["in-process", "one worker"])
def test_any_order_is_the_samplers_order_where_nothing_can_overtake(way: str) -> None:
    assert run_both(lambda: {"dataset": Squares(), "batch_size": 4, "in_order": False, **WAYS[way]})


class Gate:
    """Sample 0 waits until the gate is opened."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.open = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index == 0 and not self.open.wait(30):
            raise TimeoutError("nobody opened the gate")
        return index


class GateStream(IterableDataset):
    """The first worker's stream waits until the gate is opened."""

    def __init__(self) -> None:
        self.open = multiprocessing.get_context("fork").Event()

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        if info.id == 0 and not self.open.wait(30):
            raise TimeoutError("nobody opened the gate")
        return iter(range(100 * info.id, 100 * info.id + 6))


def test_a_slow_sample_holds_up_nobody_when_any_order_will_do() -> None:
    def drive(loader: Any) -> list[int]:
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(10)]  # all but what the slow worker holds
        assert 0 not in seen
        loader.dataset.open.set()
        return sorted([*seen, *iterator])

    def make() -> dict[str, Any]:
        return {"dataset": Gate(12), "batch_size": None, "num_workers": 2, "in_order": False}

    if TORCH_VERSION >= (2, 7):  # before, torch's in_order=False waited all the same
        assert run_torch(make, drive) == list(range(12))
    assert run_ours(make, drive) == list(range(12))


def test_a_slow_stream_holds_up_nobody_when_any_order_will_do() -> None:
    def drive(loader: Any) -> list[int]:
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(6)]
        assert seen == list(range(100, 106))
        loader.dataset.open.set()
        return sorted([*seen, *iterator])

    def make() -> dict[str, Any]:
        return {"dataset": GateStream(), "batch_size": None, "num_workers": 2, "in_order": False}

    expected = [*range(6), *range(100, 106)]
    if TORCH_VERSION >= (2, 7):  # before, torch's in_order=False waited all the same
        assert run_torch(make, drive) == expected
    assert run_ours(make, drive) == expected


def test_a_slow_sample_is_waited_for_when_order_matters() -> None:
    def drive(loader: Any) -> list[int]:
        iterator = iter(loader)
        loader.dataset.open.set()
        return list(iterator)

    def make() -> dict[str, Any]:
        return {"dataset": Gate(12), "batch_size": None, "num_workers": 2}

    assert run_ours(make, drive) == list(range(12))


def test_an_error_in_any_order_loses_its_own_batch_only() -> None:
    def drive(loader: Any) -> tuple[list[Any], int]:
        iterator = iter(loader)
        seen, failed = [], 0
        while (step := one_step(iterator)).event != "end":
            if step.event == "error":
                assert step.value.kind is KeyError
                failed += 1
            else:
                seen.append(step.value[0])
        return sorted(seen), failed

    def make() -> dict[str, Any]:
        names = ["a", "b", "c", "d", "e"]
        return {
            "dataset": Keyed(names),
            "sampler": ["a", "b", "missing", "c", "d", "lost", "e"],
            "batch_size": None,
            "num_workers": 2,
            "in_order": False,
        }

    expected = ([repr(name) for name in "abcde"], 2)
    assert run_torch(make, drive) == expected
    assert run_ours(make, drive) == expected
