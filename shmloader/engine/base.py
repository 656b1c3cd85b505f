"""The engine as its caller sees it: where tickets come from, what a call promises, how it ends."""

import abc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from shmloader.engine.failures import FailureWatch
from shmloader.engine.inbox import Inbox
from shmloader.engine.iterable_checkpoints import IterableCheckpoints, StreamNote
from shmloader.engine.wording import describe_interruption
from shmloader.errors import ClosedLoaderError, LoaderTimeoutError
from shmloader.insight.measurements import BatchTimes, Counts
from shmloader.interruptions import is_interruption


def _do_nothing() -> None:
    """Where no other thread has anything to say."""


def _do_it(function: Callable[[], None]) -> None:
    function()


class Delivery(NamedTuple):
    """Which ticket was handed over: its batch, or what was raised in the batch's place.

    Attributes:
        seq: The ticket's.
        left_out: Those of which nothing was left, and that were taken since the last delivery.
        streams: Of an iterable dataset: which streams have ended before, and which gave this.
        times: What is known of the batch's way; None where it raised.
    """

    seq: int
    left_out: tuple[int, ...] = ()
    streams: Sequence[StreamNote] = ()
    times: BatchTimes | None = None


class EngineBase(abc.ABC):
    """Batches of one iterator, epoch after epoch.

    Runs on the thread that calls ``next_batch``: the user's, or one of
    :mod:`shmloader.device.thread`.

    Attributes:
        in_transit: Whether something was taken, a message, indices or a batch, that has not come to
            where it belongs: an exception from outside would lose it. Still so after ``next_batch``
            has returned: the batch is on its way to the user.
        told: The ``id`` of the exception that the last call of ``next_batch`` raised on purpose:
            after it, the next call gives what comes next. 0 if there was none.
        delivery: Of what the last call of ``next_batch`` gave, or raised in a batch's place; None
            where it raised something else: what was to come still comes.
        counts: What becomes of slots and workers, counted; read by any thread.
        is_dynamic: Whether tickets wait in here until a worker has room for them: somebody has to
            be in ``next_batch`` all the time, or workers have nothing to do.

    Args:
        window: Most tickets in flight; 0 draws nothing ahead.
        timeout_s: Longest wait for a batch; 0 for ever.
        watch: Notes bad samples; None if they are raised.
    """

    is_dynamic = False

    def __init__(self, *, window: int, timeout_s: float, watch: FailureWatch | None = None) -> None:
        self._window = window
        self._watch = watch
        self._timeout_s = timeout_s
        self._draw: Callable[[], object] = iter(()).__next__
        # The text alone: the error's traceback holds us.
        self._closed_because = ""
        self._is_closed = False
        self.in_transit = False
        self.told = 0
        self.delivery: Delivery | None = None
        self.counts = Counts()
        # Since when we have been looking for answers.
        self._looked_ns = 0
        #: Of a stage that follows: nothing here.
        self.staged: tuple[str, int, int] | None = None
        self._left_out: list[int] = []
        # Of an engine with a thread of its own.
        self._inbox: Inbox | None = None
        self._pause: Callable[[], None] = _do_nothing
        self._have_done: Callable[[Callable[[], None]], None] = _do_it
        self._may_deliver: Callable[[], bool] | None = None

    # Epochs ------------------------------------------------------------------------------

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch.

        Args:
            tickets: The sampler's index batches; drawn on the thread that calls us.
        """
        self._draw = tickets.__next__
        self._prime()

    @abc.abstractmethod
    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers."""

    def _prime(self) -> None:
        try:
            for _ in range(self._window):
                self._offer()
        except BaseException as error:
            if is_interruption(error):
                self.give_up(error)
            raise

    def attach(
        self,
        inbox: Inbox,
        pause: Callable[[], None],
        have_done: Callable[[Callable[[], None]], None],
        may_deliver: Callable[[], bool] | None = None,
    ) -> None:
        """Belong to a thread of its own until :meth:`detach`.

        Args:
            inbox: Where tickets come from, in place of ``start``'s.
            pause: Called between two steps, where no lock is held; may raise.
            have_done: Has the user's thread do something.
            may_deliver: Whether ``next_batch`` may return a batch now. If not, it goes on to send
                tickets and to take answers; asked again after each :meth:`wake`. With
                ``is_dynamic`` only. None: always.
        """
        self._inbox, self._draw = inbox, inbox.__next__
        self._pause, self._have_done = pause, have_done
        self._may_deliver = may_deliver

    def detach(self) -> None:
        """Belong to the user's thread again."""
        self._inbox, self._draw = None, iter(()).__next__
        self._pause, self._have_done = _do_nothing, _do_it
        self._may_deliver = None

    def take_tickets(self) -> None:
        """Send what has been drawn by the user's thread to workers."""
        # Interrupted in between, one may be with a worker that was never told.
        was_in_transit, self.in_transit = self.in_transit, True
        for indices in self._inbox or ():
            self._offer_indices(indices)
        self.in_transit = was_in_transit

    @abc.abstractmethod
    def wake(self) -> None:
        """Get the engine's thread out of its wait; from any thread."""

    @abc.abstractmethod
    def wake_soon(self) -> None:
        """The same, but rather when ``next()`` has come back. From the user's thread."""

    @abc.abstractmethod
    def hurry(self) -> None:
        """The user's thread is about to wait: what would be soon is to be now."""

    # One batch ---------------------------------------------------------------------------

    def next_batch(self) -> object:
        """The next batch.

        Raises:
            StopIteration: At the end of the epoch.
            WorkerDiedError: If the worker that had it is dead. The engine is closed then.
            TooManyFailures: If too many samples failed. The engine is closed then.
            LoaderTimeoutError: If it did not come in time; nothing is lost.
            ClosedLoaderError: After ``close()``.
            Exception: The user's own, from the dataset or collate; the batch is lost, the next
                call gives the next one.
        """
        self.in_transit = False
        self.told = 0
        self.delivery = None  # that of the last call is told once
        self._looked_ns = time.monotonic_ns()
        self.check_open()
        try:
            return self._next_batch()
        except BaseException as error:
            if self._is_closed_elsewhere(error):
                raise ClosedLoaderError("the iterator was closed meanwhile") from error
            if self.loses(error):
                self.give_up(error)
            if isinstance(error, KeyboardInterrupt):
                # Without what was being handled just then, which is nothing to the user.
                raise error from None
            raise

    def loses(self, error: BaseException) -> bool:
        """Whether to go on after an exception, raised by us or after us, would lose something.

        Not if we only waited, nor if it was raised on purpose.
        """
        return self.in_transit and self.told != id(error) and not self._has_only_waited

    def give_up(self, error: BaseException, *, in_sampler: bool = False) -> None:
        """Close, and have every further call say that an exception came in the midst of one.

        Args:
            error: The exception.
            in_sampler: Whether it came out of the sampler's own code.
        """
        self.note_interruption(error, in_sampler=in_sampler)
        self.close()

    def note_interruption(self, error: BaseException, *, in_sampler: bool) -> None:
        """Have every call after the end say why; not if it has come already."""
        if not self._is_closed:
            self._closed_because = describe_interruption(error, in_sampler=in_sampler)

    def _raise_told(self, error: BaseException) -> NoReturn:
        """Raise on purpose: what is in transit is lost to this exception, as the user is told."""
        self.told = id(error)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and would wait for the garbage collector

    @abc.abstractmethod
    def _next_batch(self) -> object:
        """The same, with ``in_transit`` and ``told`` kept up to date."""

    def _raise_end(self) -> NoReturn:
        """End the epoch: StopIteration, or what is wrong with all that it gave."""
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._fail(error)
        raise StopIteration

    @property
    def _has_only_waited(self) -> bool:
        """Whether nothing has been taken yet, though we were about to."""
        return False

    def _is_closed_elsewhere(self, error: BaseException) -> bool:
        """Whether this came of another thread, which has closed what we were looking at."""
        return (
            self._is_closed
            and not self._closed_because
            and isinstance(error, Exception)
            and not isinstance(error, ClosedLoaderError | StopIteration)
        )

    def _deadline(self) -> float | None:
        return time.monotonic() + self._timeout_s if self._timeout_s > 0 else None

    @abc.abstractmethod
    def late(self) -> LoaderTimeoutError:
        """What is to be raised when a batch has not come in time. From any thread."""

    # Tickets out -------------------------------------------------------------------------

    def _offer(self) -> None:
        """Draw one index batch and send it to a worker."""
        was_in_transit, self.in_transit = self.in_transit, True
        try:
            indices = self._draw()
        except StopIteration:
            self.in_transit = was_in_transit
            return
        except BaseException as error:
            self._note_sampler_error(error)
            raise
        self._offer_indices(indices)
        self.in_transit = was_in_transit

    def _note_sampler_error(self, error: BaseException) -> None:
        """Note what drawing an index batch raised; close if it came from outside."""
        if is_interruption(error):
            self.give_up(error, in_sampler=True)
        else:
            # The sampler's own: it may go on.
            self.told = id(error)
            self.delivery = None  # it comes in place of a batch that is lost

    @abc.abstractmethod
    def _offer_indices(self, indices: object) -> None:
        """Send an index batch to a worker."""

    def _replace_ticket(self) -> None:
        """Offer a ticket in place of one that gives the user nothing."""
        if self._inbox is None:
            self._offer()
        else:
            self._inbox.ask()

    def _awaits_tickets(self) -> bool:
        """Whether the user's thread may still give one that a worker takes."""
        inbox = self._inbox
        return inbox is not None and not inbox.is_ended and self._takes_tickets

    @property
    def _takes_tickets(self) -> bool:
        """Whether any worker does."""
        return True

    # Streams of an iterable dataset ------------------------------------------------------

    @property
    def stream_beginnings(self) -> IterableCheckpoints | None:
        """Where they were at the epoch's beginning; None without such a dataset."""
        return None

    def take_stream_ends(self) -> list[StreamNote]:
        """Return the ends of streams that no delivery reported. Called on the user's thread."""
        return []

    # Ends --------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers and let go of all memory. May be called again, and from any thread."""

    @abc.abstractmethod
    def end_workers(self) -> None:
        """End the workers alone, where another thread looks at batches; from any thread."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed: by the user, a worker's death, or too many failures."""
        return self._is_closed

    @abc.abstractmethod
    def check_open(self) -> None:
        """Raise ClosedLoaderError if it is closed, or in a forked child."""

    def _fail(self, error: BaseException, why: str | None = None) -> NoReturn:
        """Close, and raise.

        Args:
            error: What is raised.
            why: What later calls say; None: the error.
        """
        self._closed_because = f" since: {error if why is None else why}"
        self.close()
        try:
            self._raise_told(error)
        finally:
            del error  # as there
