"""The same batches from every kind of dataset: map-style, iterable, torch's own, odd ones."""

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
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from shmloader import DataLoader
from tests.parity.compare import (
    TORCH_VERSION,
    both_outcomes,
    one_step,
    outcome,
    run_ours,
    run_torch,
)
from tests.parity.data import (
    ByList,
    Counting,
    Epochs,
    Growing,
    Keyed,
    Made,
    Measured,
    OneShot,
    Sharded,
    Squares,
    Uneven,
    WithoutByList,
    as_is,
)
from tests.parity.ways import BOTH, SOME, THREE, WAYS, Case, compared, tried, with_both_classes

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

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
    "a TensorDataset": lambda: TensorDataset(torch.arange(18.0).reshape(9, 2), torch.arange(9)),
    "a Subset": lambda: Subset(Squares(), [3, 1, 4, 1, 5]),
    "a Subset with __getitems__": lambda: Subset(ByList(), [3, 1, 4, 1, 5]),
    "a Subset of a Subset": lambda: Subset(Subset(ByList(), [5, 4, 3, 2]), [0, 2, 1]),
    "a ConcatDataset": lambda: ConcatDataset([ByList(3), Made(lambda n: (-n, "?"), 5), ByList(2)]),
    "a StackDataset": lambda: StackDataset(ByList(6), Growing(6)),
    "a StackDataset by name": lambda: StackDataset(
        left=ByList(6), right=TensorDataset(torch.arange(6) * 3)
    ),
    "a part of random_split": lambda: random_split(
        Squares(), [0.4, 0.6], generator=torch.Generator().manual_seed(3)
    )[0],
}


class Scaled(Growing):
    """Its main process changes a factor between epochs."""

    factor = 1

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index * self.factor


def scale(loader: Any, epoch: int) -> None:
    loader.dataset.factor = 10**epoch


class CallCounter:
    """A collate function that counts its calls: anew in each epoch's workers."""

    count = 0

    def __call__(self, samples: list[Any]) -> tuple[int, int]:
        self.count += 1
        return self.count, len(samples)


