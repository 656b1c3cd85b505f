"""``seed=``: what a sample draws depends on the seed, the epoch and its position alone."""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from shmloader import DataLoader, ShardedDataLoader, sample_rng
from tests.process.support import Calls, Deaths, Streams, outcomes

LENGTH = 53


def global_draws() -> tuple[int, int, int]:
    return random.getrandbits(30), int(np.random.randint(2**30)), int(torch.randint(2**30, ()))


def draws() -> list[int]:
    return [*global_draws(), int(sample_rng().integers(2**30))]


def augmented(index: int) -> tuple[int, list[int]]:
    for _ in range(index % 4):
        draws()
    return index, draws()


def drawing_collate(samples: list[Any]) -> tuple[list[Any], list[int]]:
    return samples, draws()


def loader_of(dataset: Any = augmented, kind: Any = DataLoader, **options: Any) -> Any:
    options = {"batch_size": 8, "shuffle": True, "seed": 5, **options}
    options.setdefault("collate_fn", drawing_collate)
    return kind(Calls(dataset, LENGTH) if callable(dataset) else dataset, **options)


def epochs_of(loader: Any, count: int = 2) -> list[list[Any]]:
    with contextlib.closing(loader):
        return [list(loader) for _ in range(count)]


def states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return random.getstate(), (name, words.tolist(), *rest), torch.get_rng_state().tolist()


@pytest.fixture(scope="module")
def in_process() -> list[list[Any]]:
    return epochs_of(loader_of())


def test_two_epochs_differ_in_order_and_draws(in_process) -> None:
    first, second = ([sample for batch, _ in epoch for sample in batch] for epoch in in_process)
    assert sorted(index for index, _ in first) == sorted(index for index, _ in second)
    assert [index for index, _ in first] != [index for index, _ in second]
    every = [tuple(drawn) for _, drawn in [*first, *second]]
    every += [tuple(drawn) for epoch in in_process for _, drawn in epoch]
    assert len(set(every)) == 2 * (LENGTH + 7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"num_workers": 5, "prefetch_factor": 1},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
        {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True},
        {"num_workers": 2, "on_error": "skip"},
        {"num_workers": 3, "in_order": False},
        {"on_error": "skip"},
        {},
    ],
)
def test_the_same_batches_come_whoever_loads_them(options, in_process) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    found, expected = epochs_of(loader_of(**options)), in_process
    if "in_order" in options:
        found, expected = (list(map(sorted, epochs)) for epochs in (found, expected))
    assert found == expected


def test_another_seed_is_another_run(in_process) -> None:
    for seed in (0, 6):
        other = epochs_of(loader_of(seed=seed))
        assert all(mine != theirs for mine, theirs in zip(other, in_process, strict=True))
        assert epochs_of(loader_of(seed=seed, num_workers=1)) == other


def test_a_batch_whose_worker_died_is_made_the_same_again(in_process) -> None:
    deaths = Deaths({17: 1})

    def sample(index: int) -> Any:
        made = augmented(index)
        deaths.come(index)
        return made

    assert epochs_of(loader_of(sample, num_workers=2, worker_restarts=1)) == in_process
    assert deaths.left == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", lambda index, error: (index, draws())])
def test_bad_samples_move_no_other_s_streams(workers, on_error, in_process) -> None:
    def sample(index: int) -> Any:
        if index % 10 == 3:
            raise ValueError(index)
        return augmented(index)

    loader = loader_of(sample, num_workers=workers, on_error=on_error)
    (epoch,) = epochs_of(loader, 1)
    for (samples, collated), (whole, whole_collated) in zip(epoch, in_process[0], strict=True):
        assert collated == whole_collated
        good = [sample for sample in samples if sample[0] % 10 != 3]
        assert good == [sample for sample in whole if sample[0] % 10 != 3]
        assert len(samples) == (len(whole) if callable(on_error) else len(good))
    assert {failed.index for failed in loader.failures} == {3, 13, 23, 33, 43}


