"""Measures how long fetching, collating and encoding a batch take."""

import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_now_ns = time.monotonic_ns
_CONTAINERS = (list, tuple, dict)


class Timer:
    """Measures the batches of one worker, or of a loader without workers. One thread uses it."""

    __slots__ = ("_began_ns", "_collate_ns", "_fetched_ns", "_sample_count")

    def __init__(self) -> None:
        self.begin()

    def begin(self, now_ns: int | None = None) -> None:
        """Start the timer for a batch, now or at ``now_ns``."""
        self._began_ns = self._fetched_ns = _now_ns() if now_ns is None else now_ns
        self._collate_ns = 0
        self._sample_count = 0

    def wrap(self, collate_fn: Callable[[Any], Any], *, counts_items: bool) -> Callable[[Any], Any]:
        """Wrap a collate function so that its time is measured.

        Args:
            collate_fn: The collate function.
            counts_items: Whether its argument is a list of samples rather than one sample.
        """

        def timed(samples: Any) -> Any:
            began_ns = _now_ns()
            # Before collating, which may change the list.
            self._sample_count += len(samples) if counts_items else 1
            try:
                return collate_fn(samples)
            finally:
                self._collate_ns += _now_ns() - began_ns

        return timed

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since the batch was begun."""
        return _now_ns() - self._began_ns

    def count(self, sample_count: int) -> None:
        """Add to the number of the batch's samples."""
        self._sample_count += sample_count

    def fetched(self) -> None:
        """Note that the batch is fetched and collated, so that encoding begins."""
        self._fetched_ns = _now_ns()

    def read(self) -> tuple[int, int, int, int, int]:
        """Return the times of the batch. Called when the batch has been encoded.

        They are the fields of :class:`~shmloader.insight.measurements.WorkTimes`: times in
        nanoseconds, and the number of samples. A plain tuple is made and pickled faster.
        """
        ended_ns = _now_ns()
        began_ns, fetched_ns, collate_ns = self._began_ns, self._fetched_ns, self._collate_ns
        fetch_ns = fetched_ns - began_ns - collate_ns
        if fetch_ns < 0:  # noqa: PLR1730 - a call of max() costs more
            fetch_ns = 0
        return began_ns, fetch_ns, collate_ns, ended_ns - fetched_ns, self._sample_count


def bytes_of(batch: object) -> int:
    """Count the bytes of a batch's tensors and arrays, also inside lists, tuples and dicts.

    A container that occurs more than once, even inside itself, is counted once.
    """
    if type(batch) is torch.Tensor and batch.layout is torch.strided:
        return batch.nbytes
    total = 0
    parts = collections.deque([batch])
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
