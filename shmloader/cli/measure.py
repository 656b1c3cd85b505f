"""Runs a loader of any kind, measures what its consumer sees, and shows the progress."""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Self

from shmloader.cli.target import UsageError
from shmloader.insight.record import Record
from shmloader.insight.snapshot import LoaderStats, Machine, snapshot
from shmloader.insight.statistics import Statistics
from shmloader.loader.by_torch import samples_of
from shmloader.loader.dataloader import DataLoader
from shmloader.pools.cores import usable_cores
from shmloader.probing import probe

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

# Seconds between two lines of progress where there is no bar.
_LINE_EVERY_S = 1.0


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

    def batches(self) -> Generator[float]:
        """Take batches endlessly. Yields the seconds from each batch to the next.

        Ends only if the loader cannot be iterated again, such as a generator.

        Raises:
            UsageError: If the first epoch has no batch.
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
                raise UsageError("the loader returns no batch")
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
        """Return the statistics of the loader itself if it is ours, and otherwise of the run."""
        if isinstance(self._loader, DataLoader) and self._loader.stats("total").batches:
            return self._loader.stats("total")
        record = self._statistics.total()
        return snapshot(record, self.epochs, Machine(usable_cores(Path("/"))))


class Progress:
    """Shows progress on standard error. Used as a context manager.

    On a terminal it is a bar, if tqdm is installed (the extra ``[cli]``); otherwise, a line from
    time to time.

    Args:
        name: Name of the command.
        total: Total number of units; None if it is unknown.
        unit: What is counted, in the plural.
    """

    def __init__(self, name: str, total: int | None, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._count = 0
        self._printed_s = time.monotonic()
        self._bar: Any = None
        if tqdm is not None and sys.stderr.isatty():
            tqdm.monitor_interval = 0  # no monitor thread may run while workers are forked
            self._bar = tqdm(desc=name, total=total, unit=unit, leave=False)

    def step(self, note: str = "") -> None:
        """Count one more unit, and show the count with a note."""
        self._count += 1
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._printed_s > _LINE_EVERY_S:
            self._printed_s = time.monotonic()
            of = "" if self._total is None else f" of {self._total}"
            note = note and f"; {note}"
            print(f"{self._name}: {self._count}{of} {self._unit}{note}", file=sys.stderr)

    def __enter__(self) -> Self:
        """Return the progress itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
