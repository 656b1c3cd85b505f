"""A ShardedDataLoader that is made before the processes of a run are launched."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from shmloader import ShardedDataLoader

pytestmark = pytest.mark.timeout(120)

LENGTH = 22


def make(**options):
    return ShardedDataLoader(torch.arange(LENGTH), 4, shuffle=True, **options)


def read(loader):
    return [batch.tolist() for batch in loader]


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
    batches = read(expected)
    for launched in (loader, pickle.loads(pickled), copy.copy(loader), copy.deepcopy(loader)):
        assert (launched.rank, launched.world_size) == (1, 2)
        assert launched.epoch == 3
        assert len(launched) == len(batches)
        assert read(launched) == batches


def test_the_first_epoch_settles_the_ranks(monkeypatch) -> None:
    launch(monkeypatch, None, None)
    loader = make()
    assert (loader.rank, loader.world_size, len(loader)) == (0, 1, 6)
    launch(monkeypatch, 2, 3)
    assert (loader.rank, loader.world_size, len(loader)) == (2, 3, 2)
    state = loader.state_dict()
    first = read(loader)
    assert first == read(make(rank=2, world_size=3))
    launch(monkeypatch, None, None)
    assert (loader.rank, loader.world_size, len(loader)) == (2, 3, 2)
    loader.load_state_dict(state)
    assert read(loader) == first
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
    queue.put((rank, len(loader), read(loader), loader.rank, loader.world_size))
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
        expected = read(make(rank=rank, world_size=2))
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
            assert read(loader) == batches
            assert [*itertools.chain(*batches)] == indices
