"""How many tasks each worker of a host has from each rank, in memory that all of them map.

A rank sends a task to the worker that has the fewest tasks from all ranks. It could not tell that
from its own tasks. (Where each rank counted only its own tasks, 8 ranks with 64 workers and samples
that sleep reached 0.7 of the ideal: some workers had two tasks while others had none.)

It is a table of two counts for each iterator of a rank and each worker. Only the rank writes how
many tasks it has sent, except that the owner resets a row before the rank uses it and after the
rank is gone. Only the worker writes how many tasks it has completed. So no lock is needed. The
counts are only hints: each task is made once, whatever they say.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt

from shmloader.memory.memfd import MEMFD_NAME

#: The most iterators that have a row. Further iterators see others' tasks, and do not show theirs.
MOST_ROWS = 256

_COUNT = np.dtype(np.int64)
Counts = npt.NDArray[np.int64]


class Loads:
    """The table, mapped by one process. The owner of the workers creates it.

    An iterator has row -1 if no row was free. Nothing is written for row -1.

    Args:
        worker_count: The most workers there may be.
        fd: A descriptor of the table, which the caller may close afterwards; None to create one.

    Attributes:
        fd: The descriptor of the table, which stays open until this process ends, if this object
            has created the table; otherwise -1.
    """

    def __init__(self, worker_count: int, fd: int | None = None) -> None:
        shape = 2, MOST_ROWS, worker_count
        # The number of rows that have been used comes first, at the beginning of a page.
        nbytes = mmap.PAGESIZE + int(np.prod(shape)) * _COUNT.itemsize
        self.fd = -1
        if fd is None:
            fd = self.fd = os.memfd_create(f"{MEMFD_NAME}-loads", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes)
        self._used: Counts = np.frombuffer(mapping, _COUNT, 1)
        counts: Counts = np.frombuffer(mapping, _COUNT, offset=mmap.PAGESIZE).reshape(shape)
        self._sent, self._made = counts

    # The owner ---------------------------------------------------------------------------

    def take_row(self, taken: set[int]) -> int:
        """Return a row that is not among ``taken``, after a reset; -1 if all are."""
        row = next((row for row in range(MOST_ROWS) if row not in taken), -1)
        if row >= 0:
            self.forget(row)
            self._used[0] = max(int(self._used[0]), row + 1)
        return row

    # Ranks -------------------------------------------------------------------------------

    def forget(self, row: int, worker_id: int | None = None) -> None:
        """Note that the tasks of a row are no longer awaited. The owner calls this, too.

        Args:
            row: The row.
            worker_id: The worker that had the tasks; None for the tasks of all workers.
        """
        if row >= 0:
            which = slice(None) if worker_id is None else slice(worker_id, worker_id + 1)
            self._sent[row, which] = self._made[row, which]

    def note_sent(self, row: int, worker_id: int) -> None:
        """Note that a task is sent to a worker."""
        if row >= 0:
            self._sent[row, worker_id] += 1

    def of_others(self, row: int) -> list[int]:
        """Return how many tasks each worker has from all rows except ``row``."""
        used = int(self._used[0])
        # A worker may have completed a task of an iterator that has ended, and whose row another
        # iterator has now. So a difference may be negative.
        waiting = np.maximum(self._sent[:used] - self._made[:used], 0)
        if 0 <= row < used:
            waiting[row] = 0
        counts: list[int] = waiting.sum(axis=0).tolist()
        return counts

    # Workers -----------------------------------------------------------------------------

    def note_made(self, row: int, worker_id: int) -> None:
        """Note that a worker has completed a task, even if the batch failed."""
        if row >= 0:
            self._made[row, worker_id] += 1
