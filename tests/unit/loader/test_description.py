"""What ``repr()`` of a loader shows."""

import pickle
from fractions import Fraction

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader, ShardedDataLoader
from shmloader.sampling import TokenBatches

DATA = torch.arange(12)
CONTEXT = torch.multiprocessing.get_context("spawn")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Unfit(Dataset):
    def __len__(self) -> int:
        raise RuntimeError("the length is not known")


def best(index: int, error: Exception) -> int:
    return 0


SHOWN = {
    "DataLoader(<Tensor of length 12>, batch_size=1, num_workers=0)": DataLoader(DATA),
    "DataLoader(<list of length 2>, batch_size=2, num_workers=1, sampler=<RandomSampler>)": (
        DataLoader([1, 2], 2, True, num_workers=1)
    ),
    "DataLoader(<Stream>, batch_size=1, num_workers=0)": DataLoader(Stream()),
    "DataLoader(<Unfit>, batch_size=1, num_workers=0)": DataLoader(Unfit()),
    "DataLoader(<Tensor of length 12>, batch_size=None, num_workers=0, "
    "batch_sampler=<TokenBatches>, collate_fn=list)": DataLoader(
        DATA, batch_sampler=TokenBatches([1] * 12, 2), collate_fn=list
    ),
    "DataLoader(<Tensor of length 12>, batch_size=2, num_workers=0, drop_last=True, "
    "timeout=1.5, generator=<Generator>)": DataLoader(
        DATA, 2, generator=torch.Generator(), drop_last=True, timeout=1.5
    ),
    "DataLoader(<Tensor of length 12>, batch_size=2, num_workers=2, "
    "sampler=<SeededRandomSampler>, multiprocessing_context=<SpawnContext>, shm_size='1GiB', "
    "device=device(type='cpu'), device_transform=list, on_error=best, "
    "max_failures=Fraction(1, 5), seed=0)": DataLoader(
        DATA, 2, shuffle=True, num_workers=2, multiprocessing_context=CONTEXT, seed=0,
        on_error=best, max_failures=Fraction(1, 5), shm_size="1GiB",
        device=torch.device("cpu"), device_transform=list,
    ),
    "ShardedDataLoader(<Tensor of length 12>, batch_size=2, num_workers=1, "
    "sampler=<SeededShardSampler>, collate_fn=list, last_batch='pad', seed=7, "
    "rank=0, world_size=2, devices=['cpu', 'cpu'])": ShardedDataLoader(
        DATA, 2, collate_fn=list, last_batch="pad", rank=0, world_size=2, seed=7,
        devices=["cpu", "cpu"], num_workers=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", SHOWN)
def test_a_loader_shows_its_dataset_and_what_is_not_the_default(text) -> None:
    assert repr(SHOWN[text]) == text
    if "Generator" not in text:  # which torch cannot pickle
        assert repr(pickle.loads(pickle.dumps(SHOWN[text]))) == text


def test_auto_shows_the_present_number_of_workers() -> None:
    loader = DataLoader(DATA, num_workers="auto")
    assert f"num_workers='auto' ({loader.num_workers} now)" in repr(loader)


def test_a_loader_shows_what_its_attributes_are_now() -> None:
    loader = DataLoader(DATA)
    loader.timeout = 3
    assert repr(loader).endswith("num_workers=0, timeout=3)")


def test_a_loader_of_the_user_s_shows_even_if_its_constructor_raises() -> None:
    class Mine(DataLoader):
        def __init__(self) -> None:
            self.text = repr(self)
            super().__init__(DATA)

    loader = Mine()
    assert loader.text == "Mine(<NoneType>, batch_size=1, num_workers=0)"
    assert repr(loader) == "Mine(<Tensor of length 12>, batch_size=1, num_workers=0)"
