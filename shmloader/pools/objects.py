"""What pools have in common whose batches come as ordinary objects: of threads, of an executor."""

import os
from collections.abc import Callable
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.collator import bytes_of
from shmloader.batch.failures import RemoteError
from shmloader.batch.fetch import EmptyBatchError
from shmloader.batch.maker import BatchMaker
from shmloader.insight.measurements import Counts, Readings
from shmloader.interruptions import Wakeup, uninterruptible
from shmloader.pools.answers import Answer, Batch, Empty, Failure
from shmloader.process_state import end_if_forked


class ObjectPool:
    """Base of these pools. See :class:`~shmloader.pools.Pool` for what methods do and raise."""

    memory = None

    def __init__(self) -> None:
        self.counts, self.readings = Counts(), Readings()
        self.is_waiting = False
        self._wakeup = Wakeup()
        self._owner_pid = os.getpid()
        # Tasks that were sent and whose answers were not reported, by seq.
        self._tasks: dict[int, Any] = {}

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, which has neither the threads nor the tasks."""
        return os.getpid() != self._owner_pid

    @property
    def processes(self) -> list[Any]:
        """An empty list: this process has started none."""
        return []

    def start_epoch(self, worker_id: int, epoch: int) -> bool:  # noqa: ARG002 - nothing to tell
        """Return True: the worker's task was dropped, so it may begin the next epoch's."""
        return True

    def resume(self, worker_id: int, checkpoint: Checkpoint) -> None:
        """Do nothing: these pools load no datasets with states."""

    def enable_wake(self) -> None:
        """Do nothing: ``wake`` works from the beginning."""

    def wake(self) -> None:
        """Make the present or the next ``wait`` return. Called from any thread."""
        self._wakeup.set()

    def end_workers(self) -> None:
        """End the threads, or cancel tasks. May be called again, and from any thread."""
        if not self.is_inherited:
            uninterruptible(self._end)

    def _end(self) -> None:
        """End the threads, or cancel tasks. Runs again if it is interrupted."""


def make_answer(maker: BatchMaker, make: Callable[[], object], where: str) -> Answer:
    """Make a batch by ``make``, and return the answer to its ticket; a Failure if it raises.

    ``maker`` has the report on the samples and the times. ``where`` is for texts of failures.
    """
    pid, batch, error = os.getpid(), None, None
    try:
        batch = make()
    except EmptyBatchError:
        return Empty(maker.pop_report())
    except BaseException:  # noqa: BLE001 - it is the answer
        end_if_forked(pid)
        error = RemoteError.caught(where)
    end_if_forked(pid)
    if error is not None:
        return Failure(error, report=maker.pop_report())
    return Batch(batch, maker.pop_report(), maker.timer.read(), bytes_of(batch))
