"""ShardedDataLoader: ranks, also those of processes that are launched later; batches, tails."""

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    TensorDataset,
    default_collate,
)

from shmloader import DataLoader, ShardedDataLoader, TooManyFailures
from shmloader.loader import resumable
from shmloader.loader.options import OPTIONS
from shmloader.sampling import ShardedSampler
from tests.parity.compare import assert_same
from tests.process.support import Calls, Streams

pytestmark = pytest.mark.timeout(120)

# Samples of a loader that is made before the processes are launched.
LENGTH = 22


def values(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_what_collate_makes_of_each_index_list(workers) -> None:
    dataset = TensorDataset(torch.rand(20, 5), torch.arange(20), torch.rand(20, 2, 40, 300))

    plan = [[3, 1], [7, 8, 9], [4, 4, 4], [0], [19, 18, 5]]
    seen = list(ShardedDataLoader(dataset, batch_sampler=plan, num_workers=workers))
    assert_same(seen, [default_collate([dataset[index] for index in batch]) for batch in plan])


@pytest.mark.parametrize("workers", [0, 2])
def test_padding_tells_of_the_batch_that_was_given_last(workers) -> None:
    for rank, last, padding in ((0, 12, 0), (1, 16, 0), (2, 0, 4)):
        options = {"rank": rank, "world_size": 3, "num_workers": workers}
        loader = ShardedDataLoader(torch.arange(20), 4, **options)
        assert loader.padding == 0
        seen = [(batch[0].item(), loader.padding) for batch in loader]
        assert seen == [(4 * rank, 0), (last, padding)]


def test_padding_is_refused_where_the_order_is_not_known() -> None:
    loader = ShardedDataLoader(torch.arange(20), 4, num_workers=1, in_order=False)
    with pytest.raises(RuntimeError, match="only with in_order=True"):
        _ = loader.padding


def test_a_generator_shuffles_as_with_torch_on_one_rank() -> None:
    theirs = torch.utils.data.DataLoader(
        torch.arange(30), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    ours = ShardedDataLoader(
        torch.arange(30), 4, shuffle=True, last_batch="keep",
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for _ in range(2):
        assert values(ours) == values(theirs)
    with pytest.raises(ValueError, match="generator cannot be given for more than one"):
        ShardedDataLoader(torch.arange(9), 2, generator=torch.Generator(), rank=0, world_size=2)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"on_error": "skip"}])
def test_indices_of_a_sampler_may_be_tuples(options) -> None:
    class Crops:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: tuple[int, int]) -> int:
            index, size = key
            return index * 100 + size

    keys = [(index, size) for index in (1, 2) for size in (3, 4)]
    steps = values(ShardedDataLoader(Crops(), 2, sampler=keys, **options))
    assert steps == [[103, 104], [203, 204]]
    steps = values(ShardedDataLoader(Crops(), batch_sampler=[keys[:2], keys[2:]], **options))
    assert steps == [[103, 104], [203, 204]]


@pytest.mark.parametrize(
    "make",
    [
        lambda size: ShardedSampler(range(8), 2, rank=0, world_size=size),
        lambda size: DistributedSampler(range(8), size, 0),
    ],
)
def test_a_sampler_that_gives_a_ranks_part_is_refused_and_its_batches_keep_their_size(make) -> None:
    def failing(index: int) -> int:
        if bad.add(index) or len(bad) == 1:
            raise ValueError("the first one")
        return index

    batches = BatchSampler(make(2), 2, drop_last=False)
    for options in ({"batch_size": 2, "sampler": make(2)}, {"batch_sampler": batches}):
        with pytest.raises(ValueError, match="gives a part of the samples to each rank"):
            ShardedDataLoader(torch.arange(8), **options)
    for size in (1, 2):
        bad: set[int] = set()
        loader = DataLoader(Calls(failing, 8), 2, sampler=make(size), on_error="skip")
        assert len(next(iter(loader))) == size


def test_keep_and_discard_are_what_they_say() -> None:
    data = torch.arange(10)
    assert values(ShardedDataLoader(data, 4, last_batch="keep"))[-1] == [8, 9]
    discard = {"last_batch": "discard"}
    for options in (discard, {"drop_last": True}, {"drop_last": True, **discard}):
        loader = ShardedDataLoader(data, 4, **options)
        assert loader.drop_last is True
        assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert len(loader) == len(loader.batch_sampler) == 2


