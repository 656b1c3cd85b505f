"""Defines the interface of an engine: how it gets tickets, returns batches, fails and closes."""

import abc
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.dataset_progress import DatasetNote
from shmloader.engine.failures import FailureWatch
from shmloader.engine.inbox import Inbox
from shmloader.engine.wording import describe_interruption
from shmloader.errors import CLOSED_MEANWHILE, ClosedLoaderError, LoaderTimeoutError
from shmloader.insight.measurements import BatchTimes, Counts
from shmloader.interruptions import is_interruption


def _do_nothing() -> None:
    """Do nothing: the pause of an engine without a thread of its own."""


def _do_it(function: Callable[[], None]) -> None:
    function()


class Delivery(NamedTuple):
    """Describes a delivered ticket, whose batch was returned or whose error was raised.

    Attributes:
        seq: Number of the ticket.
        left_out: Numbers of the tickets since the last delivery whose batches were left out, since
            all their samples failed.
        notes: If checkpoints of the workers' datasets are kept: the note on this batch, and those
            on batches that were left out and on streams that ended since the last delivery, in the
            order in which they apply.
        times: When the batch passed each step; None if an error was raised.
    """

    seq: int
    left_out: tuple[int, ...] = ()
    notes: Sequence[DatasetNote] = ()
    times: BatchTimes | None = None


#: Makes a :class:`Delivery` from a tuple, in a third of the time that a call of the class takes.
delivery_of: Callable[[tuple[object, ...]], Delivery] = functools.partial(tuple.__new__, Delivery)


