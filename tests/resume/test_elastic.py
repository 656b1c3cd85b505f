"""A state of ShardedDataLoader goes on with other ranks, and the same global batch."""

import itertools
import json
import random

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler

import shmloader
from shmloader.sampling import TokenBatches

LENGTH = 250
GLOBAL_BATCH = 24
LAST_BATCHES = ("pad", "discard", "keep")


class Shuffled(Sampler):
    """A user's sampler that draws by Python's global stream, index by index."""

    def __iter__(self):
        left = list(range(LENGTH))
        while left:
            yield left.pop(random.randrange(len(left)))

    def __len__(self):
        return LENGTH


ORDERS = {
    "shuffled": lambda: {"shuffle": True},
    "in order": dict,
    "a user's": lambda: {"sampler": Shuffled()},
}


def loaders(world_size, dataset, order, **options):
    """A loader for each rank; ``order`` makes the arguments for its order."""
    return [
        shmloader.ShardedDataLoader(dataset, rank=rank, world_size=world_size, **order(), **options)
        for rank in range(world_size)
    ]


def make_ranks(world_size, last_batch, order, workers=0):
    options = {"num_workers": workers, "seed": 5, "last_batch": last_batch}
    size = GLOBAL_BATCH // world_size
    return loaders(world_size, torch.arange(LENGTH), ORDERS[order], batch_size=size, **options)


def take(ranks, steps=None):
    iterators = [iter(rank) for rank in ranks]
    taken = []
    while steps is None or len(taken) < steps:
        parts = [next(iterator, None) for iterator in iterators]
        if all(part is None for part in parts):
            break
        taken.append([number for part in parts if part is not None for number in part.tolist()])
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("last_batch", LAST_BATCHES)
def test_a_state_of_four_ranks_goes_on_with_one_two_three_and_eight(last_batch, order):
    alone = make_ranks(1, last_batch, order)
    epochs = [take(alone) for _ in range(3)]
    for epoch, stop in itertools.product((0, 1), (0, 1, 6, len(epochs[0]) - 1, len(epochs[0]))):
        ranks = make_ranks(4, last_batch, order)
        for _ in range(epoch):
            take(ranks)
        assert take(ranks, stop) == epochs[epoch][:stop]
        state = json.loads(json.dumps(ranks[0].state_dict()))
        assert len(json.dumps(state)) < 4096
        for world_size in (1, 2, 3, 8, 4):
            others = load(state, make_ranks(world_size, last_batch, order))
            assert take(others) == epochs[epoch][stop:], (epoch, stop, world_size)
            assert take(others) == epochs[epoch + 1], (epoch, stop, world_size)


def test_all_ranks_of_a_running_epoch_have_the_same_state():
    ranks = make_ranks(4, "pad", "shuffled")
    take(ranks, 3)
    assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1


def test_ranks_with_workers_go_on_with_others_in_process():
    ranks = make_ranks(2, "keep", "shuffled", workers=2)
    first = take(ranks, 4)
    state = ranks[1].state_dict()
    for rank in ranks:
        rank.close()
    others = load(state, make_ranks(3, "keep", "shuffled"))
    assert first + take(others) == take(make_ranks(1, "keep", "shuffled"))


def test_a_rank_whose_epoch_was_shorter_has_nothing_left_and_begins_the_next():
    ranks = make_ranks(8, "keep", "in order")  # 10 samples in the last step: four ranks have some
    epochs = [take(ranks), take(ranks)]
    ranks = make_ranks(8, "keep", "in order")
    take(ranks, len(epochs[0]))
    others = load(ranks[0].state_dict(), make_ranks(8, "keep", "in order"))
    assert take(others) == []
    assert take(others) == epochs[1]


def test_the_samples_that_fill_up_the_last_step_are_told_after_a_resume():
    (whole,) = make_ranks(1, "pad", "shuffled")
    paddings = [whole.padding for _ in whole]
    (first,) = make_ranks(1, "pad", "shuffled")
    for _, _ in zip(range(5), first, strict=False):
        state = first.state_dict()
    (other,) = make_ranks(1, "pad", "shuffled")
    other.load_state_dict(state)
    assert [other.padding for _ in other] == paddings[5:]
    assert paddings[-1] == 14


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffle_by_a_generator_goes_on(workers):
    def make():
        generator = torch.Generator().manual_seed(9)
        return shmloader.ShardedDataLoader(
            torch.arange(LENGTH), GLOBAL_BATCH, shuffle=True, generator=generator,
            num_workers=workers,
        )  # fmt: skip

    (loader,) = ranks = [make()]
    epochs = [take(ranks) for _ in range(3)]
    assert epochs[0] != epochs[1]
    for epoch, stop in ((0, 0), (1, 0), (1, 4)):
        ranks = [make()]
        for _ in range(epoch):
            take(ranks)
        take(ranks, stop)
        state = ranks[0].state_dict()
        others = [make()]
        others[0].load_state_dict(state)
        assert [take(others), take(others)] == [epochs[epoch][stop:], epochs[epoch + 1]]
        others[0].close()
        ranks[0].close()
    loader.close()