def failing_at(*bad: int) -> Calls:
    def sample(index: int) -> int:
        if index in bad:
            raise ValueError(f"bad {index}")
        return index

    return Calls(sample, 12)


@pytest.mark.parametrize(
    "way", [{}, {"num_workers": 2}, {"num_workers": 2, "thread_pool": True}], ids=str
)
def test_a_skipped_sample_is_replaced_by_a_good_one_of_its_batch(way) -> None:
    options = {"on_error": "skip", "rank": 0, "world_size": 2, **way}
    loader = ShardedDataLoader(failing_at(1, 6), 3, **options)
    assert values(loader) == [[0, 0, 2], [7, 7, 8]]
    assert [failed.index for failed in loader.failures] == [1, 6]
    loader = ShardedDataLoader(failing_at(0, 1, 2), 3, **options)
    with pytest.raises(TooManyFailures) as raised:  # nothing is left of a batch
        list(loader)
    assert "bad" in str(raised.value.__cause__)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [[], [[1], [2]]])
def test_a_batch_that_is_empty_or_a_list_of_batches_is_named(workers, batch) -> None:
    loader = ShardedDataLoader(torch.arange(9), batch_sampler=[[1], batch], num_workers=workers)
    with pytest.raises(ValueError, match="lists of indices, none of them empty, but batch 1 is"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": None}, ValueError, "batch_size is needed"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 2, "shuffle": True, "sampler": [1]}, ValueError, "shuffle"),
        ({"batch_size": 2, "batch_sampler": [[1]]}, ValueError, "batch_sampler"),
        ({"shuffle": True, "batch_sampler": [[1]]}, ValueError, "batch_sampler"),
        (
            {"batch_size": 2, "device": "gpu0"},
            ValueError,
            r"^device should name a .* device='gpu0'",
        ),
        *(
            ({"last_batch": rule, "batch_sampler": [[1]]}, ValueError, "combined with batch_samp")
            for rule in ("keep", "discard", "pad")
        ),
        ({"shuffle": "no"}, TypeError, "shuffle should be True or False, but got shuffle='no'"),
        ({"shuffle": 2}, TypeError, "shuffle=2"),
        *(
            (
                {"last_batch": wrong},
                ValueError,
                f"^last_batch should be 'keep', 'discard' or 'pad', but got last_batch={wrong!r}$",
            )
            for wrong in ("", "rollover", 3)
        ),
        ({"last_batch": "pad", "drop_last": True}, ValueError, "cannot be combined with drop_last"),
        ({"drop_last": True, "batch_sampler": [[1]]}, ValueError, "batch_sampler"),
        ({"batch_size": 2, "nonsense": True}, TypeError, "nonsense"),
    ],
)
def test_wrong_arguments_are_told_by_the_constructor(options, error, text) -> None:
    with pytest.raises(error, match=text):
        ShardedDataLoader(torch.arange(8), **options)


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="choose its part by rank"):
        ShardedDataLoader(Streams(lambda: iter([1])), 2)


def as_if_present(device: Any) -> torch.device | None:
    return None if device in {None, "cpu"} else torch.device("meta", device)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (DataLoader, {"shm_size": "1GiB"}, "shm_size"),
        (DataLoader, {"worker_restarts": 1}, "worker_restarts"),
        (DataLoader, {"on_error": "skip"}, "on_error"),
        (DataLoader, {"seed": 0}, "seed"),
        (DataLoader, {"device": 0}, "device"),
        (ShardedDataLoader, {}, "ShardedDataLoader"),
    ],
)
def test_where_torchs_workers_have_to_do_our_own_arguments_are_refused(
    kind, options, named, monkeypatch
) -> None:
    monkeypatch.setattr(resumable, "why_unsupported", lambda: "so")
    device = dataclasses.replace(OPTIONS["device"], read=as_if_present)
    monkeypatch.setitem(OPTIONS, "device", device)
    loader = kind(torch.arange(8), 2, num_workers=1, **options)
    with pytest.raises(RuntimeError, match=f"cannot be combined with {named}"):
        iter(loader)
    plain = DataLoader(torch.arange(8), 2, num_workers=1, device="cpu")  # asks for no copy
    with pytest.warns(RuntimeWarning, match="runs on torch's own workers"):
        assert values(plain) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def make(**options: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(torch.arange(LENGTH), 4, shuffle=True, **options)


def launch(monkeypatch, rank, world_size) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, str(value))