def small(size: int, drop_last: bool) -> Case:
    return Case(
        lambda: {"dataset": Squares(size), "batch_size": 2, "drop_last": drop_last},
        SOME,
        2 * (size // 2 if drop_last else -(-size // 2)),
    )


def from_dataset(dataset: Callable[[], Any], *ways: str, **options: Any) -> Case:
    check = lambda batches, _: bool(batches)  # noqa: E731
    return Case(lambda: {"dataset": dataset(), **options}, ways or BOTH, None, check)


test_a_map_style_dataset_can_be = tried(
    10,
    {
        **{name: from_dataset(make, batch_size=4) for name, make in MAPS.items()},
        **{
            f"{name} without batching": from_dataset(m, batch_size=None) for name, m in MAPS.items()
        },
        **{
            f"{size} samples, drop_last={drop_last}": small(size, drop_last)
            for size in (0, 1, 2, 5)
            for drop_last in (False, True)
        },
        "__getitems__, told by its samples": Case(
            lambda: {"dataset": ByList(), "batch_size": 3},
            check=lambda batches, _: batches[0][1] == ("getitems of list",) * 3,
        ),
        "__getitem__, told by its samples": Case(
            lambda: {"dataset": ByList(), "batch_size": None},
            check=lambda batches, _: batches[0] == [0, "getitem"],
        ),
        "changed by the main process between epochs": Case(
            lambda: {"dataset": Scaled(6), "batch_size": None},
            THREE,
            check=lambda batches, way: (
                batches[6:] == [n * (1 if "persistent" in way else 10) for n in range(6)]
            ),
            walk={"before_epoch": scale},
        ),
        "with a collate function that counts": Case(
            lambda: {"dataset": Squares(12), "batch_size": 2, "collate_fn": CallCounter()},
            SOME,
            check=lambda batches, way: (batches[-1][0] > 6) == (way == "in-process"),
        ),
    },
)


class Remembering(Growing):
    """Its samples change it."""

    def __init__(self) -> None:
        super().__init__(8)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        self.asked.append(index)
        return list(self.asked)


@compared(lambda: {"dataset": Remembering(), "batch_size": 2, "collate_fn": as_is}, SOME)
def test_what_a_sample_changes_in_its_dataset_stays_where_it_is(loader: Any) -> list[Any]:
    batches = [*loader, *loader]
    assert bool(loader.dataset.asked) == (loader.num_workers == 0)
    return batches


class ReadyMade(IterableDataset):
    """Its samples are batches."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for size in (3, 1, 0, 4):
            yield {"x": torch.ones(size, 2), "names": [str(n) for n in range(size)]}


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


def uneven(**options: Any) -> Case:
    return Case(lambda: {"dataset": Uneven([9, 3, 6]), **options}, SOME, walk={"epochs": 3})


test_an_iterable_dataset_can_be = tried(
    6,
    {
        **{
            name: Case(lambda make=make: {"dataset": make(), "batch_size": 2}, SOME)
            for name, make in STREAMS.items()
        },
        "uneven with drop_last": uneven(batch_size=4, drop_last=True),
        "uneven without batching": uneven(batch_size=None),
        "shorter than a batch": uneven(batch_size=100),
        "endless, and left": Case(
            lambda: {"dataset": Counting(), "batch_size": 3},
            SOME,
            13,
            walk={"epochs": 3, "take": [5, 0, 8]},
        ),
        "of ready-made batches": from_dataset(ReadyMade, batch_size=None),
    },
)

LEN_CASES = [
    *((says, size, way) for says in (0, 2, 5, 50) for size in (1, 3, None) for way in BOTH),
    *((2, 1, way) for way in SOME[2:]),
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
    assert warned == max(0, sum(theirs.value[1]) - 2 * says)


def test_a_stream_without_a_call_of_len_never_warns() -> None:
    loader = DataLoader(Measured(2, 6), num_workers=1)
    assert outcome(lambda: sum(1 for _ in loader)) == (6, None, [])


@with_both_classes(lambda found: (found.value, len(found.warned)) == ([3, 4], 2))
def test_len_called_in_the_middle_of_an_epoch_counts_from_the_next(cls: Any) -> list[int]:
    loader = cls(Measured(2, 4), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    len(loader)
    return [sum(1 for _ in iterator), sum(1 for _ in loader)]


@pytest.mark.parametrize(
    ("dataset", "total"),
    [(Squares, 12), (lambda: Uneven([9, 3, 6]), None), (Sharded, None), (lambda: Squares(0), 0)],
    ids=["map-style", "uneven streams", "dealt streams", "empty"],
)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [way for way in SOME if way != "in-process"])
def test_any_order_gives_the_same_batches_as_a_set(dataset: Any, total: Any, way: str) -> None:
    def make() -> dict[str, Any]:
        return {"dataset": dataset(), "batch_size": 2, "in_order": False, **WAYS[way]}

    def drive(loader: Any) -> list[Counter[str]]:
        return [Counter(repr(batch) for batch in loader) for _ in range(3)]

    theirs = run_torch(make, drive)
    assert theirs[0] == theirs[1] == theirs[2]
    assert total in (None, theirs[0].total())
    assert run_ours(make, drive) == theirs


test_any_order_is_the_samplers_order_where_nothing_can_overtake = tried(
    2, {"squares": from_dataset(Squares, "in-process", "one worker", batch_size=4, in_order=False)}
)


class Gate(Growing):
    """Sample 0 waits until the gate is opened."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.open = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if index == 0 and not self.open.wait(30):
            raise TimeoutError("nobody opened the gate")
        return index


class GateStream(Gate, IterableDataset):
    """The first worker's stream waits until the gate is opened."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        self[info.id]
        return iter(range(100 * info.id, 100 * info.id + self.size))


@pytest.mark.parametrize(
    ("gate", "first", "all_of_them"),
    [
        # All but what the slow worker holds.
        (lambda: Gate(12), 10, range(12)),
        (lambda: GateStream(6), 6, [*range(6), *range(100, 106)]),
    ],
    ids=["sample", "stream"],
)
def test_a_slow_one_holds_up_nobody_when_any_order_will_do(gate, first, all_of_them) -> None:
    def drive(loader: Any) -> list[int]:
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(first)]
        assert 0 not in seen
        loader.dataset.open.set()
        return sorted([*seen, *iterator])

    def make() -> dict[str, Any]:
        return {"dataset": gate(), "batch_size": None, "num_workers": 2, "in_order": False}

    if TORCH_VERSION >= (2, 7):  # before, torch's in_order=False waited all the same
        assert run_torch(make, drive) == list(all_of_them)
    assert run_ours(make, drive) == list(all_of_them)


@compared(
    lambda: {
        "dataset": Keyed(list("abcde")),
        "sampler": ["a", "b", "missing", "c", "d", "lost", "e"],
        "batch_size": None,
        "in_order": False,
    },
    ["two workers"],
    check=lambda found: found == [*(repr(name) for name in "abcde"), KeyError, KeyError],
)
def test_an_error_in_any_order_loses_its_own_batch_only(loader: Any) -> list[Any]:
    iterator, seen, failed = iter(loader), [], []
    while (step := one_step(iterator)).event != "end":
        if step.event == "error":
            failed.append(step.value.kind)
        else:
            seen.append(step.value[0])
    return [*sorted(seen), *failed]
