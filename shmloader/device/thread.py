"""The thread that runs an engine and the stage after it, and its results on the user's thread.

::

    user's thread: StagedEngine                  EngineThread, one for each epoch
    ───────────────────────────                  ────────────────────────────────
    draw the sampler ── tickets ───────────────▶ engine.next_batch()
    next() ◀── items: a batch, an exception, ─── stage.run(batch): pin, or copy to the device
               or a request

Only the user's thread draws the sampler, one ticket for each batch that it receives, so the main
process's random generators are used as torch uses them. It also starts workers, since a fork copies
the forking thread. The sampler may hold the loader: neither the thread nor its owner refers to it,
so that they end when the loader is garbage.

Adding an item and waking a thread take no lock, because the garbage collector may end an iterator
at any point, on either thread.
"""

import collections
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmloader.device.stage import Stage, clear_frames
from shmloader.engine.delivery import Instead, not_an_end
from shmloader.engine.engine import Engine, OwnThread, Stopped
from shmloader.engine.scheduler import Ticket
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.interruptions import Caught, Wakeup, attempt, is_interruption, uninterruptible
from shmloader.streams.order import NotYet, ReaderOrder

# How long `ThreadOwner.end` waits for the thread, which may be in the user's transform, in seconds.
_JOIN_S = 5.0


class Result(NamedTuple):
    """A batch that the stage has processed, or an exception for the user.

    Attributes:
        batch: What the stage's ``run`` returned.
        error: The exception; None for a batch.
        delivery: The ticket of the batch, or of that in whose place the exception is raised.
        is_last: Whether no further result follows.
        staged: The stage's name in the statistics, and when the stage began and finished the batch,
            in nanoseconds on the clock of ``time.monotonic_ns()``.
    """

    batch: Any
    error: BaseException | None
    delivery: Ticket | None
    is_last: bool = False
    staged: tuple[str, int, int] | None = None


@dataclass
class CallRequest:
    """A function for the user's thread to call, while the engine's thread waits for that."""

    function: Callable[[], None]
    is_over: bool = False


#: What an engine's thread sends to the user's. A bool asks for one more ticket: beside all others
#: (True), or in place of one that yields no batch.
Item = Result | CallRequest | bool


class EngineThread(OwnThread):
    """Runs the engine and the stage for one epoch. Does not refer to the sampler.

    Attributes:
        items: What the user's thread is to take, in order.
        has_item: Set when an item was added, and at the end.
        may_go_on: Set when the user's thread has done something that this thread may wait for.
        tickets: Index batches from the user's thread.
    """

    def __init__(self, engine: Engine, stage: Stage) -> None:
        super().__init__(stage.name)
        self.engine, self._stage = engine, stage
        self.items: collections.deque[Item] = collections.deque()
        self.has_item, self.may_go_on = Wakeup(), Wakeup()
        self.tickets: collections.deque[object] = collections.deque()

    def stop(self) -> None:
        """Have the thread end."""
        self.is_stopping = True
        for event in (self.has_item, self.may_go_on):
            event.set()
        self.wake()

    def work(self) -> None:
        """Run the engine and the stage until the last result, or until :meth:`stop`."""
        try:
            self._stage.start()
            is_last = False
            while not is_last:
                self.pause()
                while self._stage.ahead is not None and len(self.items) >= self._stage.ahead:
                    self._rest()
                result = self._next_result()
                self._put(result)
                is_last = result.is_last
                del result  # which would keep its batch alive
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread's outermost line
            self._put(Result(None, error, None, is_last=True))

    def close_what_it_uses(self) -> None:
        """Close the stage and the engine, and drop all results."""
        self.items.clear()
        close(self.engine, self._stage)

    def _put(self, item: Item) -> None:
        self.items.append(item)
        self.has_item.set()

    def _next_result(self) -> Result:
        try:
            batch = self.engine.next_batch()
        except Instead as instead:
            is_last = self.engine.is_closed or isinstance(instead.error, StopIteration)
            return Result(None, instead.error, self.engine.delivery, is_last)
        delivery = self.engine.delivery
        try:
            began_ns = time.monotonic_ns()
            result = self._stage.run(batch)
            staged = (self._stage.kind, began_ns, time.monotonic_ns())
            return Result(result, None, delivery, staged=staged)
        except BaseException as error:  # noqa: BLE001 - the user's thread raises it
            clear_frames(error)
            what = "a batch's device_transform or pin_memory"
            return Result(None, not_an_end(error, what), delivery)
        finally:
            del batch  # an exception's traceback pins this frame, which must not pin the slot

    def _rest(self) -> None:
        """Wait until the user's thread has done something."""
        with self.resting():
            self.may_go_on.wait()
        self.pause()

    # What the engine asks of its thread: see :class:`shmloader.engine.engine.OwnThread` --------

    def next_ticket(self) -> object:
        """Return the next ticket."""
        if not self.tickets:
            raise StopIteration
        return self.tickets.popleft()

    def ask(self, *, is_addition: bool) -> None:
        """Ask the user's thread for one more ticket."""
        self._put(is_addition)

    def call(self, function: Callable[[], None]) -> None:
        """Have the user's thread call a function, and wait until it has."""
        call = CallRequest(function)
        self._put(call)
        while not call.is_over:
            self._rest()


