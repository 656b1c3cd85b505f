"""What the processes of a cluster run for ``cluster.py``: datasets, and the bare task.

A module of its own, so that each process imports it and no call carries it. Its folder has to be
on the path there.
"""

from __future__ import annotations

import functools
import pickle
import struct
import time
from typing import Any

import numpy as np
import torch
from _workloads import WORKLOADS, Samples, smallest
from torch.utils.data import Dataset

#: What a bare task reads from its packed argument.
_SIZES = struct.Struct("<II")


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


class Tiny(Dataset[torch.Tensor]):
    """Samples of one tensor, which lies in memory."""

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


#: As long as the packed name of a process.
_NAME = pickle.dumps((b"12345678", "localhost", 12345, "0" * 54), pickle.HIGHEST_PROTOCOL)


def pack_bare(nbytes: int, message_bytes: int, contents_bytes: int) -> bytes:
    """Return an argument for :func:`answer`.

    Args:
        nbytes: Its length.
        message_bytes: Length of the message that comes back.
        contents_bytes: Length of the array that comes back; 0 for none.
    """
    return _SIZES.pack(message_bytes, contents_bytes).ljust(nbytes, b"\x55")


def answer(
    version: str,  # noqa: ARG001 - as long as our task's
    shared: bytes,  # noqa: ARG001
    own: bytes,
    attempt: int,  # noqa: ARG001
) -> tuple[Any, ...]:
    """Return as much as our task does, and do nothing."""
    message_bytes, contents_bytes = _SIZES.unpack_from(own)
    array = np.zeros(contents_bytes, np.uint8) if contents_bytes else None
    return _NAME, 0, time.monotonic_ns(), time.monotonic_ns(), bytes(message_bytes), array, ""
