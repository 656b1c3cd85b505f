"""torch's own iterators, for what ours cannot load: data pipes, and systems without memfd or pidfd.

They load as torch does, with torch's own workers. This module adds what the loader promises:
``close()``, and the statistics that can be measured from outside the workers.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from shmloader.batch.collator import bytes_of
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.insight.record import Record
from shmloader.loader.config import LoaderParts
from shmloader.memory.limits import why_unsupported
from shmloader.sampling.plan import EpochPlan

# Levels of nested containers that are searched for a tensor; a container may contain itself.
_DEEPEST = 8


def describe_unsupported() -> str:
    """Return why a loader runs on torch's own workers."""
    return (
        f"shmloader cannot have worker processes of its own here, since {why_unsupported()}; this "
        "loader runs on torch's own workers instead."
    )


def warn_of_torch_workers(given: list[str]) -> None:
    """Warn that a loader runs on torch's own workers.

    Args:
        given: The loader's arguments that torch's workers do not support.

    Raises:
        RuntimeError: If there are any.
    """
    if given:
        raise RuntimeError(
            f"{describe_unsupported()} These cannot be combined with {', '.join(given)}."
        )
    warnings.warn(describe_unsupported(), RuntimeWarning, stacklevel=3)


class TorchIterator(Iterator[Any]):
    """torch's own iterator, with statistics and ``close()``. Other attributes are torch's.

    Args:
        loader: The loader.
        plan: The plan of its epochs, which has begun one.
        parts: The objects that all iterators of the loader share.

    Attributes:
        is_closed: Whether ``close()`` was called.
    """

    def __init__(self, loader: Any, plan: EpochPlan, parts: LoaderParts) -> None:
        self.is_closed, self._plan, self._parts = False, plan, parts
        has_workers = loader.num_workers > 0
        kind = _MultiProcessingDataLoaderIter if has_workers else _SingleProcessDataLoaderIter
        self._begin(loader, kind)

    def _begin(self, loader: Any, make: Callable[[Any], Any]) -> Self:
        began_ns = time.monotonic_ns()
        self._torchs = make(loader)
        self._batch_size, self._progress = loader.batch_size, self._plan.progress
        self._record = Record(
            self._plan.epoch,
            "torch",
            loader.num_workers,
            keeps_workers=loader.persistent_workers,
            begin_ns=began_ns,
        )
        self._parts.statistics.begin(self._record, self)
        self._record.begin()
        return self

    def _reset(self, loader: Any) -> None:
        """Begin a further epoch with the same workers; torch's ``__iter__`` calls this."""

        def reset(loader: Any) -> Any:
            self._torchs._reset(loader)
            return self._torchs

        loader.begin_epoch(functools.partial(self._begin, loader, reset), draws_seed=False)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's iterator, such as ``_shutdown_workers``."""
        if name == "_torchs":  # an error has ended its constructor
            raise AttributeError(name)
        return getattr(self._torchs, name)

    def __len__(self) -> int:
        return len(self._torchs)

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            ClosedLoaderError: After ``close()``.
        """
        if self.is_closed:
            raise ClosedLoaderError(ITERATOR_CLOSED)
        record, began_ns = self._record, time.monotonic_ns()
        try:
            batch = next(self._torchs)
        except Exception as error:
            record.add(began_ns, time.monotonic_ns(), 0, None, "other", 0)
            if isinstance(error, StopIteration):
                record.end()
                self._progress.is_ended = True
            else:
                record.failures += 1
            raise
        ended_ns = time.monotonic_ns()
        samples = samples_of(batch, self._batch_size)
        record.add(began_ns, ended_ns, 0, None, samples, bytes_of(batch))
        return batch

    def close(self) -> None:
        """End the epoch and the workers. May be called again."""
        self.is_closed = True
        self._record.end()
        if isinstance(self._torchs, _MultiProcessingDataLoaderIter):
            self._torchs._shutdown_workers()


def samples_of(batch: Any, batch_size: int | None) -> int:
    """Return the number of samples of any loader's batch, as the batch's first value shows it.

    Args:
        batch: The batch.
        batch_size: The loader's batch size, which is returned if the first value is no tensor or
            array; None if a batch is one sample.
    """
    if batch_size is None:
        return 1
    with contextlib.suppress(Exception):  # the batch may be any object
        for _ in range(_DEEPEST):
            if isinstance(batch, list | tuple):
                batch = batch[0]
            elif isinstance(batch, dict):
                batch = next(iter(batch.values()))
        return int(batch.shape[0])
    return batch_size