LENGTHS = [1 + number * 7 % 50 for number in range(100)]


class Noisy(Dataset):
    """Samples with random numbers, which show the positions that they are seeded by."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.double)


def random_batches():
    return {"batch_sampler": BatchSampler(RandomSampler(LENGTHS), 8, drop_last=False)}


def make_batches(world_size):
    return loaders(world_size, Noisy(), random_batches)


def take_batches(ranks, steps=None):
    """The batches of so many steps of all ranks, or of the rest of the epoch, one by one."""
    steps = itertools.count() if steps is None else range(steps)
    return [batch for _, each in zip(steps, zip(*ranks, strict=False)) for batch in each]  # noqa: B905


def values(batches):
    return [batch.tolist() for batch in batches]


def load(state, ranks):
    for rank in ranks:
        rank.load_state_dict(state)
        assert rank.state_dict() == state
    return ranks


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_batch_sampler_goes_on_with_any_number_of_ranks(before):
    (alone,) = make_batches(1)
    epochs = [values(alone), values(alone)]
    for stop, after in itertools.product(range(-(-13 // before) + 1), (1, 2, 3, 4)):
        ranks = make_batches(before)
        iterators = [iter(rank) for rank in ranks]
        take_batches(iterators, stop)
        state = json.loads(json.dumps(ranks[0].state_dict()))
        others = load(state, make_batches(after))
        done = min(stop * before, 13)
        rest = values(take_batches(others))
        where = f"{before} ranks, {stop} steps, then {after} ranks"
        assert rest[: 13 - done] == epochs[0][done:], where
        assert {len(other) for other in others} == {-(-(13 - done % after) // after)}, where
        # The last step is filled up with the epoch's first batches.
        repeats = rest[13 - done :]
        assert len(repeats) < after, where
        assert indices(repeats) == indices(epochs[0][: len(repeats)]), where
        assert values(take_batches(others))[:13] == epochs[1], where


def indices(batches):
    return [[sample[0] for sample in batch] for batch in batches]


SHORT = [length // 5 + 1 for length in LENGTHS]


def token_batches():
    return {"batch_sampler": TokenBatches(SHORT, 24, window=30, balance="attention")}


def make_tokens(world_size, workers=0):
    return loaders(world_size, Noisy(), token_batches, num_workers=workers)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_token_batches_go_on_with_any_number_of_ranks(before, workers):
    (alone,) = make_tokens(1)
    epochs = [values(alone), values(alone)]
    count = len(epochs[0])
    for stop, after in itertools.product(range(0, -(-count // before) + 1, 5), (1, 2, 3, 4)):
        ranks = make_tokens(before, workers)
        iterators = [iter(rank) for rank in ranks]
        done = values(take_batches(iterators, stop))
        state = json.loads(json.dumps(ranks[0].state_dict()))
        others = load(state, make_tokens(after, workers))
        drawn = done + values(take_batches(others))
        where = f"{before} ranks, {stop} steps, then {after} ranks"
        whole = count - (count - len(done)) % after
        assert drawn[:whole] == epochs[0][:whole], where
        # The last step is divided, and each sample comes once.
        assert len(drawn) == len(done) + -(-(count - len(done)) // after) * after, where
        assert sorted(itertools.chain(*indices(drawn))) == list(range(len(LENGTHS))), where
        following = values(take_batches(others))
        whole = len(epochs[1]) // after * after
        assert following[:whole] == epochs[1][:whole], where
        for rank in (*ranks, *others):
            rank.close()


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_state_of_one_of_several_ranks_in_any_order_is_for_that_rank_alone(has_batches):
    def make(rank, world_size):
        order = random_batches() if has_batches else {"batch_size": 12 // world_size}
        return shmloader.ShardedDataLoader(
            Noisy(), rank=rank, world_size=world_size, in_order=False, num_workers=1, **order
        )

    with make(1, 2) as saved:
        next(iter(saved))
        state = saved.state_dict()
    make(1, 2).load_state_dict(state)
    for rank, world_size in ((0, 2), (0, 1), (1, 3)):
        with pytest.raises(ValueError, match=f"1 of 2 ranks in the state, {rank} of {world_size}"):
            make(rank, world_size).load_state_dict(state)
