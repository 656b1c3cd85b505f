"""Collates the samples of a batch: the one place where the user's collate function is called.

Runs where batches are made. In a worker process, batches of torch's own ``default_collate`` are
packed into the slot instead, where that gives the same batch. The :class:`Timer` measures this and
the other parts of the work.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmloader.batch.explain import explain_collate_error
from shmloader.batch.sample_rng import SampleRng
from shmloader.insight.measurements import pack_work
from shmloader.memory.flat import FlatPacker
from shmloader.memory.writer import SlotWriter, is_plain

_now_ns = time.monotonic_ns

# With so many parts of a batch, bytes are counted in no others.
_MANY_PARTS = 1_000

# Kinds of values without a tensor or an array.
_PLAIN = frozenset({int, float, str, bytes, type(None)})


class Timer:
    """Measures the batches of one worker, or of a loader without workers. One thread uses it.

    Attributes:
        began_ns: When the batch was begun, by ``time.monotonic_ns()``.
        fetched_ns: When it was fetched and collated, so that encoding began.
        collate_ns: How long collating took.
        sample_count: How many samples the batch has.
    """

    began_ns = fetched_ns = collate_ns = sample_count = 0

    def begin(self) -> None:
        """Start the timer for a batch."""
        self.began_ns = self.fetched_ns = _now_ns()
        self.collate_ns = self.sample_count = 0

    def read(self, ended_ns: int | None = None) -> bytes:
        """Return the times of the batch, which was encoded at ``ended_ns`` or now, packed."""
        ended_ns = ended_ns or _now_ns()
        began_ns, fetched_ns, collate_ns = self.began_ns, self.fetched_ns, self.collate_ns
        fetch_ns = max(fetched_ns - began_ns - collate_ns, 0)
        return pack_work(began_ns, fetch_ns, collate_ns, ended_ns - fetched_ns, self.sample_count)


def bytes_of(batch: object) -> int:
    """Count the bytes of a batch's tensors and arrays, also inside lists, tuples and dicts.

    Once it has found a thousand parts, it looks no deeper: that would take longer than loading.
    """
    nbytes, parts = 0, [batch]
    for part in parts:  # which grows meanwhile
        if isinstance(part, torch.Tensor):
            nbytes += part.nbytes if part.layout is torch.strided else 0
        elif isinstance(part, np.ndarray):
            nbytes += part.nbytes
        elif isinstance(part, list | tuple | dict) and len(parts) < _MANY_PARTS:
            inner = part.values() if isinstance(part, dict) else part
            if not _PLAIN.issuperset(map(type, inner)):
                parts.extend(inner)
    return nbytes


class Collator:
    """Makes batches of samples. One thread at a time uses it.

    Args:
        collate_fn: The user's function, or torch's.
        timer: Counts samples, and measures the time that collating takes.
        takes_list: Whether the function's argument is a list of samples rather than one sample.
        writer: In a worker process, the writer of its slots; else None.
        rng: The samples' random number generators, which are seeded for collating; None without a
            seed.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        timer: Timer,
        *,
        takes_list: bool = True,
        writer: SlotWriter | None = None,
        rng: SampleRng | None = None,
    ) -> None:
        self._collate_fn, self._timer, self._rng = collate_fn, timer, rng
        self._takes_list, self._writer = takes_list, writer
        self._packer = None if writer is None or not is_plain(collate_fn) else FlatPacker(writer)

    def __call__(self, samples: Any, indices: Any = None) -> Any:
        """Return the batch of these samples, or the ``FlatLayout`` of one that was packed.

        Args:
            samples: What the dataset returned.
            indices: The samples' indices; None for those of an iterable dataset.

        Raises:
            BaseException: What the collate function raises, with a note if it is about the samples.
        """
        timer, writer = self._timer, self._writer
        began_ns = _now_ns()
        # Before collating, which may change the list.
        timer.sample_count += len(samples) if self._takes_list else 1
        try:
            if writer is not None and os.getpid() != writer.pid:
                os._exit(1)
            batch = None if self._packer is None else self._packer.pack(samples)
            if batch is None:
                batch = self._collate(samples)
        except Exception as error:
            explain_collate_error(error, samples, indices)
            raise
        finally:
            timer.collate_ns += _now_ns() - began_ns
        return batch

    def _collate(self, samples: Any) -> Any:
        if self._rng is not None:
            self._rng.begin_collate()
        writer = self._writer
        if writer is None:
            return self._collate_fn(samples)
        was_offered, writer.is_offered = writer.is_offered, True
        try:
            return self._collate_fn(samples)
        finally:
            writer.is_offered = was_offered
