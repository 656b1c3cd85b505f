"""One global order, cut into steps, shards and ranks: the same whoever looks at it."""

import copy
import itertools
import pickle
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, WeightedRandomSampler

from shmloader.batch.failures import describe_indices
from shmloader.sampling.arguments import Ranks
from shmloader.sampling.indices import PositionedIndices, without_position
from shmloader.sampling.progress import Progress
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import LastBatch

LAST_BATCHES: list[LastBatch] = ["pad", "discard", "keep"]


class Draws:
    """A user's sampler that draws from all three global streams."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            parts = random.randrange(97), int(np.random.randint(97)), int(torch.randint(97, ()))
            yield sum(parts) % max(1, self.length)


KINDS = ["sequential", "shuffled", "torch's sampler", "a sampler that draws"]


def plan_of(
    kind: str,
    length: int,
    *,
    batch_size: int = 1,
    rank: int = 0,
    world_size: int = 1,
    last_batch: LastBatch = "pad",
    seed: int = 0,
) -> SeededOrder:
    items: Any = {"torch's sampler": RandomSampler(range(length)) if length else [],
                  "a sampler that draws": Draws(length)}.get(kind)  # fmt: skip
    return SeededOrder(
        batch_size,
        last_batch,
        seed,
        ranks=Ranks(rank, world_size),
        length=length if items is None else None,
        shuffle=kind == "shuffled",
        items=items,
    )


def epoch_of(plan: SeededOrder, epoch: int = 0) -> list[Any]:
    plan.begin(epoch, Progress())
    return [step.indices for step in plan]


def flat(steps: Iterable[Any]) -> list[Any]:
    return [*itertools.chain.from_iterable(steps)]


def union(plans: list[SeededOrder], epoch: int = 0) -> list[list[Any]]:
    """What the ranks get at each step, one after the other."""
    steps = [epoch_of(plan, epoch) for plan in plans]
    return [flat(ranks) for ranks in itertools.zip_longest(*steps, fillvalue=[])]


cuts = st.tuples(st.integers(1, 8), st.integers(1, 5))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(0, 60),
    cut=cuts,
    last_batch=st.sampled_from(LAST_BATCHES),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_the_ranks_together_have_the_one_global_order(
    kind, length, cut, last_batch, seed, epoch
) -> None:
    share, world_size = cut
    count = share * world_size
    one = plan_of(kind, length, batch_size=length or 1, last_batch="keep", seed=seed)
    order = flat(epoch_of(one, epoch))
    assert len(order) == length
    plans = [
        plan_of(
            kind, length, batch_size=share, rank=rank, world_size=world_size,
            last_batch=last_batch, seed=seed,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    steps = union(plans, epoch)
    together = flat(steps)
    whole = length // count * count
    left = length - whole
    if last_batch == "discard":
        assert together == order[:whole]
    elif last_batch == "keep":
        assert together == order
    else:
        repeats = (count - left) % count if length else 0
        again = list(itertools.islice(itertools.cycle(order or [0]), repeats))
        assert together == order + again
        assert all(len(step) == count for step in steps)
    # Step by step, not only as a whole.
    for number, step in enumerate(steps):
        assert step == together[number * count :][: len(step)]
    # Lengths, and what repeats, rank by rank.
    for rank, plan in enumerate(plans):
        assert len(plan) == len(epoch_of(plan, epoch)) == plan.cut.step_count(length, last_batch)
        repeated = sum(plan.repeats_before(number + 1) for number in range(len(plan)))
        if last_batch != "pad" or left == 0:
            assert repeated == 0
        else:
            assert repeated == plan.repeats_before(len(plan))
            assert repeated == share - min(share, max(0, left - rank * share))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_seed_and_epoch_choose_the_order(kind) -> None:
    orders = [
        flat(epoch_of(plan_of(kind, 40, seed=seed), epoch))
        for seed in range(2)
        for epoch in range(2)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert flat(epoch_of(plan_of(kind, 40, seed=1), 1)) == orders[3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_process_keeps_its_own_streams(kind) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = [drawn() for _ in range(4)]
    seed()
    seen = [drawn()]
    steps = iter(plan_of(kind, 30, batch_size=4))
    for _ in range(3):
        next(steps)
        seen.append(drawn())
    assert seen == expected
    # Nor does what the process draws meanwhile change the order.
    rest = epoch_of(plan_of(kind, 30, batch_size=4))[3:]
    assert [step.indices for step in steps] == rest


def test_a_sampler_that_does_not_draw_from_global_streams_gives_its_own_order() -> None:
    weights = WeightedRandomSampler([1.0, 2.0, 3.0], 20, generator=torch.Generator().manual_seed(3))
    expected = list(weights)
    weights.generator.manual_seed(3)
    plan = SeededOrder(1, "pad", 0, items=weights)
    assert flat(epoch_of(plan)) == expected


def test_repeats_are_counted_in_samples_where_batches_are_dealt() -> None:
    items = [[1, 2, 3], [4, 5, 6], [7, 8], [9]]
    plans = [SeededOrder(None, "pad", 0, items=items, ranks=Ranks(rank, 3)) for rank in range(3)]
    assert [epoch_of(plan) for plan in plans] == [
        [[1, 2, 3], [9]],
        [[4, 5, 6], [1, 2, 3]],
        [[7, 8], [4, 5, 6]],
    ]
    assert [plan.repeats_before(6) for plan in plans] == [0, 3, 3]
    assert [plan.repeats_before(3) for plan in plans] == [0, 0, 0]


@pytest.mark.parametrize("step", [[], [[1], []], [[], [1]]])
def test_a_batch_that_cannot_be_loaded_is_named(step) -> None:
    steps = iter(SeededOrder(None, "pad", 0, items=[[1, 2], step, [3]], ranks=Ranks(0, 1)))
    assert next(steps).indices == [1, 2]
    with pytest.raises(ValueError, match="none of them empty, but batch 1 is"):
        next(steps)


def test_an_epoch_that_has_begun_keeps_its_number():
    plan = plan_of("shuffled", 36, batch_size=12, seed=3)
    begun = iter(plan)
    plan.begin(8, Progress())
    assert [step.epoch for step in begun] == [0, 0, 0]
    assert [step.epoch for step in plan] == [8, 8, 8]


def test_a_plan_follows_a_dataset_that_grows():
    dataset = [1, 2, 3]
    plan = SeededOrder(2, "keep", 0, length=dataset)
    assert (len(plan), [one.indices for one in plan]) == (2, [[0, 1], [2]])
    dataset += [4, 5]
    assert (len(plan), [one.indices for one in plan]) == (3, [[0, 1], [2, 3], [4]])


@pytest.mark.parametrize("step", [[], [(1, 2), (3, 4)], [[], [1]], "key", 7])
def test_what_is_not_divided_is_handed_on_as_it_is(step):
    plan = SeededOrder(None, "keep", 0, items=[step])
    assert [one.indices for one in plan] == [step]


@pytest.mark.parametrize("make", [lambda plan: pickle.loads(pickle.dumps(plan)), copy.deepcopy])
def test_a_copy_of_a_plan_in_work_begins_an_epoch_of_its_own(make):
    plan = plan_of("shuffled", 50, batch_size=12, seed=3)
    begun = iter(plan)
    first = next(begun)
    assert next(iter(make(plan))) == first
    assert next(begun).first == 12


def test_texts_and_users_see_the_indices_alone():
    placed = PositionedIndices([4, 5, 6], 1, 12)
    assert describe_indices(placed) == describe_indices([4, 5, 6]) == "indices 4 to 6"
    assert describe_indices(PositionedIndices("key", 1, 12, is_whole=True)) == "index 'key'"
    assert without_position(placed) == without_position([4, 5, 6]) == [4, 5, 6]
