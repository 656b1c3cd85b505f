"""Collates the samples of a batch: the one place where the user's collate function is called.

Runs where batches are made. In a worker process, batches of torch's own ``default_collate`` are
packed into the slot instead, where that gives the same batch.
"""

import inspect
import time
from collections.abc import Callable
from os import getpid
from typing import TYPE_CHECKING, Any

from shmloader.batch.explain import explain_collate_error
from shmloader.batch.timer import Timer
from shmloader.forked_child import end_if_forked
from shmloader.memory.collate import is_plain
from shmloader.memory.packer import FlatPacker
from shmloader.memory.writer import SlotWriter

if TYPE_CHECKING:
    from shmloader.batch.sample_rng import SampleRng

_now_ns = time.monotonic_ns


class Collator:
    """Makes batches of samples. One thread at a time uses it.

    Args:
        collate_fn: The user's function, or torch's.
        timer: Counts samples, and measures the time that collating takes.
        takes_list: Whether the function's argument is a list of samples rather than one sample.
        writer: In a worker process, the writer of its slots; else None.
        rng: The samples' random number generators; None without a seed.
        begin: Seeds for collating these samples. It is not called for a batch that is packed, since
            packing draws no random numbers. None to call nothing.

    Attributes:
        counts_samples: Whether the samples are counted here for ``rng``, as ``begin_sample`` was
            not called for them.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        timer: Timer,
        *,
        takes_list: bool = True,
        writer: SlotWriter | None = None,
        rng: "SampleRng | None" = None,
        begin: Callable[[Any], None] | None = None,
    ) -> None:
        self._collate_fn, self._timer = collate_fn, timer
        self._takes_list, self._writer = takes_list, writer
        self._rng, self._begin = rng, begin
        self._packer = None
        if writer is not None and is_plain(collate_fn):
            self._packer = FlatPacker(writer)
        self.counts_samples = False

    def __call__(self, samples: Any, indices: Any = None) -> Any:
        """Return the batch of these samples, or the ``FlatLayout`` of one that was packed.

        Args:
            samples: What the dataset returned.
            indices: The samples' indices; None for those of an iterable dataset.

        Raises:
            TypeError: If the samples are coroutines that were not awaited.
            BaseException: What the collate function raises; see :func:`explain_collate_error`.
        """
        timer, writer, rng = self._timer, self._writer, self._rng
        began_ns = _now_ns()
        # Before collating, which may change the list.
        count = len(samples) if self._takes_list else 1
        timer.sample_count += count
        try:
            if writer is not None and getpid() != writer.pid:
                end_if_forked(writer.pid)
            batch = None if self._packer is None else self._packer.pack(samples)
            if batch is None:
                batch = self._collate(samples)
        except Exception as error:
            if indices is not None and _close_coroutines(samples):
                raise TypeError(describe_coroutines("the dataset")) from error
            explain_collate_error(error, samples, indices)
            raise
        finally:
            timer.collate_ns += _now_ns() - began_ns
        if rng is not None:
            rng.end_batch(count if self.counts_samples else 0)
        return batch

    def _collate(self, samples: Any) -> Any:
        if self._begin is not None:
            self._begin(samples)
        writer = self._writer
        if writer is None:
            return self._collate_fn(samples)
        was_offered, writer.is_offered = writer.is_offered, True
        try:
            return self._collate_fn(samples)
        finally:
            writer.is_offered = was_offered


def _close_coroutines(samples: Any) -> bool:
    """Close samples that are coroutines, and were not begun; return whether there are any."""
    pending = [
        sample
        for sample in (samples if isinstance(samples, list) else [samples])
        if inspect.iscoroutine(sample) and inspect.getcoroutinestate(sample) == inspect.CORO_CREATED
    ]
    for sample in pending:
        sample.close()  # else Python warns that it was never awaited
    return bool(pending)


def describe_coroutines(source: str) -> str:
    """Return the text of the error for samples that nothing awaits.

    Args:
        source: The object that the samples come from, in words.
    """
    return (
        f"{source} gives coroutines for samples, since __getitem__ is an async def: give "
        "fetch_concurrency=, the number of samples of a batch that are awaited at the same time"
    )