class EngineBase(abc.ABC):
    """Delivers the batches of one iterator, epoch after epoch.

    Runs on the thread that calls ``next_batch``: the user's, or one of
    :mod:`shmloader.device.thread`.

    Attributes:
        in_transit: Whether a message, an index batch or a batch was taken from one place and has
            not reached the next, so that an exception from outside would lose it. Stays true after
            ``next_batch`` has returned, while the batch is on its way to the user.
        raised_id: The ``id`` of the exception that the last call of ``next_batch`` raised on
            purpose, after which the next call continues with the next batch. 0 if there was none.
        delivery: Describes what the last call of ``next_batch`` returned, or raised in place of a
            batch; None if it raised anything else, after which no batch is missing.
        counts: Counters of slots and workers. Any thread may read them.
        draw_ns: How long the last call of :meth:`start`, :meth:`restart` or :meth:`next_batch` was
            in the sampler. Not meaningful while the engine belongs to a thread of its own, since
            the user's thread draws then.
        is_dynamic: Whether tickets wait in the engine until a worker has room for them.
        needs_thread: Whether a thread has to be inside ``next_batch`` all the time, because
            otherwise workers may stay idle while there are tickets for them, or hang unnoticed
            (``sample_timeout=``). May change when batches take more or less time. Any thread may
            read it.

    Args:
        window: The most tickets in flight.
        timeout_s: Longest wait for a batch in seconds; 0 waits without a limit.
        watch: Notes bad samples; None if their errors are raised.
    """

    is_dynamic = False

    def __init__(self, *, window: int, timeout_s: float, watch: FailureWatch | None = None) -> None:
        self._window = window
        self._watch = watch
        self._timeout_s = timeout_s
        self._draw: Callable[[], object] = iter(()).__next__
        # Only the text, since the error's traceback would keep the engine alive.
        self._closed_because = ""
        self._is_closed = False
        self.in_transit = False
        self.raised_id = 0
        self.delivery: Delivery | None = None
        self.counts = Counts()
        self.draw_ns = 0
        # When the last call of next_batch began to look for answers.
        self._looked_ns = 0
        #: Times of a stage; None here, since an engine is no stage.
        self.staged: tuple[str, int, int] | None = None
        self._left_out: list[int] = []
        # Set while the engine belongs to a thread of its own.
        self._inbox: Inbox | None = None
        self._pause: Callable[[], None] = _do_nothing
        self._have_done: Callable[[Callable[[], None]], None] = _do_it
        self._may_deliver: Callable[[], bool] | None = None

    @property
    def needs_thread(self) -> bool:
        """Whether a thread has to be inside ``next_batch`` all the time."""
        return False

    # Epochs ------------------------------------------------------------------------------

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch.

        Args:
            tickets: The sampler's index batches, drawn on the calling thread.
        """
        self._draw = tickets.__next__
        self._prime()

    @abc.abstractmethod
    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers."""

    def _prime(self) -> None:
        self.draw_ns = 0
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
        """Make the engine belong to a thread of its own until :meth:`detach`.

        Args:
            inbox: Yields index batches, instead of the iterator given to :meth:`start`.
            pause: Called between two steps, where no lock is held. May raise.
            have_done: Runs a function on the user's thread.
            may_deliver: Returns whether ``next_batch`` may return a batch now. If not, it keeps
                sending tickets and taking answers, and asks again after each :meth:`wake`. For
                ``is_dynamic`` only. None means that it always may.
        """
        self._inbox, self._draw = inbox, inbox.__next__
        self._pause, self._have_done = pause, have_done
        self._may_deliver = may_deliver

    def detach(self) -> None:
        """Make the engine belong to the user's thread again."""
        self._inbox, self._draw = None, iter(()).__next__
        self._pause, self._have_done = _do_nothing, _do_it
        self._may_deliver = None

    def draw_on(self, draw: Callable[[], object]) -> None:
        """Go on with an epoch on the user's thread, which draws its remaining index batches."""
        self._draw = draw

    def take_tickets(self) -> None:
        """Send workers the tickets that the user's thread has drawn."""
        # An interrupt in between may lose a ticket that was assigned but not sent.
        was_in_transit, self.in_transit = self.in_transit, True
        for indices in self._inbox or ():
            self._offer_indices(indices, time.monotonic_ns())
        self.in_transit = was_in_transit

    @abc.abstractmethod
    def wake(self) -> None:
        """End the present or the next wait of the engine's thread. Called from any thread."""

    @abc.abstractmethod
    def wake_soon(self) -> None:
        """Do as :meth:`wake`, but after ``next()`` if possible. Called from the user's thread."""

    @abc.abstractmethod
    def hurry(self) -> None:
        """Make a pending :meth:`wake_soon` take effect now. Called from the user's thread."""

    # One batch ---------------------------------------------------------------------------

    def next_batch(self) -> object:
        """Return the next batch.

        Raises:
            StopIteration: At the end of the epoch.
            WorkerDiedError: If the worker that was to make it is dead. The engine is closed then.
            TooManyFailures: If too many samples failed. The engine is closed then.
            LoaderTimeoutError: If it did not come in time. No batch is lost.
            ClosedLoaderError: After ``close()``.
            Exception: The user's own, from the dataset or ``collate_fn``. This batch is lost, and
                the next call returns the next one.
        """
        self.in_transit = False
        self.raised_id = 0
        self.delivery = None
        self.draw_ns = 0
        self._looked_ns = time.monotonic_ns()
        self.check_open()
        try:
            return self._next_batch()
        except BaseException as error:
            if self.is_closed_elsewhere(error):
                raise ClosedLoaderError(CLOSED_MEANWHILE) from error
            if self.loses(error):
                self.give_up(error)
            if isinstance(error, KeyboardInterrupt):
                # Hide the exception that was being handled, which does not concern the user, unless
                # the user's code has named it as the cause.
                raise error from error.__cause__
            raise

    def loses(self, error: BaseException) -> bool:
        """Return whether continuing after an exception would lose a batch or a ticket.

        The exception may come from ``next_batch`` or from the code after it. Nothing is lost if the
        engine only waited, or raised the exception on purpose.
        """
        return self.in_transit and self.raised_id != id(error) and not self._has_only_waited

    def give_up(self, error: BaseException, *, in_sampler: bool = False) -> None:
        """Close, and make every further call report the exception that interrupted the engine.

        Args:
            error: The exception.
            in_sampler: Whether it left the sampler's own code.
        """
        self.note_interruption(error, in_sampler=in_sampler)
        self.close()

    def note_interruption(self, error: BaseException, *, in_sampler: bool) -> None:
        """Make calls after the end report an exception, unless the engine is closed already."""
        if not self._is_closed:
            self._closed_because = describe_interruption(error, in_sampler=in_sampler)

    def _raise_on_purpose(self, error: BaseException) -> NoReturn:
        """Raise an exception on purpose, in place of what is in transit, and note it."""
        self.raised_id = id(error)
        context = error.__context__
        try:
            raise error
        finally:
            if context is not None:
                # If next() is called in an except block, ``raise`` has replaced the context by the
                # exception that is handled there, which is already the last in the user's chain.
                object.__setattr__(error, "__context__", context)
            del error, context  # breaks a reference cycle: its traceback holds this frame

    @abc.abstractmethod
    def _next_batch(self) -> object:
        """Return the next batch; keep ``in_transit``, ``raised_id`` and ``delivery`` up to date."""

    def _raise_end(self) -> NoReturn:
        """Raise StopIteration, or TooManyFailures if too many samples of the epoch failed."""
        error = None if self._watch is None else self._watch.end_epoch()
        if error is not None:
            self._fail(error)
        raise StopIteration

    @property
    def _has_only_waited(self) -> bool:
        """Whether the engine was left while it only waited, with nothing taken yet."""
        return False

    def is_closed_elsewhere(self, error: BaseException) -> bool:
        """Return whether an error arose because another thread closed the engine."""
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
        """Return the error for a batch that has not come in time. Called from any thread."""

    # Tickets out -------------------------------------------------------------------------

    def _offer(self) -> None:
        """Draw one index batch and send it to a worker."""
        was_in_transit, self.in_transit = self.in_transit, True
        began_ns = time.monotonic_ns()
        try:
            indices = self._draw()
        except StopIteration:
            self.in_transit = was_in_transit
            return
        except BaseException as error:
            self._note_sampler_error(error)
            raise
        drawn_ns = time.monotonic_ns()
        self.draw_ns += drawn_ns - began_ns
        self._offer_indices(indices, drawn_ns)
        self.in_transit = was_in_transit

    def _note_sampler_error(self, error: BaseException) -> None:
        """Note an exception from drawing an index batch; close if it came from outside."""
        if is_interruption(error):
            self.give_up(error, in_sampler=True)
        else:
            # The sampler's own error, after which it may continue.
            self.raised_id = id(error)
            self.delivery = None  # the error comes in place of the batch

    @abc.abstractmethod
    def _offer_indices(self, indices: object, now_ns: int) -> None:
        """Send an index batch to a worker.

        Args:
            indices: The index batch.
            now_ns: The time.
        """

    def _offer_another(self, *, is_addition: bool = False) -> None:
        """Offer a ticket in place of one that yields no batch, or in addition to all others."""
        if self._inbox is None:
            self._offer()
        else:
            self._inbox.ask(is_addition)

    def _awaits_tickets(self) -> bool:
        """Return whether the user's thread may still send a ticket that a worker takes."""
        inbox = self._inbox
        return inbox is not None and not inbox.is_ended and self._takes_tickets

    @property
    def _takes_tickets(self) -> bool:
        """Whether any worker takes tickets."""
        return True

    # Checkpoints of the workers' datasets ------------------------------------------------

    @property
    def beginnings(self) -> DatasetCheckpoints | None:
        """The datasets' checkpoints at the epoch's beginning; None if none are kept."""
        return None

    def take_notes(self) -> list[DatasetNote]:
        """Return the notes that no delivery reported: ends of streams, and left-out batches.

        Called on the user's thread, at the epoch's end.
        """
        return []

    # Ends --------------------------------------------------------------------------------

    @abc.abstractmethod
    def close(self) -> None:
        """End the workers and free all memory. May be called again, and from any thread."""

    @abc.abstractmethod
    def end_workers(self) -> None:
        """End only the workers, while another thread uses batches. Called from any thread."""

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed, by the user or because of an error."""
        return self._is_closed

    @abc.abstractmethod
    def check_open(self) -> None:
        """Raise ClosedLoaderError if the engine is closed, or in a forked child."""

    def _fail(self, error: BaseException, why: str | None = None) -> NoReturn:
        """Close the engine, and raise an error.

        Args:
            error: The error to raise.
            why: The reason that later calls report; None for the error's own text.
        """
        self._closed_because = f" since: {error if why is None else why}"
        self.close()
        try:
            self._raise_on_purpose(error)
        finally:
            del error  # breaks a reference cycle, as in _raise_on_purpose
