"""Datasets of the cluster tests. Sent by value, since workers elsewhere do not have the tests."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shmloader

#: Of most loaders: where batches are made must change nothing that is drawn.
OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 3}


def local(dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of an epoch that local workers make."""
    return list(shmloader.DataLoader(dataset, num_workers=2, **{**OPTIONS, **options}))


class Mixed:
    """Samples of several kinds, with random numbers.

    Dask's workers have threads that draw from ``random``, so it is used only if asked for.
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


class Bad(Mixed):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise LookupError("no 5")
        return index


class Large(Mixed):
    def __getitem__(self, index: int) -> Any:
        return torch.full((4_000_000,), index % 251, dtype=torch.uint8)


class Held(Mixed):
    def __init__(self, file: Path) -> None:
        super().__init__(4)
        self.file = file

    def __getitem__(self, index: int) -> Any:
        while not self.file.exists():
            time.sleep(0.01)
        return index


class Killing(Mixed):
    """The first process to load sample 9 notes that in a file, and sends itself a signal."""

    def __init__(self, killed: Path, number: int = signal.SIGKILL) -> None:
        super().__init__(24)
        self.killed, self.number = killed, number

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


class Hungry(Mixed):
    """Its sample 5 takes more memory than a worker may have, which Dask sees within a second."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(8)
        self.nbytes = nbytes

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            taken = np.ones(self.nbytes, np.uint8)
            time.sleep(60)
            return taken[:1]
        return index
