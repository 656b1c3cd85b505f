"""The pool of a loader without workers: the thread that asks for a batch makes it.

The engine draws no tickets ahead here (its window is 0): ``next()`` draws an index batch and sends
its ticket, and :meth:`InlinePool.send` makes the batch and returns it as the answer.

``next()`` raises an exception of the user's code unchanged, with its own traceback, as torch's
loader does. An exception of a signal handler is not an answer: it propagates from ``send``, and the
engine decides whether the iterator can continue.
"""

from collections.abc import Callable
from typing import Any

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.batch.failures import SampleReport
from shmloader.batch.fetchers import EmptyBatchError, map_style_stop
from shmloader.batch.timer import Timer
from shmloader.insight.measurements import Counts, Readings
from shmloader.interruptions import is_interruption
from shmloader.pools import Events, SentTicket
from shmloader.pools.answers import Answer, Batch, Empty, Failure, LocalError, StreamEnd
from shmloader.pools.status_page import AtWork, Phase


class ResumeError(Exception):
    """A dataset could not be resumed. The user sees ``error`` instead."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class InlinePool:
    """One worker, which is the thread that calls :meth:`send`; see :class:`~shmloader.pools.Pool`.

    Args:
        make: Makes the batch of a ticket's indices.
        timer: Times the work. This pool starts it for each batch.
        take_report: Returns how many of a batch's samples failed; None if bad samples raise.
        end: Ends the threads that help to load samples, if there are any.
        is_iterable: Whether a StopIteration of ``make`` ends the dataset's stream.
    """

    has_queue = True
    is_inline = True
    is_waiting = False
    is_inherited = False

    def __init__(
        self,
        make: Callable[[Any], Any],
        timer: Timer,
        take_report: Callable[[], SampleReport | None] | None,
        end: Callable[[], None],
        *,
        is_iterable: bool,
    ) -> None:
        self._make = make
        self._timer = timer
        self._take_report = take_report
        self._end = end
        self._is_iterable = is_iterable
        self.counts = Counts()
        self.readings = Readings()

    # Tasks -------------------------------------------------------------------------------

    def send(self, ticket: SentTicket, epoch: int) -> Answer | StreamEnd:  # noqa: ARG002 - here
        """Make the ticket's batch, and return the answer."""
        self._timer.begin()
        try:
            batch = Batch(self._make(ticket.indices))
        except EmptyBatchError:
            return Empty(self._report())
        except StopIteration as error:
            if self._is_iterable:
                return StreamEnd()
            return Failure(LocalError(map_style_stop(error)), report=self._report())
        except ResumeError as error:
            return Failure(LocalError(error.error), is_final=True)
        except Exception as error:
            if is_interruption(error):
                raise
            return Failure(LocalError(error), report=self._report())
        if self._take_report is not None:
            batch.report = self._take_report()
        return batch

    def _report(self) -> SampleReport | None:
        return None if self._take_report is None else self._take_report()

    def start_epoch(self, worker_id: int, epoch: int) -> None:
        """Do nothing: no task of the previous epoch is left."""

    def resume(self, worker_id: int, checkpoint: DatasetCheckpoint) -> None:
        """Do nothing: ``make`` knows where the dataset is resumed."""

    # Events ------------------------------------------------------------------------------

    def poll(self, worker_id: int | None, events: Events) -> bool:  # noqa: ARG002 - see send
        """Return False: ``send`` has returned all answers."""
        return False

    def wait(self, timeout_s: float | None, events: Events) -> bool:  # noqa: ARG002 - see send
        """Return False: there is nothing to wait for."""
        return False

    def enable_wake(self) -> None:
        """Do nothing, like the following methods: no thread waits here."""

    def wake(self) -> None:
        """Do nothing."""

    def wake_soon(self) -> None:
        """Do nothing."""

    def hurry(self) -> None:
        """Do nothing."""

    # Workers -----------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """An empty list: the worker is a thread."""
        return []

    def pid(self, worker_id: int) -> None:
        """Return None: the worker is a thread."""

    def was_at(self, worker_id: int) -> AtWork:  # noqa: ARG002 - one worker
        """Return an idle state, since the thread that asks is the worker."""
        return AtWork(Phase.IDLE, 0, 0, 0.0)

    ask = was_at

    def end_workers(self) -> None:
        """End the helping threads. May be called again."""
        self._end()

    def close(self) -> None:
        """End the helping threads. May be called again."""
        self._end()