def test_where_only_the_world_size_is_known_a_loader_waits_for_its_rank(monkeypatch) -> None:
    launch(monkeypatch, None, 2)
    loader = make()
    assert (loader.rank, loader.world_size, loader.epoch) == (None, None, 0)
    assert "ShardedDataLoader" in repr(loader)
    loader.set_epoch(3)
    pickled = pickle.dumps(loader)
    state = make(rank=0, world_size=2).state_dict()
    for use in (
        len,
        iter,
        lambda loader: loader.state_dict(),
        lambda loader: loader.load_state_dict(state),
        lambda loader: list(loader.sampler),
        lambda loader: len(loader.batch_sampler),
    ):
        with pytest.raises(ValueError, match="RANK and WORLD_SIZE should be set both"):
            use(loader)
    launch(monkeypatch, 1, 2)
    expected = make(rank=1, world_size=2)
    expected.set_epoch(3)
    batches = values(expected)
    for launched in (loader, pickle.loads(pickled), copy.copy(loader), copy.deepcopy(loader)):
        assert (launched.rank, launched.world_size) == (1, 2)
        assert launched.epoch == 3
        assert len(launched) == len(batches)
        assert values(launched) == batches


def test_the_first_epoch_settles_the_ranks(monkeypatch) -> None:
    launch(monkeypatch, None, None)
    loader = make()
    assert (loader.rank, loader.world_size, len(loader)) == (0, 1, 6)
    launch(monkeypatch, 2, 3)
    assert (loader.rank, loader.world_size, len(loader)) == (2, 3, 2)
    state = loader.state_dict()
    first = values(loader)
    assert first == values(make(rank=2, world_size=3))
    launch(monkeypatch, None, None)
    assert (loader.rank, loader.world_size, len(loader)) == (2, 3, 2)
    loader.load_state_dict(state)
    assert values(loader) == first
    copied = pickle.loads(pickle.dumps(loader))
    assert (copied.rank, copied.world_size) == (2, 3)


def test_given_ranks_are_those_of_the_arguments_whatever_the_environment_says(monkeypatch) -> None:
    launch(monkeypatch, 1, 4)
    loader = make(rank=0, world_size=2)
    assert (loader.rank, loader.world_size) == (0, 2)
    assert vars(loader)["rank"] == 0
    assert vars(make())["rank"] is None  # the argument
    with pytest.raises(ValueError, match="both or not at all"):
        make(rank=1)


def test_a_generator_is_refused_when_several_ranks_are_found(monkeypatch) -> None:
    launch(monkeypatch, None, None)
    loader = make(generator=torch.Generator())
    launch(monkeypatch, 0, 2)
    with pytest.raises(ValueError, match="generator cannot be given for more than one rank"):
        iter(loader)


def serve(rank, loader, queue) -> None:
    """A rank of a group that exchanges nothing: the loader asks it only for the ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    queue.put((rank, len(loader), values(loader), loader.rank, loader.world_size))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_loader_that_is_sent_to_processes_of_a_group_has_their_ranks(monkeypatch) -> None:
    launch(monkeypatch, None, None)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=serve, args=(rank, make(), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted(queue.get(timeout=90) for _ in processes)
    for process in processes:
        process.join(30)
    queue.close()
    queue.join_thread()
    for rank in range(2):
        expected = values(make(rank=rank, world_size=2))
        assert found[rank] == (rank, len(expected), expected, rank, 2)


@pytest.mark.parametrize("last_batch", ["pad", "discard", "keep"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_samplers_are_what_each_rank_delivers(world_size, last_batch) -> None:
    for rank in range(world_size):
        loader = ShardedDataLoader(
            torch.arange(LENGTH), 3, shuffle=True, rank=rank, world_size=world_size,
            last_batch=last_batch,
        )  # fmt: skip
        for _ in range(3):
            indices, batches = list(loader.sampler), list(loader.batch_sampler)
            assert len(loader.sampler) == len(indices)
            assert len(loader.batch_sampler) == len(batches)
            assert values(loader) == batches
            assert [*itertools.chain(*batches)] == indices
