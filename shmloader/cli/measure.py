"""Runs a loader of any kind, and measures what its consumer sees."""

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from shmloader.cli.target import UsageError
from shmloader.insight.record import Record, Statistics
from shmloader.insight.snapshot import LoaderStats, Machine, snapshot
from shmloader.loader.by_torch import samples_of
from shmloader.loader.dataloader import DataLoader
from shmloader.pools.cores import usable_cores
from shmloader.probing import probe


class Run:
    """A loader, batch after batch, epoch after epoch. Used as a context manager.

    Attributes:
        taken: Batches that were taken.
        epochs: Epochs that were begun.

    Args:
        loader: Any iterable of batches.
        step_s: A training step between two batches.
    """

    def __init__(self, loader: Any, step_s: float = 0.0) -> None:
        self._loader = loader
        self._step_s = step_s
        self._statistics = Statistics()
        self.taken = 0
        self.epochs = 0

    def __enter__(self) -> "Run":
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the loader's workers."""
        close: Callable[[], None] | None = probe(self._loader, "close")
        if close is not None:
            close()
        elif probe(self._loader, "_iterator") is not None:
            self._loader._iterator = None  # torch's persistent workers

    def batches(self) -> Generator[float]:
        """Take batches for ever; gives the seconds from one to the next.

        What can be iterated but once, a generator say, ends it.

        Raises:
            UsageError: If there is none at all.
        """
        before_s = time.monotonic()
        while True:
            self.epochs += 1
            record = Record(
                self.epochs,
                "other",
                probe(self._loader, "num_workers", 0),
                keeps_workers=probe(self._loader, "persistent_workers", False),
            )
            self._statistics.begin(record, self)
            iterator = iter(self._loader)
            record.note_begun()
            count = 0
            for _ in self._take(iterator, record):
                count += 1
                self.taken += 1
                if self._step_s:
                    time.sleep(self._step_s)
                now_s = time.monotonic()
                yield now_s - before_s
                before_s = now_s
            if not self.taken:
                raise UsageError("the loader gives no batch")
            if count == 0:
                return

    def _take(self, iterator: Iterator[Any], record: Record) -> Iterator[None]:
        while True:
            began_ns = time.monotonic_ns()
            batch = next(iterator, self)
            record.note_wait(began_ns, time.monotonic_ns())
            if batch is self:
                return
            record.batches += 1
            batch_size = probe(self._loader, "batch_size") or 1
            record.samples += samples_of(batch, batch_size)
            del batch
            yield

    def stats(self) -> LoaderStats:
        """What there is to say of it, by our own loader where it is one."""
        if isinstance(self._loader, DataLoader) and self._loader.stats("total").batches:
            return self._loader.stats("total")
        record = self._statistics.total()
        return snapshot(record, self.epochs, Machine(usable_cores(Path("/"))))