def sharded(world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    options = {"batch_size": 12 // world_size, "collate_fn": list, **options}
    return loader_of(kind=ShardedDataLoader, rank=rank, world_size=world_size, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last_batch", ["pad", "discard"])
@pytest.mark.parametrize(("world_size", "workers"), [(2, 2), (3, 1), (4, 0)])
def test_a_run_is_the_same_on_any_number_of_ranks(world_size, workers, last_batch) -> None:
    alone = epochs_of(sharded(last_batch=last_batch))
    ranks = [
        epochs_of(sharded(world_size, rank, last_batch=last_batch, num_workers=workers))
        for rank in range(world_size)
    ]
    for number, epoch in enumerate(alone):
        steps = zip(*(rank[number] for rank in ranks), strict=True)
        assert [[*itertools.chain(*step)] for step in steps] == epoch


def test_the_seed_of_a_sharded_loader_is_0_and_orders_as_that_of_a_plain_one() -> None:
    loader = sharded(seed=0)
    assert loader.seed == 0
    (epoch,) = epochs_of(loader, 1)
    default = ShardedDataLoader(Calls(augmented, LENGTH), 12, shuffle=True, collate_fn=list)
    assert epochs_of(default, 1) == [epoch]
    plain = loader_of(seed=0, batch_size=12, collate_fn=list)
    assert epochs_of(plain, 1)[0][:-1] == epoch[:-1]


class Counting(SequentialSampler):
    def __init__(self, length: int) -> None:
        super().__init__(range(length))
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


SAMPLERS: dict[str, Any] = {
    "random": {"sampler": RandomSampler(range(LENGTH))},
    "with replacement": {"sampler": RandomSampler(range(LENGTH), replacement=True)},
    "weighted": {"sampler": WeightedRandomSampler([1.0] * LENGTH, 30)},
    "distributed": {"sampler": DistributedSampler(range(LENGTH), 3, 1)},
    "batches": {
        "batch_sampler": BatchSampler(RandomSampler(range(LENGTH)), 6, drop_last=True),
        "batch_size": 1,
    },
    "no batching": {"batch_size": None, "shuffle": True},
    "no batching, sampler": {"batch_size": None, "sampler": RandomSampler(range(LENGTH))},
    "whole": {"drop_last": True, "shuffle": True},
    "in order": {"shuffle": False},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_any_sampler_gives_the_same_run_in_workers_and_the_length_is_torch_s(kind) -> None:
    def loader(**options: Any) -> DataLoader[Any]:
        parts = copy.deepcopy(SAMPLERS[kind])
        return loader_of(**{"shuffle": None, **parts, **options})

    here = loader()
    unseeded = loader(seed=None)
    assert len(here) == len(unseeded)
    assert isinstance(here.sampler, type(unseeded.sampler))
    assert type(here.batch_sampler) is type(unseeded.batch_sampler)
    before = states()
    first = epochs_of(here)
    assert [len(epoch) for epoch in first] == [len(here)] * 2
    if kind != "in order":
        assert first[0] != first[1]
    assert states()[:2] == before[:2]
    assert epochs_of(loader(num_workers=2)) == first


def test_without_batching_a_sample_draws_as_in_a_batch(in_process) -> None:
    alone = epochs_of(loader_of(batch_size=None, collate_fn=lambda sample: sample))
    for epoch, batches in zip(alone, in_process, strict=True):
        assert epoch == [sample for batch, _ in batches for sample in batch]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "thread_pool": True},
        {"sampler": [0, 99, 1, 98], "shuffle": False, "on_error": lambda *_: draws()},
        {"batch_size": None},
        {"rank": 1, "world_size": 3, "batch_size": 4, "num_workers": 1},
    ],
)
def test_a_dataset_that_draws_nothing_is_collated_under_the_same_streams(options) -> None:
    def collate(samples: Any) -> Any:
        generators = [] if "thread_pool" in options else [*global_draws()]
        return samples, [*generators, int(sample_rng().integers(2**30))]

    kind = ShardedDataLoader if "rank" in options else DataLoader
    held = [[number] for number in range(LENGTH)]  # lists, as batches are
    found = epochs_of(loader_of(held, kind, collate_fn=collate, **options))
    assert found == epochs_of(loader_of(held.__getitem__, kind, collate_fn=collate, **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_fetched_one_by_one_whatever_getitems_there_is(workers, in_process) -> None:
    class Lists:
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> Any:
            return augmented(index)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            raise AssertionError

    assert epochs_of(loader_of(Lists(), num_workers=workers)) == in_process


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_is_named_is_the_one_that_comes(persistent) -> None:
    four = epochs_of(loader_of(), 4)
    with loader_of(num_workers=2, persistent_workers=persistent) as loader:
        assert loader.epoch == 0
        loader.set_epoch(2)
        assert loader.epoch == 2
        assert list(loader) == four[2]
        assert loader.epoch == 3
        assert list(loader) == four[3]
        loader.set_epoch(1)
        assert list(loader) == four[1]
        next(iter(loader))  # an epoch that is left early counts
        assert list(loader) == four[3]


def test_iterators_that_live_at_once_keep_their_epochs() -> None:
    expected = epochs_of(loader_of())
    loader = loader_of()
    first, second = iter(loader), iter(loader)
    pairs = [(next(first), next(second)) for _ in range(len(loader))]
    assert [list(epoch) for epoch in zip(*pairs, strict=True)] == expected


@pytest.mark.parametrize("wrap", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("seed", [3, None])
def test_a_sampler_is_told_the_epoch(wrap, seed) -> None:
    counting = Counting(4)
    sampler = counting if wrap == "sampler" else BatchSampler(counting, 2, drop_last=False)
    loader = DataLoader(range(4), seed=seed, **{wrap: sampler})
    list(loader)
    loader.set_epoch(7)
    assert counting.epochs == ([7] if seed is None else [0])
    list(loader)
    list(loader)
    # Without a seed it counts, or does not, as it likes.
    assert counting.epochs == ([7] if seed is None else [0, 7, 8])
    assert loader.epoch == 9


def of_rank(rank: int, wrap: str = "sampler", **options: Any) -> DataLoader[Any]:
    """A loader of one of three ranks, whose samples are all the same one."""
    sampler: Any = DistributedSampler(range(LENGTH), 3, rank, seed=4)
    if wrap == "batch_sampler":
        options |= {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}
    else:
        options |= {"batch_size": 4, "sampler": sampler}
    dataset = Calls(lambda _: draws(), LENGTH)
    return DataLoader(dataset, collate_fn=drawing_collate, **{"seed": 5, **options})


@pytest.mark.parametrize("wrap", ["sampler", "batch_sampler"])
def test_ranks_with_the_same_seed_draw_other_numbers_at_the_same_position(wrap) -> None:
    ranks = [epochs_of(of_rank(rank, wrap)) for rank in range(3)]
    batches = itertools.chain(*itertools.chain(*ranks))
    numbers = [tuple(drawn) for samples, of_collate in batches for drawn in (*samples, of_collate)]
    assert len(set(numbers)) == len(numbers) > LENGTH
    assert ranks[1] == epochs_of(of_rank(1, wrap, num_workers=2))
    assert ranks[1] != epochs_of(of_rank(1, wrap, seed=6))


def test_ranks_share_an_order_that_is_drawn_from_the_seed() -> None:
    class Cut(RandomSampler):
        """Draws from torch's global generator, as all ranks have to."""

        num_replicas = 2
        rank = 0

        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[self.rank :: 2])

    seen = []
    for rank in range(2):
        sampler = Cut(range(LENGTH))
        sampler.rank = rank
        seen += list(DataLoader(range(LENGTH), None, sampler=sampler, seed=5))
    assert sorted(seen) == list(range(LENGTH))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (range(4), {"batch_size": 2, "shuffle": True}),
        (range(4), {"batch_sampler": [[0, 1], [2, 3]]}),
        (Streams(lambda: iter(range(4))), {"batch_size": 2}),
        (range(4), {"generator": torch.Generator()}),
        (IterableWrapper([1, 2]), {}),
    ],
)
def test_an_epoch_that_nothing_depends_on_can_be_set(dataset, options) -> None:
    loader = DataLoader(dataset, **options)
    loader.set_epoch(3)
    assert loader.epoch == 3


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "1"])
def test_what_is_no_epoch_is_refused(epoch) -> None:
    with pytest.raises((TypeError, ValueError), match="epoch should be"):
        DataLoader(range(4)).set_epoch(epoch)


