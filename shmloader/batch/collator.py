"""Collates the samples of a batch: the one place where the user's collate function is called.

Runs where batches are made. In a worker process, batches of torch's own ``default_collate`` are
packed into the slot instead, where that gives the same batch.
"""

import inspect
import time
from collections.abc import Callable
from os import getpid
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from shmloader.batch.ragged import explain
from shmloader.batch.timer import Timer
from shmloader.forked_child import end_if_forked
from shmloader.memory.collate import is_plain
from shmloader.memory.packer import FlatPacker
from shmloader.memory.writer import SlotWriter

if TYPE_CHECKING:
    from shmloader.batch.sample_rng import SampleRng

_now_ns = time.monotonic_ns


class Collator:
    """Makes one batch of samples, measures how long that takes, and explains its errors.

    Args:
        collate_fn: The user's collate function, or torch's.
        timer: Measures the work.
        takes_list: Whether the function's argument is a list of samples rather than one sample.
        writer: In a worker process, the writer of its slots; else None.
        rng: The samples' random number generators; None without a seed.
        begin: Seeds for collating these samples. It is not called for a batch that is packed, since
            packing draws no random numbers. None to call nothing.
        refuses_coroutines: Whether samples that are coroutines, which the function does not await,
            raise a TypeError.

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
        refuses_coroutines: bool = False,
    ) -> None:
        self._collate_fn, self._timer = collate_fn, timer
        self._takes_list, self._writer = takes_list, writer
        self._rng, self._begin = rng, begin
        self._refuses_coroutines = refuses_coroutines
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
            BaseException: What the collate function raises; see :func:`ragged.explain`.
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
            explained = explain(error, samples, indices)
            if explained is None:
                raise
        else:
            if rng is not None:
                rng.end_batch(count if self.counts_samples else 0)
            return batch
        finally:
            timer.collate_ns += _now_ns() - began_ns
        try:
            # Not in the except block, where Python would print the first exception as well.
            raise explained
        finally:
            del explained  # its traceback refers to this frame

    def _collate(self, samples: Any) -> Any:
        if self._begin is not None:
            self._begin(samples)
        collate, writer = self._collate_fn, self._writer
        if self._refuses_coroutines:
            first = samples[0] if isinstance(samples, list) and samples else samples
            if type(first) is CoroutineType:
                collate = self._collate_coroutines
        if writer is None:
            return collate(samples)
        was_offered, writer.is_offered = writer.is_offered, True
        try:
            return collate(samples)
        finally:
            writer.is_offered = was_offered

    def _collate_coroutines(self, samples: Any) -> Any:
        """Collate coroutines. Raise a TypeError if the collate function does not await them."""
        # Copied now, since collate_fn may change the list.
        own = list(samples) if isinstance(samples, list) else [samples]
        batch, error = None, None
        try:
            batch = self._collate_fn(samples)
        except Exception as caught:
            if inspect.getcoroutinestate(own[0]) != inspect.CORO_CREATED:
                raise
            error = caught
        if inspect.getcoroutinestate(own[0]) != inspect.CORO_CREATED:
            return batch
        for sample in own:
            if inspect.iscoroutine(sample):
                sample.close()  # else Python warns that it was never awaited
        raise TypeError(describe_coroutines("the dataset")) from error


def describe_coroutines(source: str) -> str:
    """Return the text of the error for samples that nothing awaits.

    Args:
        source: The object that the samples come from, in words.
    """
    return (
        f"{source} gives coroutines for samples, since __getitem__ is an async def: give "
        "fetch_concurrency=, the number of samples of a batch that are awaited at the same time"
    )
