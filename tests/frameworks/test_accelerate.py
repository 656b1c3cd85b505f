"""accelerate on one process: `prepare` keeps the class and the arguments, and it resumes."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader.integrations import accelerate as adapter
from tests.frameworks.support import LENGTH, Rows, assert_equal, engines, seed_everything

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


class Bad(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("bad")
        return super().__getitem__(index)


class Counting(IterableDataset):
    def __iter__(self):
        yield from map(torch.tensor, range(LENGTH))


def make(**kwargs: Any) -> shmloader.DataLoader[Any]:
    given = {"dataset": Rows(), "batch_size": 8, "num_workers": 2, "seed": 7, "shuffle": True}
    return shmloader.DataLoader(**(given | kwargs))


def epochs(loader: Any, count: int = 2) -> list[list[Any]]:
    return [[batch[0].clone() for batch in loader] for _ in range(count)]


def test_prepare_keeps_the_class_and_the_arguments():
    loader = make(on_error="skip", worker_restarts=1, prefetch_factor=3, dataset=Bad())
    with engines() as found:
        prepared = adapter.prepare(Accelerator(cpu=True), loader)
        base = prepared.base_dataloader
        seen = torch.cat([batch[0][:, 0] for batch in prepared])
    assert found == {"shmloader"}
    assert type(base) is shmloader.DataLoader
    assert isinstance(prepared, shmloader.DataLoader)
    assert (base.on_error, base.worker_restarts, base.seed) == ("skip", 1, 7)
    assert base.prefetch_factor == 3
    assert sorted(seen.tolist()) == [i for i in range(LENGTH) if i != 3]
    assert base.failures.total == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 7])
def test_prepared_batches_are_those_of_the_loader_itself(seed, workers):
    seed_everything()
    expected = epochs(make(seed=seed, num_workers=workers))
    seed_everything()
    prepared = adapter.prepare(Accelerator(cpu=True), make(seed=seed, num_workers=workers))
    assert_equal(epochs(prepared), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_is_prepared_too(workers):
    loader = shmloader.DataLoader(Counting(), batch_size=8, num_workers=workers)
    expected = list(loader)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False)
    )
    with engines() as found:
        assert_equal(list(adapter.prepare(accelerator, loader)), expected)
    assert found == {"shmloader"}


@pytest.mark.parametrize("at", [(0, 1), (1, 2), (1, 0)])
def test_save_state_and_load_state_resume_in_the_middle_of_an_epoch(at, tmp_path):
    epoch, done = at
    expected = epochs(make(), 3)
    accelerator = Accelerator(cpu=True)
    prepared = adapter.prepare(accelerator, make())
    for _ in range(epoch):
        list(prepared)
    seen = 0
    if done == 0:
        accelerator.save_state(str(tmp_path))
    else:
        for _ in prepared:
            seen += 1
            if seen == done:
                accelerator.save_state(str(tmp_path))
                break
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    resumed = adapter.prepare(accelerator, make())
    accelerator.load_state(str(tmp_path))
    rest = [[batch[0] for batch in resumed] for _ in range(3 - epoch)]
    assert_equal(rest, [expected[epoch][done:], *expected[epoch + 1 :]])


@pytest.mark.parametrize("seed", [None, 7])
def test_skip_first_batches_keeps_the_class_and_leaves_out_the_first(seed):
    seed_everything()
    dataset = torch.utils.data.TensorDataset(torch.arange(20.0).view(20, 1))
    loader = make(seed=seed, dataset=dataset, shuffle=seed is not None)
    expected = [batch[0] for batch in make(seed=seed, dataset=dataset, shuffle=seed is not None)]
    prepared = adapter.prepare(Accelerator(cpu=True), loader)
    rest = adapter.skip_first_batches(prepared, 2)
    assert type(rest.base_dataloader) is shmloader.DataLoader
    assert_equal([batch[0] for batch in rest], expected[2:])


def test_with_a_seed_skipping_does_not_change_the_samples_random_numbers():
    expected = epochs(make())
    prepared = adapter.prepare(Accelerator(cpu=True), make())
    list(prepared)
    rest = adapter.skip_first_batches(prepared, 1)
    assert_equal([batch[0] for batch in rest], expected[1][1:])


def test_other_loaders_are_refused():
    with pytest.raises(TypeError, match=r"needs a shmloader\.DataLoader"):
        adapter.prepare(Accelerator(cpu=True), torch.utils.data.DataLoader(Rows()))
    with pytest.raises(TypeError, match="batches of a ShardedDataLoader again"):
        adapter.prepare(Accelerator(cpu=True), shmloader.ShardedDataLoader(Rows()))


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("splits", [False, True], ids=["whole batches", "split batches"])
def test_with_install_and_a_seed_each_rank_draws_random_numbers_of_its_own(splits, skipped):
    numbers = []
    for rank in range(2):
        batches = BatchSampler(SequentialSampler(range(LENGTH)), 4, drop_last=False)
        share = BatchSamplerShard(batches, 2, rank, split_batches=splits)
        if skipped:
            share = SkipBatchSampler(share, skipped)
        with shmloader.installed(seed=7):
            numbers += torch.cat([x[:, 1] for x, _ in TorchLoader(Rows(), batch_sampler=share)])
    assert len({*map(float, numbers)}) == len(numbers) > 0
