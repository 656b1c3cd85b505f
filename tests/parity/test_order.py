"""The same samples in the same order, and the same draws from the main process's streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.parity.compare import Failure, both_outcomes, one_step, walk
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
from tests.parity.ways import ALL, BOTH, THREE, Case, Make, compared, tried

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def over(**kwargs: Any) -> dict[str, Any]:
    return {"dataset": Squares(), "batch_size": 4, **kwargs}


def shuffled() -> dict[str, Any]:
    return over(shuffle=True)


def keyed(names: list[Any]) -> dict[str, Any]:
    return {"dataset": Keyed(names), "batch_size": 2, "sampler": names}


def by_batches(batches: Any, **options: Any) -> dict[str, Any]:
    return {"dataset": Squares(), "batch_sampler": batches, **options}


def sampled_by(sampler: Callable[..., Any], *arguments: Any, **options: Any) -> Make:
    return lambda: over(sampler=sampler(*arguments, **options))


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
    "more draws than samples": sampled_by(RandomSampler, range(23), num_samples=60),
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
    "weights without replacement": sampled_by(
        WeightedRandomSampler, torch.arange(1.0, 24.0), 20, replacement=False
    ),
    "more weighted draws than one multinomial gives": lambda: over(
        batch_size=64, sampler=WeightedRandomSampler([1, 2, 3], 1000)
    ),
    "a random subset": sampled_by(SubsetRandomSampler, range(3, 20)),
    "a custom sampler": sampled_by(Backwards, 23),
    "a sampler that draws for each index": sampled_by(Jumping, 23),
    "a list of batches": lambda: by_batches([[0, 1], [5], [22, 3, 3], [7]]),
    "batches of growing size": lambda: by_batches(Swelling(23)),
    "a batch sampler over a random sampler": lambda: by_batches(
        BatchSampler(RandomSampler(Squares()), 5, drop_last=True)
    ),
    "a batch of no samples": lambda: by_batches([[0, 1], [], [2]], collate_fn=as_is),
    "a tensor of indices": lambda: over(sampler=torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])),
    "a range of indices": lambda: over(sampler=range(20, 3, -3)),
    "string keys": lambda: keyed([f"key {n}" for n in range(9)]),
    "keys of many types": lambda: keyed([("a", 1), None, 2.5, b"x", frozenset({1}), "s"]),
    "long keys": lambda: keyed([str(n) * 300_000 for n in range(6)]),
    "an iterator as sampler, used up in the first epoch": sampled_by(iter, range(17)),
}


def epochs_differ(batches: list[Any], _way: str) -> bool:
    order, half = [batch["index"].tolist() for batch in batches], len(batches) // 2
    return order[:half] != order[half:]


def distributed(**options: Any) -> Case:
    return Case(
        sampled_by(DistributedSampler, Squares(), num_replicas=3, **options),
        THREE,
        count=6,
        walk={"epochs": 3, "before_epoch": lambda loader, epoch: loader.sampler.set_epoch(epoch)},
    )


def grow(loader: Any, epoch: int) -> None:
    loader.dataset.size = 7 + 3 * epoch
    assert len(loader) == [4, 5, 7][epoch]


test_batches_come_in_torchs_order = tried(
    9,
    {
        **{
            name: Case(make, check=lambda batches, _: bool(batches))
            for name, make in SAMPLERS.items()
        },
        "shuffle": Case(shuffled, ALL, 12, epochs_differ),
        "shuffle with a generator": Case(
            lambda: over(shuffle=True, generator=generator()), ALL, 12, epochs_differ
        ),
        "drawing with replacement": Case(
            sampled_by(RandomSampler, range(23), replacement=True, num_samples=70),
            ALL,
            36,
            epochs_differ,
        ),
        "weights": Case(
            sampled_by(WeightedRandomSampler, [n % 5 for n in range(23)], 30),
            ALL,
            16,
            epochs_differ,
        ),
        "an endless sampler that is left": Case(
            sampled_by(Forever), ALL, 20, walk={"epochs": 3, "take": [9, 4, 7]}
        ),
        "a rank's part, padded": distributed(rank=1),
        "a rank's part, cut": distributed(rank=2, drop_last=True),
        "a rank's part, unshuffled": distributed(rank=0, shuffle=False),
        "epochs left in the middle": Case(
            shuffled, ALL, 2 + 6 + 1 + 5 + 6, walk={"epochs": 6, "take": [2, None, 0, 1, 5, None]}
        ),
        # Persistent workers keep their first copy, so that the new samples fail there.
        "a growing dataset": Case(
            lambda: {"dataset": Growing(1), "batch_size": 2},
            THREE,
            check=lambda batches, way: len(batches) == (10 if "persistent" in way else 16),
            walk={"epochs": 3, "before_epoch": grow},
        ),
    },
)


@compared(shuffled, quick=1, check=lambda pairs: len(pairs) == 12)
def test_two_iterators_of_one_loader_do_not_touch_each_other(loader: Any) -> list[Any]:
    return [pair for _ in range(2) for pair in zip(loader, loader, strict=True)]


@compared(
    lambda: over(shuffle=True, batch_size=3),
    quick=1,
    check=lambda seen: sum(event == "batch" for _, event, _, _ in seen) == 8 + 6 + 4,
)
def test_iterators_at_different_paces_give_what_they_would_alone(loader: Any) -> list[Any]:
    seen: list[Any] = []
    iterators = [iter(loader) for _ in range(3)]
    for turn in range(12):
        for number, iterator in enumerate(iterators):
            if turn % (number + 1) == 0:
                step = one_step(iterator)
                seen.append((number, step.event, step.value, step.rng.torch))
    return seen


@compared(
    lambda: {"dataset": Squares(5), "batch_size": 2, "shuffle": True},
    quick=1,
    check=lambda pairs: len(pairs) == 9,
)
def test_loops_over_one_loader_can_be_nested(loader: Any) -> list[Any]:
    return [(outer, inner) for outer in loader for inner in loader]


@compared(shuffled, ["two workers"])
def test_two_loaders_side_by_side_draw_as_torchs_do(loader: Any) -> list[Any]:
    other = type(loader)(Squares(15), batch_size=2, shuffle=True, num_workers=1)
    return [pair for _ in range(2) for pair in zip(loader, other, strict=False)]


@compared(over, THREE)
def test_an_exhausted_iterator_stays_exhausted(loader: Any) -> None:
    for calls in (3, 1):
        iterator = iter(loader)
        assert sum(1 for _ in iterator) == 6
        for _ in range(calls):
            with pytest.raises(StopIteration):
                next(iterator)


@compared(shuffled, ["two persistent workers"], check=lambda seen: len(seen) == 2 + 6 + 6)
def test_a_persistent_loader_has_one_iterator_that_starts_again(loader: Any) -> list[Any]:
    first = iter(loader)
    assert loader._iterator is iter(first) is first
    seen = [next(first), next(first)]
    second = iter(loader)
    assert second is first
    return [*seen, *second, *loader]


@compared(over)
def test_a_plain_loader_makes_a_new_iterator_each_time(loader: Any) -> None:
    first, second = iter(loader), iter(loader)
    assert first is not second
    assert iter(first) is first
    assert loader._iterator is None


@compared(
    over, THREE, check=lambda counts: counts == [0, 6, 1, 6, 2, 6, 3, 6, 4, 6, 5, 6, 6, 6] * 2
)
def test_the_iterator_counts_its_batches_and_knows_its_length(loader: Any) -> list[int]:
    counts: list[int] = []
    for _ in range(2):
        iterator = iter(loader)
        counts += [iterator._num_yielded, len(iterator)]
        for _batch in iterator:
            counts += [iterator._num_yielded, len(iterator)]
    return counts


class Counted:
    """A batch sampler that counts what was drawn in the epoch."""

    drawn = 0

    def __iter__(self) -> Any:
        self.drawn = 0
        return self.batches()

    def batches(self) -> Any:
        for first in range(0, 40, 2):
            self.drawn += 1
            yield [first % 23, first % 7]


@compared(lambda: by_batches(Counted()), ALL, quick=7)
def test_as_many_index_batches_are_drawn_ahead(loader: Any) -> list[int]:
    """When ``iter()`` returns, and at each batch: a sampler may depend on it."""
    iterator = iter(loader)
    return [loader.batch_sampler.drawn, *(loader.batch_sampler.drawn for _batch in iterator)]


MEASURED = {"dataset": Measured(11, 11)}
LENGTHS: dict[str, Make] = {
    "a map-style dataset": over,
    "drop_last": lambda: over(drop_last=True),
    "no batching": lambda: over(batch_size=None),
    "a sampler": lambda: over(sampler=[1, 2, 3, 4, 5]),
    "a sampler without len()": lambda: over(sampler=Forever()),
    "a batch sampler": lambda: by_batches([[1], [2, 3]]),
    "a batch sampler without len()": lambda: by_batches(Swelling(9)),
    "an iterable dataset": lambda: {**MEASURED, "batch_size": 4},
    "an iterable dataset, drop_last": lambda: {**MEASURED, "batch_size": 4, "drop_last": True},
    "an iterable dataset, no batching": lambda: {**MEASURED, "batch_size": None},
    "an iterable dataset without len()": lambda: {"dataset": Sharded()},
    "an empty dataset": lambda: {"dataset": [], "batch_size": 4},
    "workers": lambda: over(num_workers=2),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_len_is_torchs_for(case: str) -> None:
    ours, theirs = both_outcomes(lambda cls: len(cls(**LENGTHS[case]())))
    assert ours == theirs


@pytest.mark.parametrize("good", [0, 3, 9])
def test_a_failing_sampler_raises_its_own_error(good: int) -> None:
    @compared(
        sampled_by(Breaking, good),
        check=lambda errors: errors == [Failure(OwnError, "no more indices")],
    )
    def failures(loader: Any) -> list[Failure]:
        return [step.value for step in walk(loader, epochs=1) if step.event == "error"]

    for way in BOTH:
        failures(way)
