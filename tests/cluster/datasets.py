"""The datasets of the cluster tests. Travels by value, since workers elsewhere have no tests."""

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shmloader


class Mixed:
    """Samples of several kinds, with random numbers.

    A worker of Dask's has threads of its own that draw from ``random``, so that is left out there.
    """

    def __init__(self, length: int = 40, wait_s: float = 0.0, *, uses_random: bool = False) -> None:
        self.length = length
        self.uses_random = uses_random
        self.wait_s = wait_s
        self.base = np.arange(60_000, dtype=np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.wait_s)
        drawn = [np.random.rand(), shmloader.sample_rng().random()]
        if self.uses_random:
            drawn.append(random.random())
        return {
            "image": torch.from_numpy(self.base[:3000] + index) + torch.rand(3000),
            "drawn": torch.tensor(drawn),
            "text": f"sample {index}",
        }


class Pids(Mixed):
    """Gives the process that made a sample."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return os.getpid()


class Notes(Mixed):
    """Notes in files that a sample was begun, and how it ended."""

    def __init__(self, folder: Path, wait_s: float) -> None:
        super().__init__(4, wait_s)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        (self.folder / "begun").touch()
        try:
            time.sleep(self.wait_s)
        except BaseException as error:
            (self.folder / "raised").write_text(repr(error))
            raise
        (self.folder / "ended").touch()
        return index


def draw(item: int) -> tuple[int, float]:
    """Give an item with a number that no other call has."""
    return item, random.SystemRandom().random()


class Bad(Mixed):
    """Its sample 5 is bad."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise LookupError("no 5")
        return index