def close(engine: Engine, stage: Stage) -> None:
    """Close a stage, then its engine, whose slots the stage may read."""
    try:
        stage.close()
    finally:
        engine.close()


class ThreadOwner:
    """Owns an engine, its stage, and the present epoch's thread. An iterator's finalizer ends it.

    Attributes:
        pid: Id of the process that made this object.
        thread: The thread of the present epoch, or None.
    """

    def __init__(self, engine: Engine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self.pid = os.getpid()
        self.thread: EngineThread | None = None

    def end_epoch(self) -> None:
        """End the thread, if there is one. The engine belongs to the calling thread afterwards.

        Tickets that were drawn are still loaded, so that the workers' random generators advance as
        torch's do. Waits for the stage's present batch without a limit, because the user's
        transform may be compiling at that moment.
        """
        thread = self.thread
        if thread is not None:
            thread.stop()
            thread.join(None)
            self.thread = None
            thread.items.clear()
            if not self._engine.is_closed:
                self._engine.send_drawn()
            self._engine.detach()
        self._stage.close()

    def end(self) -> None:
        """End the thread, and close the stage and the engine. May be called again."""
        if os.getpid() != self.pid:
            self._engine.close()  # neither the thread nor the device belongs to a forked child
        else:
            uninterruptible(self._end)

    def _end(self) -> None:
        thread = self.thread
        if thread is not None:
            thread.stop()
            if not thread.ends_in(_JOIN_S):
                return
            thread.items.clear()
        self.thread = None
        close(self._engine, self._stage)


class StagedEngine:
    """Delivers an engine's batches, after a stage on another thread. Used on the user's thread.

    Args:
        engine: The engine, whose workers are running.
        stage: Processes each batch.
        timeout_s: Longest wait for a batch in seconds; 0 waits without a limit.

    Attributes:
        owner: Ends the engine, the stage and the thread.
        is_waiting: Whether :meth:`next_batch` waits, or was left by an exception while it only
            waited.
        delivery: See :attr:`Engine.delivery`.
        draw_ns: See :attr:`Engine.draw_ns`.
        staged: :attr:`Result.staged` of the batch that was returned last.
    """

    def __init__(self, engine: Engine, stage: Stage, timeout_s: float) -> None:
        self.owner = ThreadOwner(engine, stage)
        self._engine, self._stage = engine, stage
        self._timeout_s = timeout_s
        self._draw: Callable[[], object] = iter(()).__next__
        self._readings: ReaderOrder | None = None
        # Tickets of this epoch that are not answered yet.
        self._tickets_out = 0
        self.is_waiting = False
        self.delivery: Ticket | None = None
        self.draw_ns = 0
        self.staged: tuple[str, int, int] | None = None

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch."""
        self._draw = tickets.__next__
        self._readings = tickets if type(tickets) is ReaderOrder else None
        self._tickets_out = self.draw_ns = 0
        thread = self.owner.thread = EngineThread(self._engine, self._stage)
        self._engine.attach(thread)
        try:
            for _ in range(self._engine.scheduler.tickets_at_start):
                if not self._draw_one(thread):
                    break
        finally:
            try:
                thread.start()
            except BaseException:
                self.close()
                raise

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers; see :meth:`Engine.restart`."""
        self._engine.check_process()
        self.owner.end_epoch()
        self._engine.restart(iter(()))
        self.start(tickets)

    def next_batch(self) -> object:
        """Return the next batch; see :meth:`Engine.next_batch`."""
        self.is_waiting = False
        self.delivery = None  # a delivery is reported only once
        self.draw_ns = 0
        self._engine.check_process()  # a forked child has a copy of what is ready here
        thread = self.owner.thread
        if thread is None:
            self._engine.check_open()
            raise Instead(ClosedLoaderError(ITERATOR_CLOSED))
        if self._readings is not None and not self._tickets_out:
            self._readings.draw_owed(functools.partial(self._draw_one, thread), may_wait=True)
        deadline = time.monotonic() + self._timeout_s if self._timeout_s > 0 else None
        while True:
            item = self._wait_for_result(thread, deadline)
            if isinstance(item, Result):
                return self._deliver(thread, item)
            if isinstance(item, bool):
                self._tickets_out -= not item
                self._draw_one(thread)
                continue
            try:
                item.function()
            except Instead:  # which has closed the engine
                self.close()
                raise
            finally:
                item.is_over = True
                thread.may_go_on.set()

    def give_up(self, error: BaseException) -> None:
        """See :meth:`Engine.give_up`."""
        self._engine.record_interruption(error)
        self.close()

    def _deliver(self, thread: EngineThread, result: Result) -> object:
        """Return the batch of a result, or raise its exception."""
        if result.is_last:
            assert result.error is not None
            if not isinstance(result.error, StopIteration):
                self._engine.record_interruption(result.error)  # unless the engine reported it
                self.close()
            raise Instead(result.error)
        if result.delivery is not None:  # otherwise an exception that replaces no batch
            self._tickets_out -= 1
            self._draw_one(thread)  # which wakes the engine
            if self._readings is not None:
                self._readings.draw_owed(functools.partial(self._draw_one, thread))
        self.delivery = result.delivery
        if result.error is not None:
            raise Instead(result.error)
        self.staged = result.staged
        return self._stage.deliver(result.batch)

    def _wait_for_result(self, thread: EngineThread, deadline: float | None) -> Item:
        """Wait for the thread's next item, and return it."""
        items = thread.items
        while not items:
            # Checked after each wait, because another thread may have closed the iterator.
            if thread.is_stopping:
                self._engine.check_open()
                raise Instead(ClosedLoaderError(ITERATOR_CLOSED))
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is None or left_s > 0:
                self.is_waiting = True  # an interruption of this call loses nothing
                thread.has_item.wait(left_s)
                self.is_waiting = False
                continue
            late = attempt(self._engine.late)  # the engine's thread may close what is examined
            if not items:
                raise late.error if isinstance(late, Caught) else Instead(late)
        item = items[0]
        if not (isinstance(item, Result) and item.is_last):  # which stays, for further calls
            items.popleft()
            thread.may_go_on.set()
        return item

    def _draw_one(self, thread: EngineThread) -> bool:
        """Draw a ticket for the engine's thread. Returns False if the sampler has ended."""
        began_ns = time.monotonic_ns()
        try:
            thread.tickets.append(self._draw())
        except StopIteration as stop:
            thread.is_ended = not isinstance(stop, NotYet)
            return False
        except Exception as error:
            if is_interruption(error):
                raise
            # The sampler's own exception. As with torch, the epoch continues with one ticket fewer.
            thread.is_ended = self._tickets_out == 0
            raise Instead(error) from None
        finally:
            thread.wake()
        self.draw_ns += time.monotonic_ns() - began_ns
        self._tickets_out += 1
        return True

    def close(self) -> None:
        """End the thread, the stage and the engine. May be called again."""
        self._draw = iter(()).__next__
        self.owner.end()
