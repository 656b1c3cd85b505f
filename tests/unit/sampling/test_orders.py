"""Orders: permutations, their steps, and one global order, cut into shards and ranks."""

import collections
import copy
import itertools
import pickle
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, WeightedRandomSampler

from shmloader.batch.failures import describe_indices
from shmloader.sampling import indices
from shmloader.sampling.arguments import Ranks
from shmloader.sampling.indices import (
    IndexArray,
    Permutation,
    PositionedIndices,
    as_list,
    without_position,
)
from shmloader.sampling.progress import Progress
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.sampling.steps import Cut, LastBatch, OrderSteps

KNOWN_SORTED = [7, 3, 1, 2, 6, 8, 0, 5, 4, 9]
KNOWN_COMPUTED = [271114896, 865706976, 416857383, 665275945, 45467214]


def whole(length: int, *key: int) -> list[int]:
    return Permutation(length, *key).at(np.arange(length)).tolist()


@pytest.fixture(params=["sorted", "computed"])
def way(request, monkeypatch) -> str:
    """Both ways of making it, whatever the length."""
    if request.param == "computed":
        monkeypatch.setattr(indices, "_SORTED", 1)
    return request.param


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 16, 17, 1000, 65_537])
def test_each_number_comes_once(way, length) -> None:
    assert sorted(whole(length, 3, 1)) == list(range(length))


def test_long_orders_are_computed_and_short_ones_sorted() -> None:
    assert Permutation(indices._SORTED)._order is not None
    length = indices._SORTED + 1
    assert Permutation(length)._order is None
    assert sorted(whole(length, 1)) == list(range(length))


@given(st.data())
def test_any_part_is_that_of_the_whole(data) -> None:
    length = data.draw(st.integers(1, 300))
    order = Permutation(length, 5)
    positions = data.draw(st.lists(st.integers(0, length - 1)))
    found = order.at(np.array(positions, dtype=np.int64))
    assert found.tolist() == [whole(length, 5)[position] for position in positions]
    assert found.dtype == np.int64


def test_length_seed_and_epoch_choose_the_order(way) -> None:
    orders = {tuple(whole(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert whole(50, 1, 2) == whole(50, 1, 2)
    assert whole(51, 1, 2)[:50] != whole(50, 1, 2)


def test_short_orders_are_all_equally_likely() -> None:
    count = 12_000
    seen = collections.Counter(tuple(whole(4, seed)) for seed in range(count))
    mean = count / 24
    chi_squared = sum(
        (seen[order] - mean) ** 2 / mean for order in itertools.permutations(range(4))
    )
    assert chi_squared < 49.7  # one in a thousand of random ones is above


@pytest.mark.sampled(1)
def test_every_number_is_equally_likely_everywhere_and_after_every_other(way) -> None:
    length, count = 30, 3000
    at, after = np.zeros((length, length)), np.zeros((length, length))
    for seed in range(count):
        order = whole(length, seed)
        at[range(length), order] += 1
        after[order[:-1], order[1:]] += 1
    mean = count / length
    # Means of the chi-squared distributions are 841 and 840; 987 is one in a thousand.
    assert ((at - mean) ** 2 / mean).sum() < 987
    mean = count * (length - 1) / (length * (length - 1))
    apart = after[~np.eye(length, dtype=bool)]
    assert ((apart - mean) ** 2 / mean).sum() < 987


@pytest.mark.slow
def test_every_process_and_machine_has_this_order() -> None:
    # Written down once: another order would make runs that are resumed go on elsewhere.
    assert whole(10, 0, 0) == KNOWN_SORTED
    assert Permutation(10**9, 0, 0).at(np.arange(5)).tolist() == KNOWN_COMPUTED
    program = (
        "from shmloader.sampling.indices import Permutation; import numpy;"
        "print(Permutation(10, 0, 0).at(numpy.arange(10)).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(KNOWN_SORTED)


def test_a_hundred_million_take_no_memory() -> None:
    tracemalloc.start()
    try:
        order = Permutation(100_000_000, 7)
        order.at(np.arange(50_000_000, 50_008_192))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


# Steps of an order as arrays or lists, and how far an epoch has come ---------------------------


@pytest.mark.parametrize("last_batch", ["pad", "keep", "discard"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [3, 24, 29])
@pytest.mark.parametrize("rank", [0, 1])
def test_arrays_and_ranges_hold_the_indices_of_the_lists(last_batch, shuffle, length, rank) -> None:
    found = []
    for as_arrays in (False, True):
        order = Permutation(length, 7, 1) if shuffle else None
        steps = OrderSteps(length, order, Cut(4, rank, 2), last_batch)
        steps.as_arrays = as_arrays
        drawn = list(steps)
        assert {type(step) for step in drawn} <= ({range, IndexArray} if as_arrays else {list})
        found.append(([*map(as_list, drawn)], steps.repeats))
    assert found[0] == found[1]


def test_an_order_without_shuffling_comes_as_ranges_until_it_wraps_around() -> None:
    steps = OrderSteps(10, None, Cut(4), "pad")
    steps.as_arrays = True
    *full, last = steps
    assert full == [range(4), range(4, 8)]
    assert last.tolist() == [8, 9, 0, 1]


def done_of(progress):
    ahead = itertools.chain.from_iterable(range(*run) for run in progress.ahead)
    return {*range(progress.position), *ahead}


@given(st.data())
def test_what_is_done_is_known_over_any_number_of_resumes(data):
    unit = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(0, 20)) * unit
    progress = Progress(unit=unit)
    expected: set[int] = set()
    for _ in range(data.draw(st.integers(1, 4))):
        # What is drawn after a resume: all that is not done, in order.
        numbers = range(0, count, unit)
        drawn = list(progress.left_to_do(iter(numbers[progress.start // unit :])))
        assert drawn == [number for number in numbers if number not in expected]
        order = data.draw(st.permutations(range(len(drawn))))
        for seq in order[: data.draw(st.integers(0, len(drawn)))]:
            mark, before = (progress.position, progress.ahead), done_of(progress)
            progress.done(seq)
            progress.go_back(mark)
            assert done_of(progress) == before
            progress.done(seq)
            expected |= {*range(drawn[seq], drawn[seq] + unit)}
            assert done_of(progress) == expected
            assert progress.position not in {first for first, _ in progress.ahead}
        progress = Progress.load(progress.dump(), unit)


@given(st.sets(st.integers(1, 12)))
def test_in_order_what_was_given_ahead_is_passed_over(given_before):
    progress = Progress(0, tuple((number, number + 1) for number in sorted(given_before)))
    drawn = [number for number in range(14) if number not in given_before]
    for seq, number in enumerate(drawn):
        progress.done_until(seq)
        assert done_of(progress) == given_before | set(drawn[: seq + 1])
        assert progress.position > number


def test_one_late_ticket_costs_the_others_nothing():
    progress = Progress()
    for seq in range(1, 200_000):  # seconds, and not hours
        progress.done(seq)
    assert progress.ahead == ((1, 200_000),)
    again = Progress.load(progress.dump())
    for seq in range(1000):
        again.done_until(seq)
    assert again.position == 200_999


# One global order, cut into steps, shards and ranks: the same whoever looks at it --------------

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
