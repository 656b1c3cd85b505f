"""What the processes of a cluster run for ``cluster.py``: datasets, and the bare task.

These have a module of their own, so that each process imports it, and no call carries their code.
The module's folder must be on the path of these processes.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _workloads import WORKLOADS, Samples, smallest
from PIL import Image
from torch.utils.data import Dataset

from shmloader import sample_rng

#: The packed argument of a bare task: bytes of the message, bytes of the array, duration in ns.
_SIZES = struct.Struct("<IIQ")


class Waiting(Dataset[torch.Tensor]):
    """Samples that wait, as for an answer over a network."""

    def __init__(self, length: int, sample_s: float) -> None:
        self.length = length
        self.sample_s = sample_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        return torch.full((8,), index)


class Training(Dataset[torch.Tensor]):
    """JPEG files as in training: decoded, a random part of each resized and perhaps mirrored.

    The part has 8 to 100 % of the area, and an aspect ratio of 3:4 to 4:3, as usual for ImageNet.
    """

    def __init__(self, paths: Sequence[Path], length: int) -> None:
        self.paths = paths
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        rng = sample_rng()
        with Image.open(self.paths[index % len(self.paths)]) as file:
            image = file.convert("RGB")
        area = image.width * image.height * rng.uniform(0.08, 1.0)
        shape = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        width = min(image.width, round(math.sqrt(area * shape)))
        height = min(image.height, round(math.sqrt(area / shape)))
        left = rng.integers(image.width - width, endpoint=True)
        top = rng.integers(image.height - height, endpoint=True)
        box = (left, top, left + width, top + height)
        part = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, box)
        if rng.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.asarray(part).transpose(2, 0, 1).copy())


_SIDE = 224


class Tiny(Dataset[torch.Tensor]):
    """Samples that are all the same small tensor, which is in memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.sample = torch.arange(8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


@functools.cache
def resident(key: str, *, is_smallest: bool) -> np.ndarray[Any, Any]:
    """Return the samples of a workload as one array, made once in each process."""
    work = WORKLOADS[key]
    samples = Samples(smallest(work) if is_smallest else work).samples
    return torch.stack([one for one in samples if isinstance(one, torch.Tensor)]).numpy()


def take(ids: dict[str, Any], key: str, *, is_smallest: bool) -> dict[str, Any]:
    """Make a batch for Ray Data: one gather from the resident samples."""
    samples = resident(key, is_smallest=is_smallest)
    return {"image": samples[ids["id"] % len(samples)]}


def pack_bare(nbytes: int, message_bytes: int, contents_bytes: int, busy_ns: int) -> bytes:
    """Return an argument for :func:`answer`.

    Args:
        nbytes: Length of the argument.
        message_bytes: Length of the message that comes back.
        contents_bytes: Length of the array that comes back; 0 for none.
        busy_ns: How long the call keeps its process busy.
    """
    return _SIZES.pack(message_bytes, contents_bytes, busy_ns).ljust(nbytes, b"\x55")


def answer(
    version: str,  # noqa: ARG001 - arguments as long as our task's
    shared: bytes,  # noqa: ARG001
    own: bytes,
    attempt: int,  # noqa: ARG001
) -> tuple[Any, ...]:
    """Return a result as large as our task's, after as long a time, and do nothing else."""
    began_ns = time.monotonic_ns()
    message_bytes, contents_bytes, busy_ns = _SIZES.unpack_from(own)
    array = np.zeros(contents_bytes, np.uint8) if contents_bytes else None
    message = bytes(message_bytes)
    while time.monotonic_ns() - began_ns < busy_ns:
        pass
    return os.getpid(), "", 0, message, array
