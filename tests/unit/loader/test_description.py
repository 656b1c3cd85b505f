"""What ``repr()`` of a loader shows."""

import torch
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader, ShardedDataLoader

DATA = torch.arange(12)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Unfit(Dataset):
    def __len__(self) -> int:
        raise RuntimeError("the length is not known")

    def __repr__(self) -> str:
        raise RuntimeError("nor is what it is")


SHOWN = {
    "DataLoader(<Tensor of length 12>, batch_size=1, num_workers=0)": DataLoader(DATA),
    "DataLoader(<list of length 2>, batch_size=2, num_workers=1)": (
        DataLoader([1, 2], 2, True, num_workers=1)
    ),
    "DataLoader(<Stream>, batch_size=1, num_workers=0)": DataLoader(Stream()),
    "DataLoader(<Unfit>, batch_size=None, num_workers=0)": DataLoader(Unfit(), None),
    "ShardedDataLoader(<Tensor of length 12>, batch_size=2, num_workers=0)": ShardedDataLoader(
        DATA, 2
    ),
}


def test_a_loader_shows_its_dataset_batch_size_and_workers() -> None:
    for text, loader in SHOWN.items():
        assert repr(loader) == text


def test_a_loader_of_the_user_s_shows_even_if_its_constructor_raises() -> None:
    class Mine(DataLoader):
        def __init__(self) -> None:
            self.text = repr(self)
            super().__init__(DATA)

    loader = Mine()
    assert loader.text == "Mine(<NoneType>, batch_size=1, num_workers=0)"
    assert repr(loader) == "Mine(<Tensor of length 12>, batch_size=1, num_workers=0)"