@pytest.mark.parametrize(
    "options", [{"thread_pool": True, "on_error": "skip"}, {"thread_pool": True}, {}]
)
def test_with_threads_the_sample_s_own_generator_holds(options) -> None:
    def sample(index: int) -> tuple[int, int]:
        for _ in range(index % 3):
            sample_rng().random()
        return index, int(sample_rng().integers(2**30))

    def collate(samples: list[Any]) -> Any:
        return samples, int(sample_rng().integers(2**30))

    here = epochs_of(loader_of(sample, collate_fn=collate))
    before = states()
    assert epochs_of(loader_of(sample, collate_fn=collate, num_workers=3, **options)) == here
    assert states()[:2] == before[:2]


def numbered() -> Any:
    """As the workers share it: each has every n-th."""
    info = get_worker_info()
    first, step = (0, 1) if info is None else (info.id, info.num_workers)
    opened = draws()
    return ((index, opened, draws()) for index in range(first, 20, step))


def stream_of(function: Any = numbered, **options: Any) -> DataLoader[Any]:
    return loader_of(Streams(function), **{"batch_size": 3, "shuffle": None, **options})


def by_index(epoch: list[Any]) -> dict[int, Any]:
    return {sample[0]: sample[1:] for batch, _ in epoch for sample in batch}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterable_dataset_draws_by_worker_and_position(workers, persistent) -> None:
    options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    first, second = epochs_of(stream_of(**options))
    assert [first, second] == epochs_of(stream_of(**{**options, "persistent_workers": False}))
    assert sorted(by_index(first)) == sorted(by_index(second)) == [*range(20)]
    seen = [tuple(drawn) for _, drawn in by_index(first).values()]
    seen += [tuple(drawn) for _, drawn in by_index(second).values()]
    assert len(set(seen)) == 40
    assert len({tuple(opened) for opened, _ in by_index(first).values()}) == max(1, workers)
    collated = [tuple(drawn) for _, drawn in (*first, *second)]
    assert len(set(collated)) == len(collated)
    # Not on the size of batches; and not on the loader's process.
    single = epochs_of(stream_of(**options, batch_size=1), 1)[0]
    assert by_index(single) == by_index(first)
    if workers == 1:
        assert epochs_of(stream_of(), 1) == [first]


