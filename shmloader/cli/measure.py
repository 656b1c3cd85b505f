"""Runs a loader of any kind, and measures what its consumer sees."""

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Self

from shmloader.cli.target import UsageError
from shmloader.insight.figures import Machine
from shmloader.insight.record import Record
from shmloader.insight.snapshot import LoaderStats, snapshot
from shmloader.insight.statistics import Statistics
from shmloader.loader.by_torch import samples_of
from shmloader.loader.dataloader import DataLoader
from shmloader.pools.cores import usable_cores
from shmloader.probing import probe

_END = object()


class Run:
    """Takes batches of a loader, epoch after epoch. Used as a context manager.

    Attributes:
        taken: Number of batches that were taken.
        epochs: Number of epochs that were begun.

    Args:
        loader: Any iterable of batches.
        step_s: Duration of a training step after each batch, in seconds.
    """

    def __init__(self, loader: Any, step_s: float = 0.0) -> None:
        self._loader = loader
        self._step_s = step_s
        self._statistics = Statistics()
        self.taken = 0
        self.epochs = 0

    def __enter__(self) -> Self:
        """Return the run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the loader's workers."""
        close: Callable[[], None] | None = probe(self._loader, "close")
        if close is not None:
            close()
        elif probe(self._loader, "_iterator") is not None:
            self._loader._iterator = None  # torch's persistent workers

    def batches(self) -> Generator[None]:
        """Take batches endlessly.

        Ends only if the loader cannot be iterated again, such as a generator.

        Raises:
            UsageError: If the first epoch has no batch.
        """
        batch_size = probe(self._loader, "batch_size") or 1
        is_empty = False
        while not is_empty:
            self.epochs += 1
            record = Record(
                self.epochs,
                "other",
                probe(self._loader, "num_workers", 0),
                keeps_workers=probe(self._loader, "persistent_workers", False),
            )
            self._statistics.begin(record, self)
            iterator = iter(self._loader)
            record.begin()
            is_empty = True
            while _take(iterator, record, batch_size):
                is_empty = False
                self.taken += 1
                if self._step_s:
                    time.sleep(self._step_s)
                yield
            if not self.taken:
                raise UsageError("the loader returns no batch")

    def stats(self) -> LoaderStats:
        """Return the statistics of the loader itself if it is ours, and otherwise of the run."""
        if isinstance(self._loader, DataLoader) and self._loader.stats("total").batches:
            return self._loader.stats("total")
        record = self._statistics.total()
        return snapshot(record, self.epochs, Machine(usable_cores(Path("/"))))


def _take(iterator: Iterator[Any], record: Record, batch_size: int) -> bool:
    """Take the next batch, and record how long that took. Returns whether there was one."""
    began_ns = time.monotonic_ns()
    batch = next(iterator, _END)
    ended_ns = time.monotonic_ns()
    about = "other" if batch is _END else samples_of(batch, batch_size)
    record.add(began_ns, ended_ns, 0, None, about, 0)
    return batch is not _END
