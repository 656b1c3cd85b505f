"""The same samples in the same order, and the same draws from the main process's streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.parity.compare import (
    Failure,
    assert_same,
    both_outcomes,
    one_step,
    run_both,
    run_ours,
    run_torch,
    walk,
)
from tests.parity.data import (
    Backwards,
    Breaking,
    Forever,
    Growing,
    Jumping,
    Keyed,
    Measured,
    OwnError,
    Sharded,
    Squares,
    Swelling,
    as_is,
)
from tests.parity.objects import let

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

Make = Callable[[], dict[str, Any]]

IN_PROCESS: dict[str, Any] = {"num_workers": 0}
TWO: dict[str, Any] = {"num_workers": 2}
WAYS = {
    "in-process": IN_PROCESS,
    "two workers": TWO,
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
    "one worker": {"num_workers": 1},
    "three workers, one batch ahead": {"num_workers": 3, "prefetch_factor": 1},
    "two workers, five batches ahead": {"num_workers": 2, "prefetch_factor": 5},
    "three persistent workers": {"num_workers": 3, "persistent_workers": True},
}


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def over(**kwargs: Any) -> dict[str, Any]:
    return {"dataset": Squares(), "batch_size": 4, **kwargs}


def keyed(names: list[Any]) -> dict[str, Any]:
    return {"dataset": Keyed(names), "batch_size": 2, "sampler": names}


MAIN: dict[str, Make] = {
    "shuffle": lambda: over(shuffle=True),
    "shuffle with a generator": lambda: over(shuffle=True, generator=generator()),
    "drawing with replacement": lambda: over(
        sampler=RandomSampler(Squares(), replacement=True, num_samples=70)
    ),
    "weights": lambda: over(sampler=WeightedRandomSampler([n % 5 for n in range(23)], 30)),
}

SAMPLERS: dict[str, Make] = {
    "no sampler": over,
    "a batch size of one": lambda: {"dataset": Squares(5)},
    "drop_last": lambda: over(drop_last=True),
    "drop_last and shuffle": lambda: over(drop_last=True, shuffle=True),
    "a generator without shuffle": lambda: over(generator=generator()),
    "no batching": lambda: over(batch_size=None),
    "no batching, shuffled": lambda: over(batch_size=None, shuffle=True),
    "no batching, a list of indices for each item": lambda: {
        "dataset": torch.arange(40).reshape(10, 4),
        "batch_size": None,
        "sampler": [[1, 2], [3], [9, 0, 9]],
    },
    "more draws than samples": lambda: over(sampler=RandomSampler(Squares(), num_samples=60)),
    "a sampler with its own generator": lambda: over(
        sampler=RandomSampler(Squares(), generator=generator(3)), generator=generator(4)
    ),
    "replacement from a shared generator": lambda: let(
        generator(),
        lambda g: over(
            sampler=RandomSampler(Squares(), replacement=True, num_samples=40, generator=g),
            generator=g,
        ),
    ),
    "weights without replacement": lambda: over(
        sampler=WeightedRandomSampler(torch.arange(1.0, 24.0), 20, replacement=False)
    ),
    "a random subset": lambda: over(sampler=SubsetRandomSampler(range(3, 20))),
    "a custom sampler": lambda: over(sampler=Backwards(23)),
    "a sampler that draws for each index": lambda: over(sampler=Jumping(23)),
    "a list of batches": lambda: {
        "dataset": Squares(),
        "batch_sampler": [[0, 1], [5], [22, 3, 3], [7]],
    },
    "batches of growing size": lambda: {"dataset": Squares(), "batch_sampler": Swelling(23)},
    "a batch sampler over a random sampler": lambda: {
        "dataset": Squares(),
        "batch_sampler": BatchSampler(RandomSampler(Squares()), 5, drop_last=True),
    },
    "a batch of no samples": lambda: {
        "dataset": Squares(),
        "batch_sampler": [[0, 1], [], [2]],
        "collate_fn": as_is,
    },
    "a tensor of indices": lambda: over(sampler=torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])),
    "a range of indices": lambda: over(sampler=range(20, 3, -3)),
    "string keys": lambda: keyed([f"key {n}" for n in range(9)]),
    "keys of many types": lambda: keyed([("a", 1), None, 2.5, b"x", frozenset({1}), "s"]),
    "long keys": lambda: keyed([str(n) * 300_000 for n in range(6)]),
    "an iterator as sampler, used up in the first epoch": lambda: over(
        sampler=iter(range(17)),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [IN_PROCESS, TWO], ids=["in-process", "two workers"])
@pytest.mark.parametrize("case", SAMPLERS)
def test_batches_come_in_torchs_order_with(case: str, way: dict[str, Any]) -> None:
    assert run_both(lambda: {**SAMPLERS[case](), **way})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", MAIN)
def test_every_way_of_working_gives_torchs_order_with(case: str, way: str) -> None:
    batches = run_both(lambda: {**MAIN[case](), **WAYS[way]}, epochs=2)
    assert len(batches) >= 12
    order = [b["index"].tolist() for b in batches]
    assert order[: len(order) // 2] != order[len(order) // 2 :], "both epochs gave one order"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_an_endless_sampler_can_be_left_and_started_again(way: str) -> None:
    batches = run_both(lambda: over(sampler=Forever(), **WAYS[way]), epochs=3, take=[9, 4, 7])
    assert len(batches) == 20


def next_epoch(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["in-process", "two workers", "two persistent workers"])
@pytest.mark.parametrize(
    "options",
    [{"rank": 1}, {"rank": 2, "drop_last": True}, {"rank": 0, "shuffle": False}],
    ids=["padded", "cut", "unshuffled"],
)
def test_a_distributed_sampler_gives_its_ranks_part(way: str, options: dict[str, Any]) -> None:
    def make() -> dict[str, Any]:
        return over(sampler=DistributedSampler(Squares(), num_replicas=3, **options), **WAYS[way])

    assert len(run_both(make, epochs=3, before_epoch=next_epoch)) == 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["in-process", "two workers", "two persistent workers"])
def test_the_size_of_a_weighted_sampler_may_pass_one_multinomial_draw(way: str) -> None:
    run_both(
        lambda: over(batch_size=64, sampler=WeightedRandomSampler([1, 2, 3], 1000), **WAYS[way])
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_left_in_the_middle_does_not_reach_into_the_next(way: str) -> None:
    batches = run_both(
        lambda: over(shuffle=True, **WAYS[way]), epochs=6, take=[2, None, 0, 1, 5, None]
    )
    assert len(batches) == 2 + 6 + 0 + 1 + 5 + 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_two_iterators_of_one_loader_do_not_touch_each_other(way: str) -> None:
    def make() -> dict[str, Any]:
        return over(shuffle=True, **WAYS[way])

    def drive(loader: Any) -> list[Any]:
        return [pair for _ in range(2) for pair in zip(loader, loader, strict=True)]

    ours, theirs = run_ours(make, drive), run_torch(make, drive)
    assert len(theirs) == 12
    assert_same(ours, theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_iterators_at_different_paces_give_what_they_would_alone(way: str) -> None:
    def make() -> dict[str, Any]:
        return over(shuffle=True, batch_size=3, **WAYS[way])

    def drive(loader: Any) -> list[Any]:
        seen: list[Any] = []
        iterators = [iter(loader) for _ in range(3)]
        for turn in range(12):
            for number, iterator in enumerate(iterators):
                if turn % (number + 1) == 0:
                    step = one_step(iterator)
                    seen.append((number, step.event, step.value, step.rng.torch))
        return seen

    ours, theirs = run_ours(make, drive), run_torch(make, drive)
    assert sum(event == "batch" for _, event, _, _ in theirs) == 8 + 6 + 4
    assert_same(ours, theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_loops_over_one_loader_can_be_nested(way: str) -> None:
    def make() -> dict[str, Any]:
        return {"dataset": Squares(5), "batch_size": 2, "shuffle": True, **WAYS[way]}

    def drive(loader: Any) -> list[Any]:
        return [(outer, inner) for outer in loader for inner in loader]

    ours, theirs = run_ours(make, drive), run_torch(make, drive)
    assert len(theirs) == 9
    assert_same(ours, theirs)


def test_two_loaders_side_by_side_draw_as_torchs_do() -> None:
    def make() -> dict[str, Any]:
        return over(shuffle=True, **TWO)

    def drive(loader: Any) -> list[Any]:
        other = type(loader)(Squares(15), batch_size=2, shuffle=True, num_workers=1)
        return [pair for _ in range(2) for pair in zip(loader, other, strict=False)]

    assert_same(run_ours(make, drive), run_torch(make, drive))


# ---------------------------------------------------------------- ends


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["in-process", "two workers", "two persistent workers"])
def test_an_exhausted_iterator_stays_exhausted(way: str) -> None:
    def drive(loader: Any) -> None:
        iterator = iter(loader)
        assert sum(1 for _ in iterator) == 6
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        again = iter(loader)
        assert sum(1 for _ in again) == 6
        with pytest.raises(StopIteration):
            next(again)

    run_torch(lambda: over(**WAYS[way]), drive)
    run_ours(lambda: over(**WAYS[way]), drive)


def test_a_persistent_loader_has_one_iterator_that_starts_again() -> None:
    def drive(loader: Any) -> list[Any]:
        first = iter(loader)
        assert loader._iterator is first
        assert iter(first) is first
        seen = [next(first), next(first)]
        second = iter(loader)
        assert second is first
        return [*seen, *second, *loader]

    def make() -> dict[str, Any]:
        return over(shuffle=True, **WAYS["two persistent workers"])

    ours, theirs = run_ours(make, drive), run_torch(make, drive)
    assert len(theirs) == 2 + 6 + 6
    assert_same(ours, theirs)


@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_a_plain_loader_makes_a_new_iterator_each_time(way: str) -> None:
    def drive(loader: Any) -> None:
        first, second = iter(loader), iter(loader)
        assert first is not second
        assert iter(first) is first
        assert loader._iterator is None

    run_torch(lambda: over(**WAYS[way]), drive)
    run_ours(lambda: over(**WAYS[way]), drive)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["in-process", "two workers", "two persistent workers"])
def test_the_iterator_counts_its_batches(way: str) -> None:
    def drive(loader: Any) -> list[int]:
        counts: list[int] = []
        for _ in range(2):
            iterator = iter(loader)
            counts += [iterator._num_yielded]
            counts += [iterator._num_yielded for _batch in iterator]
        return counts

    ours = run_ours(lambda: over(**WAYS[way]), drive)
    assert ours == run_torch(lambda: over(**WAYS[way]), drive) == [0, 1, 2, 3, 4, 5, 6] * 2


@pytest.mark.parametrize("way", WAYS)
def test_as_many_index_batches_are_drawn_ahead(way: str) -> None:
    """When ``iter()`` returns, and at each batch: a sampler may depend on it."""
    drawn = 0

    def batches() -> Any:
        nonlocal drawn
        for first in range(0, 40, 2):
            drawn += 1
            yield [first % 23, first % 7]

    class Counted:
        def __iter__(self) -> Any:
            nonlocal drawn
            drawn = 0
            return batches()

    def drive(loader: Any) -> list[int]:
        iterator = iter(loader)
        counts = [drawn]
        counts += [drawn for _batch in iterator]
        return counts

    def make() -> dict[str, Any]:
        return {"dataset": Squares(), "batch_sampler": Counted(), **WAYS[way]}

    assert run_ours(make, drive) == run_torch(make, drive)


# ---------------------------------------------------------------- length

LENGTHS: dict[str, Make] = {
    "a map-style dataset": over,
    "drop_last": lambda: over(drop_last=True),
    "no batching": lambda: over(batch_size=None),
    "a sampler": lambda: over(sampler=[1, 2, 3, 4, 5]),
    "a sampler without len()": lambda: over(sampler=Forever()),
    "a batch sampler": lambda: {"dataset": Squares(), "batch_sampler": [[1], [2, 3]]},
    "a batch sampler without len()": lambda: {
        "dataset": Squares(),
        "batch_sampler": Swelling(9),
    },
    "an iterable dataset": lambda: {"dataset": Measured(11, 11), "batch_size": 4},
    "an iterable dataset, drop_last": lambda: {
        "dataset": Measured(11, 11),
        "batch_size": 4,
        "drop_last": True,
    },
    "an iterable dataset, no batching": lambda: {
        "dataset": Measured(11, 11),
        "batch_size": None,
    },
    "an iterable dataset without len()": lambda: {"dataset": Sharded()},
    "an empty dataset": lambda: {"dataset": [], "batch_size": 4},
    "workers": lambda: over(num_workers=2),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_len_is_torchs_for(case: str) -> None:
    ours, theirs = both_outcomes(lambda cls: len(cls(**LENGTHS[case]())))
    assert ours == theirs


@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_len_of_the_iterator_is_torchs(way: str) -> None:
    def drive(loader: Any) -> list[int]:
        iterator = iter(loader)
        return [len(iterator), *(len(iterator) for _ in iterator)]

    ours = run_ours(lambda: over(**WAYS[way]), drive)
    assert ours == run_torch(lambda: over(**WAYS[way]), drive)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["in-process", "two workers", "two persistent workers"])
def test_a_growing_dataset_is_seen_as_torch_sees_it(way: str) -> None:
    """Persistent workers keep their first copy, so that the new samples fail there."""

    def grow(loader: Any, epoch: int) -> None:
        loader.dataset.size = 7 + 3 * epoch
        assert len(loader) == [4, 5, 7][epoch]

    batches = run_both(
        lambda: {"dataset": Growing(1), "batch_size": 2, **WAYS[way]}, epochs=3, before_epoch=grow
    )
    expected = 4 + 5 + 7 if "persistent" not in way else 4 + 3 + 3
    assert len(batches) == expected


# ---------------------------------------------------------------- samplers that fail


@pytest.mark.sampled(5)
@pytest.mark.parametrize("good", [0, 3, 9])
@pytest.mark.parametrize("way", ["in-process", "two workers"])
def test_a_failing_sampler_raises_its_own_error(way: str, good: int) -> None:
    def drive(loader: Any) -> list[Failure]:
        steps = walk(loader, epochs=1)
        return [step.value for step in steps if step.event == "error"]

    def make() -> dict[str, Any]:
        return {"dataset": Squares(), "sampler": Breaking(good), **WAYS[way]}

    theirs = run_torch(make, drive)
    assert theirs == [Failure(OwnError, "no more indices")]
    assert run_ours(make, drive) == theirs


def test_samplers_given_are_kept_by_identity() -> None:
    sampler = SequentialSampler(Squares())
    batch_sampler = BatchSampler(sampler, 3, False)
    assert run_ours(lambda: over(sampler=sampler), lambda loader: loader.sampler) is sampler
    ours = run_ours(
        lambda: {"dataset": Squares(), "batch_sampler": batch_sampler},
        lambda loader: (loader.batch_sampler, loader._index_sampler),
    )
    assert ours[0] is batch_sampler
    assert ours[1] is batch_sampler
