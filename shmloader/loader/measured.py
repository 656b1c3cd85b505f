"""The part of a loader that tells where the time goes."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

from shmloader.insight.snapshot import LoaderStats, Machine, snapshot
from shmloader.insight.trace import Trace
from shmloader.loader.resumable import ResumableLoader
from shmloader.memory.limits import control_groups, free_memory
from shmloader.pools.cores import usable_cores

_T_co = TypeVar("_T_co", covariant=True)


class MeasuredLoader(ResumableLoader[_T_co]):
    """A loader whose iterators note where the time of each batch went."""

    #: Directory in which ``proc`` and ``sys`` are.
    _root = "/"

    def stats(self, of: Literal["epoch", "total"] = "epoch") -> LoaderStats:
        """Where the time goes, up to now. At any time, on any thread, also after ``close()``.

        Takes some milliseconds for each worker that lives, to measure its memory. Where torch's
        own iterator loads (data pipes, or a system without memfd and pidfd), only the batches and
        the waits for them are known.

        Args:
            of: "epoch": the newest epoch, running or done. "total": all since the loader was made,
                the time between two epochs left out.

        Raises:
            ValueError: If ``of`` is neither.
        """
        if of not in ("epoch", "total"):
            raise ValueError(f"of should be 'epoch' or 'total', but got of={of!r}")
        statistics = self._parts.statistics
        root = Path(self._root)
        free = free_memory(root, control_groups(root))
        machine = Machine(
            usable_cores(root),
            None if free is None else free.nbytes,
            "" if free is None else free.limit,
        )
        if of == "epoch":
            return snapshot(statistics.newest(), min(1, statistics.epochs), machine)
        return snapshot(statistics.total(), statistics.epochs, machine)

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what becomes of each batch inside the block, and write it to a file at its end.

        The file opens in ui.perfetto.dev, and ``shmloader report`` makes a page of it. Recording
        takes about half a kilobyte of memory a batch. Batches that were handed over in the block
        are recorded, of all iterators of this loader; the statistics that go along are those of the
        newest epoch. Also written where the block raises.

        Args:
            path: Of the file; what is there is overwritten.

        Raises:
            OSError: If it cannot be written; at the block's beginning, if that is to be seen then.
            RuntimeError: If a trace is recorded already.
        """
        statistics, target = self._parts.statistics, Path(path)
        if statistics.trace is not None:
            raise RuntimeError("a trace of this loader is recorded already")
        with target.open("w"):
            pass
        trace = Trace()
        statistics.trace_with(trace)
        try:
            yield
        finally:
            statistics.trace_with(None)
            stats = self.stats()
            about = {"verdict": stats.verdict, "table": str(stats)}
            trace.write(target, {**about, "stats": dataclasses.asdict(stats)})
