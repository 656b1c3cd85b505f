"""torch's own iterators, for what ours cannot load: data pipes, and systems without memfd or pidfd.

They load as torch does, with torch's own workers. This module adds what the loader promises:
``close()``, and the statistics that can be measured from outside the workers.
"""

import contextlib
import functools
import time
import warnings
from typing import Any, Self

from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
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


class TorchIterator(_BaseDataLoaderIter):
    """Adds statistics and ``close()`` to torch's iterators.

    Attributes:
        is_closed: Whether ``close()`` was called.
    """

    _record: Record

    def __init__(self, loader: Any, plan: EpochPlan, parts: LoaderParts) -> None:
        self.is_closed = False
        self._plan, self._parts = plan, parts
        began_ns = time.monotonic_ns()
        super().__init__(loader)
        self._begin(loader, began_ns)

    def _begin(self, loader: Any, began_ns: int) -> None:
        self._batch_size = loader.batch_size
        self._progress = self._plan.progress
        self._record = Record(
            self._plan.epoch,
            "torch",
            loader.num_workers,
            keeps_workers=loader.persistent_workers,
            begin_ns=began_ns,
        )
        self._parts.statistics.begin(self._record, self)
        self._record.begin()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch; torch calls this, for the first epoch in the constructor."""
        if first_iter:
            super()._reset(loader, first_iter)
        else:
            loader.begin_epoch(functools.partial(self._go_on, loader), draws_seed=False)

    def _go_on(self, loader: Any) -> Self:
        began_ns = time.monotonic_ns()
        super()._reset(loader)
        self._begin(loader, began_ns)
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            ClosedLoaderError: After ``close()``.
        """
        if self.is_closed:
            raise ClosedLoaderError(ITERATOR_CLOSED)
        record, began_ns = self._record, time.monotonic_ns()
        try:
            batch = super().__next__()
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
        """End the epoch: no further batch is delivered. May be called again."""
        self.is_closed = True
        self._record.end()


class TorchInProcessIterator(TorchIterator, _SingleProcessDataLoaderIter):
    """torch's iterator without workers, which loads on the consumer's thread."""


class TorchWorkerIterator(TorchIterator, _MultiProcessingDataLoaderIter):
    """torch's iterator with worker processes."""

    def close(self) -> None:
        """End the epoch and the workers. May be called again."""
        super().close()
        self._shutdown_workers()


def torch_iterator(loader: Any, plan: EpochPlan, parts: LoaderParts) -> TorchIterator:
    """Return torch's iterator over a new epoch of the loader."""
    if loader.num_workers == 0:
        return TorchInProcessIterator(loader, plan, parts)
    loader.check_worker_number_rationality()
    return TorchWorkerIterator(loader, plan, parts)


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