def test_an_iterable_dataset_s_worker_that_died_goes_on_at_its_place() -> None:
    unbroken = epochs_of(stream_of(num_workers=2), 1)
    deaths = Deaths({11: 1})

    def dying(samples: Any) -> Any:
        for sample in samples:
            deaths.come(sample[0])
            yield sample

    options = {"num_workers": 2, "worker_restarts": 1, "prefetch_factor": 1}
    assert epochs_of(stream_of(lambda: dying(numbered()), **options), 1) == unbroken
    assert deaths.left == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_are_seeded_by_the_seed_and_the_epoch(workers) -> None:
    begun: dict[int, Any] = {}

    def init(worker_id: int) -> None:
        begun[worker_id] = global_draws()

    all_at_work = multiprocessing.get_context("fork").Barrier(workers)

    def sample(index: int) -> Any:
        if index < workers:
            all_at_work.wait(30)  # one for each of them
        info = get_worker_info()
        return info.id, info.seed, begun[info.id]

    def run() -> Any:
        epochs = epochs_of(
            DataLoader(
                Calls(sample, 6), None, seed=5, num_workers=workers, worker_init_fn=init,
                collate_fn=lambda sample: sample,
            )
        )  # fmt: skip
        return [sorted(set(epoch)) for epoch in epochs]  # a sample may be with any of them

    torch.manual_seed(1)
    first = run()
    torch.manual_seed(2)
    assert run() == first
    assert [sample[0] for sample in first[0]] == [*range(workers)]
    assert len({sample[2] for epoch in first for sample in epoch}) == 2 * workers
    assert {sample[1] - sample[0] for sample in first[0]} != {
        sample[1] - sample[0] for sample in first[1]
    }


@pytest.mark.parametrize("make", [loader_of, stream_of])
def test_the_process_s_streams_are_put_back_after_each_batch_and_the_end(make) -> None:
    torch.manual_seed(0)
    list(DataLoader([], seed=5))
    before = states()  # the base seed is drawn, and no more
    torch.manual_seed(0)
    batches = iter(make())
    assert states() == before
    for _ in batches:
        assert states() == before
    assert states() == before


def test_they_are_put_back_when_a_sample_raises() -> None:
    def sample(index: int) -> Any:
        global_draws()
        raise ValueError(index)

    batches = iter(DataLoader(Calls(sample, 4), seed=5))
    before = states()
    with pytest.raises(ValueError, match=r"^0\n"):
        next(batches)
    assert states() == before
    with pytest.raises(RuntimeError, match="sample_rng"):
        sample_rng()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_within_a_sample_leaves_that_sample_s_streams(workers) -> None:
    inner = DataLoader(Calls(augmented, 4), 2, seed=9, collate_fn=drawing_collate)
    expected = list(inner)

    def nested(index: int) -> Any:
        before = draws()
        inner.set_epoch(0)
        assert list(inner) == expected
        return index, before, draws()

    def flat(index: int) -> Any:
        before = draws()
        torch.empty((), dtype=torch.int64).random_()  # the inner loader's base seed
        return index, before, draws()

    options: dict[str, Any] = {"seed": 5, "collate_fn": list, "num_workers": workers}
    loaders = [DataLoader(Calls(sample, 3), 3, **options) for sample in (nested, flat)]
    assert list(loaders[0]) == list(loaders[1])


