"""A loader to try the command line with. Its samples wait as for a disk, and compute a little.

shmloader bench examples.loaders:make_loader --step-ms 5
"""

import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader

SIDE = 64  # pixels
READ_S = 0.0005


class Pictures(Dataset[tuple[Tensor, int]]):
    """Random images that take a moment each, as reading a file would."""

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(READ_S)
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, SIDE, SIDE, generator=generator), index % 10


def make_loader() -> shmloader.DataLoader[tuple[Tensor, int]]:
    return shmloader.DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=2)
