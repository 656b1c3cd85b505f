"""Measures how long fetching, collating and encoding a batch take."""

import collections
import time
from typing import Any

import numpy as np
import torch

_CONTAINERS = (list, tuple, dict)


class Timer:
    """Measures the batches of one worker, or of a loader without workers. One thread uses it.

    Attributes:
        began_ns: When the batch was begun, by ``time.monotonic_ns()``.
        fetched_ns: When it was fetched and collated, so that encoding began.
        collate_ns: How long collating took.
        sample_count: How many samples the batch has.
    """

    __slots__ = ("began_ns", "collate_ns", "fetched_ns", "sample_count")

    def __init__(self) -> None:
        self.begin()

    def begin(self, now_ns: int | None = None) -> None:
        """Start the timer for a batch, now or at ``now_ns``."""
        self.began_ns = self.fetched_ns = time.monotonic_ns() if now_ns is None else now_ns
        self.collate_ns = self.sample_count = 0

    def read(self) -> tuple[int, int, int, int, int]:
        """Return the times of the batch. Called when the batch has been encoded.

        They are the fields of :class:`~shmloader.insight.measurements.WorkTimes`: times in
        nanoseconds, and the number of samples. A plain tuple is made and pickled faster.
        """
        ended_ns = time.monotonic_ns()
        began_ns, fetched_ns, collate_ns = self.began_ns, self.fetched_ns, self.collate_ns
        fetch_ns = fetched_ns - began_ns - collate_ns
        if fetch_ns < 0:  # noqa: PLR1730 - a call of max() costs more
            fetch_ns = 0
        return began_ns, fetch_ns, collate_ns, ended_ns - fetched_ns, self.sample_count


def bytes_of(batch: object) -> int:
    """Count the bytes of a batch's tensors and arrays, also inside lists, tuples and dicts.

    A container that occurs more than once, even inside itself, is counted once.
    """
    if type(batch) is torch.Tensor and batch.layout is torch.strided:
        return batch.nbytes
    total = 0
    parts: collections.deque[Any] = collections.deque([batch])
    seen: set[int] = set()
    while parts:
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            if part.layout is torch.strided:
                total += part.nbytes
        elif isinstance(part, np.ndarray):
            total += part.nbytes
        elif isinstance(part, _CONTAINERS) and id(part) not in seen:
            seen.add(id(part))
            parts.extend(part.values() if isinstance(part, dict) else part)
    return total