def test_outside_of_a_seeded_loader_there_is_no_generator() -> None:
    def sample(index: int) -> Any:
        return int(sample_rng().integers(5))

    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "thread_pool": True}):
        with (
            DataLoader(Calls(sample, 2), **options) as loader,
            pytest.raises(RuntimeError, match=r"Give the loader seed="),
        ):
            next(iter(loader))


def test_a_data_pipe_takes_no_seed() -> None:
    with pytest.raises(ValueError, match="for a data pipe"):
        DataLoader(IterableWrapper([1, 2]), seed=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_seed_of_torchs_generator_fits_a_tensor(workers) -> None:
    """As torch's own seeds do: a dataset may return torch.initial_seed()."""
    seeds = Calls(lambda _: torch.initial_seed(), 64)
    with DataLoader(seeds, batch_size=64, seed=0, num_workers=workers) as loader:
        (batch,) = loader
    assert batch.dtype is torch.int64
    assert len(set(batch.tolist())) == 64


@pytest.mark.parametrize("normals", [0, 1])
def test_a_normal_number_in_waiting_stays_the_user_s(normals) -> None:
    """numpy makes normal numbers in pairs, and keeps the second one."""
    np.random.seed(3)
    expected = np.random.RandomState(3).randn(normals + 8).tolist()
    found = [float(np.random.randn()) for _ in range(normals)]
    for _ in zip(range(4), loader_of(seed=5), strict=False):
        found += [float(np.random.randn()), float(np.random.randn())]
    assert found == expected


class Failing:
    """A sampler of ten numbers that raises an error of its own in place of the eighth."""

    def __init__(self, in_batches: bool) -> None:
        self.in_batches = in_batches

    def __iter__(self) -> Failing:
        self.drawn = -1
        return self

    def __next__(self) -> Any:
        self.drawn += 1
        if self.drawn == 7:
            raise LookupError("the sampler's own")
        if self.drawn >= 10:
            raise StopIteration
        return [self.drawn] if self.in_batches else self.drawn

    def __len__(self) -> int:
        return 9


def steps(batches: Any) -> list[Any]:
    """What comes, with an error in place of a batch."""
    return ["error" if isinstance(one, LookupError) else one for one in outcomes(batches)]


@pytest.mark.parametrize("workers", [0, 1])
def test_after_an_error_of_its_own_a_batch_sampler_goes_on_as_with_torch(workers) -> None:
    def load(kind: Any, **options: Any) -> list[Any]:
        options |= {"batch_sampler": Failing(True), "collate_fn": list, "num_workers": workers}
        return steps(kind(range(10), **options))

    expected = load(torch.utils.data.DataLoader)
    assert expected[-1] == [9]
    assert load(DataLoader) == load(DataLoader, seed=0) == expected
    if workers:
        assert load(DataLoader, seed=0, thread_pool=True) == expected


def test_an_error_of_a_sampler_costs_no_sample_of_the_batch_that_it_interrupts() -> None:
    loader = DataLoader(range(10), 2, sampler=Failing(False), collate_fn=list, seed=0)
    assert steps(loader) == [[0, 1], [2, 3], [4, 5], "error", [6, 8], [9]]
    assert steps(loader)[0] == [0, 1]


@pytest.mark.parametrize(
    ("seed", "taken", "rest"),
    [
        (None, 2, [[2], [3], [4], [5], [6], "error", [8], [9]]),
        (0, 2, [[2], [3], [4], [5], [6], "error", [8], [9]]),
        (0, 9, ["error", [9]]),  # it repeats nothing of what it passes over
    ],
)
def test_a_resumed_epoch_goes_on_after_an_error_of_the_sampler_as_well(seed, taken, rest) -> None:
    def load() -> DataLoader:
        return DataLoader(range(10), batch_sampler=Failing(True), collate_fn=list, seed=seed)

    loader = load()
    batches = iter(loader)
    for step in [[0], [1], [2], [3], [4], [5], [6], "error", [8]][:taken]:
        with pytest.raises(LookupError) if step == "error" else contextlib.nullcontext():
            assert next(batches) == step
    again = load()
    again.load_state_dict(loader.state_dict())
    assert steps(again) == rest
