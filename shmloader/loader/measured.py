"""The part of a loader that reports where the time goes, and :class:`CachedBatches`."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from shmloader.insight.record import sum_of
from shmloader.insight.sums import Sums
from shmloader.loader.resumable import ResumableLoader
from shmloader.memory.limits import free_memory
from shmloader.pools.cores import usable_cores
from shmloader.sampling.checks import whole_number

if TYPE_CHECKING:
    from shmloader.insight.stats import LoaderStats

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class MeasuredLoader(ResumableLoader[_T_co]):
    """A loader whose iterators record where the time of each batch went."""

    #: Directory that contains ``proc`` and ``sys``.
    _root = "/"

    def stats(self, of: Literal["epoch", "total"] = "epoch") -> "LoaderStats":
        """Return where the time has gone so far.

        May be called at any time, on any thread, and after ``close()``.

        ``print(loader.stats())`` shows a table. ``loader.stats().verdict`` is a sentence that says
        what limits the speed and what to change.

        A call takes some milliseconds for each living worker, to measure its memory. If torch's own
        iterator loads (data pipes, or a system without memfd and pidfd), only the batches and the
        waits for them are known.

        Args:
            of: "epoch": the newest epoch, running or over. "total": all epochs since the loader
                was made, without the time between two of them.

        Returns:
            A frozen snapshot.

        Raises:
            ValueError: If ``of`` is neither "epoch" nor "total".
        """
        if of not in ("epoch", "total"):
            raise ValueError(f"of should be 'epoch' or 'total', but got of={of!r}")
        statistics = self._parts.statistics
        if of == "epoch":
            return self._snapshot(statistics.newest(), min(1, statistics.epochs))
        return self._snapshot(statistics.total(), statistics.epochs)

    def _snapshot(self, sums: Sums | None, epochs: int) -> "LoaderStats":
        from shmloader.insight.stats import Machine  # noqa: PLC0415 - takes 10 ms
        from shmloader.insight.verdict import snapshot  # noqa: PLC0415

        root = Path(self._root)
        free = free_memory(root)
        machine = Machine(usable_cores(root))
        if free is not None:
            machine = Machine(machine.cores, free.nbytes, free.limit)
        return snapshot(sums, epochs, machine)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record the epochs that begin inside the block, and write them to a file at the end.

        The file opens in ui.perfetto.dev, and ``shmloader report`` makes a page of it. It has the
        batches of these epochs that were delivered inside the block, and their statistics.
        Recording takes about half a kilobyte of memory per batch. The file is also written if the
        block raises.

        Args:
            path: Path of the file, which is overwritten.

        Raises:
            OSError: If the file cannot be written: at the beginning of the block if it cannot be
                opened, otherwise at the end.
            RuntimeError: If a trace of this loader is being recorded already.
        """
        statistics, target = self._parts.statistics, Path(path)
        if statistics.traced is not None:
            raise RuntimeError("a trace of this loader is being recorded already")
        with target.open("w"):
            pass
        statistics.traced = []
        try:
            yield
        finally:
            records = statistics.end_trace()
            from shmloader.insight.trace import write_trace  # noqa: PLC0415 - few runs are traced

            total = records[0].sums() if len(records) == 1 else sum_of(None, records)
            stats = self._snapshot(total, len(records))
            write_trace(records, target, {"stats": dataclasses.asdict(stats), "table": str(stats)})


class CachedBatches(Generic[_T]):
    """Yields the first batches of a loader again and again, endlessly.

    Train on it for a while: you see the speed with a loader that takes no time, and so the most
    that a faster loader could gain. Your loop has to end by itself:
    ``for step, batch in zip(range(1_000), CachedBatches(loader, 8))``.

    The same objects are yielded each time, so a change made in place stays.

    Args:
        loader: Any iterable of batches. With a ``DataLoader``, the constructor begins an epoch and
            leaves it early, and the workers end unless they are persistent.
        n: Number of batches to keep; if the loader has fewer, all of them are kept.

    Raises:
        TypeError: If ``n`` is not a whole number.
        ValueError: If ``n`` is not positive, or the loader yields no batch.
    """

    __module__ = "shmloader"  # users import it from there

    def __init__(self, loader: Iterable[_T], n: int) -> None:
        self._batches = list(itertools.islice(loader, whole_number(n, "n", minimum=1)))
        if not self._batches:
            raise ValueError("there is no batch to repeat: the loader is empty")

    def __iter__(self) -> Iterator[_T]:
        """Yield the batches from the first on, endlessly."""
        return itertools.cycle(self._batches)
