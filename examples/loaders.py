"""A loader for the command line to look at: samples that wait for a disk, and take some work.

shmloader bench examples.loaders:make_loader --step-ms 5
shmloader tune examples.loaders:make_loader
"""

import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader

SIDE = 64  # pixels
READ_S = 0.0005


class Pictures(Dataset[tuple[Tensor, int]]):
    """Noise, that takes its time to be read."""

    def __len__(self) -> int:
        return 4_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(READ_S)
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, SIDE, SIDE, generator=generator), index % 10


def make_loader() -> shmloader.DataLoader[tuple[Tensor, int]]:
    return shmloader.DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=2)
