"""The engine and what follows it, on a thread of their own.

::

    user's thread                                this thread, one for each epoch
    ─────────────                                ───────────────────────────────
    draw the sampler ── Inbox ─────────────────▶ engine.next_batch()
    next() ◀── queue: a batch, an exception, ─── stage.run(batch): pin, or copy to the device
               or something to be done there

The sampler is drawn on the user's thread alone, one ticket for each batch that is taken, so the
main process's random streams are used as torch uses them. A worker that is replaced is started
there as well: a fork copies the thread that makes it, and the user's is the one that forked the
others.

An engine whose tickets wait for whichever worker is idle has such a thread without a stage, too
(:mod:`shmloader.device.plain`): workers get further tasks while the user's thread is elsewhere.
There the thread stays in ``next_batch`` while nobody takes its batches, rather than wait outside.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from shmloader.device.exchange import (
    Call,
    Raised,
    Ready,
    Request,
    Result,
    Results,
    Semaphore,
    StageBrokenError,
)
from shmloader.engine.base import Delivery, EngineBase
from shmloader.engine.inbox import Inbox
from shmloader.errors import ClosedLoaderError, InternalError
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption
from shmloader.threads.background import BackgroundThread
from shmloader.threads.fork_safety import may_wait_here
from shmloader.threads.uninterruptible import uninterruptible

# Whose steps are shorter is back before the engine's thread, woken in a moment, has done its work.
_STEP_NS = 1_000_000

# How long close() waits for the thread: it may be in the user's own transform.
_JOIN_S = 5.0


class Stage(Protocol):
    """What is done to each batch."""

    #: Batches that may be ready and not taken; None for as many as there are tickets.
    ahead: int | None
    #: Of the thread.
    name: str
    #: What it does, as :data:`~shmloader.insight.measurements.STAGES` has it.
    kind: str

    def start(self) -> None:
        """Begin, on the thread."""

    def run(self, batch: object) -> Any:
        """What becomes of a batch, on the thread."""

    def hand_over(self, result: Any) -> object:
        """The batch for the user out of what :meth:`run` returned, on the user's thread."""

    def close(self) -> None:
        """Wait for what is under way and let go of all batches. When the thread has ended."""


class _Stop(BaseException):
    """Ends the thread."""


def _explained(error: StopIteration) -> RuntimeError:
    explained = RuntimeError("a batch's device_transform raised StopIteration, or what pins it did")
    explained.__cause__ = error
    return explained


class _Thread(BackgroundThread):
    """One epoch's thread. Holds no sampler, which may hold the loader, whose end must end us."""

    def __init__(self, engine: EngineBase, stage: Stage) -> None:
        super().__init__(stage.name)
        self._engine = engine
        self._stage = stage
        self._call: Call | None = None
        self.results = Results()
        self.semaphore = Semaphore(stage.ahead) if stage.ahead else None
        self._stays_inside = engine.is_dynamic
        self.is_stopping = False
        # Nothing of this refers to this object: no cycle delays the end of what it holds.
        self.inbox = Inbox(functools.partial(self.results.put, Request.TICKET))

    def wake(self) -> None:
        self._engine.wake()

    def stop(self, timeout_s: float | None) -> bool:
        """End it. Whether it has ended: not so if it takes longer, or if we must not wait."""
        self.is_stopping = True
        self.results.set()  # for a user's thread that waits
        call = self._call
        if call is not None:
            call.over.set()
        if self.semaphore is not None:
            self.semaphore.release()
        self.wake()
        return self.join(timeout_s)

    def work(self) -> None:
        try:
            self._stage.start()
            while self._take_one():
                pass
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread's outermost line
            self.results.put(Raised(error, is_last=True))

    def close_what_it_uses(self) -> None:
        self.results.clear()
        end(self._engine, self._stage)

    def _take_one(self) -> bool:
        """One batch; whether there may be a further one."""
        if not self._stays_inside:
            self._take_room()
        self._pause()
        result = self._next_result()
        if self._stays_inside:
            self._take_room()
        self.results.put(result)
        is_last = type(result) is Raised and result.is_last
        del result  # an exception's traceback holds this frame
        return not is_last

    def _take_room(self) -> None:
        if self.semaphore is not None and not self.semaphore.try_acquire():
            with self.resting():
                self.semaphore.acquire()

    def _next_result(self) -> Ready | Raised:
        try:
            batch = self._engine.next_batch()
        except _Stop:
            raise
        except StopIteration:
            # A new one, whose traceback holds nothing.
            return Raised(StopIteration(), is_last=True)
        except BaseException as error:  # noqa: BLE001 - the user's thread raises it
            is_last = self._engine.is_closed or isinstance(error, InternalError)
            return Raised(error, is_last, self._engine.delivery)
        delivery = self._engine.delivery
        try:
            if FAULTS is not None:
                FAULTS.reach("main.stage")
            began_ns = time.monotonic_ns()
            result = self._stage.run(batch)
            return Ready(result, delivery, (self._stage.kind, began_ns, time.monotonic_ns()))
        except StopIteration as error:
            # Else it would end the epoch, in silence.
            return Raised(_explained(error), False, delivery)
        except BaseException as error:  # noqa: BLE001 - as above
            return Raised(error, isinstance(error, StageBrokenError), delivery)
        finally:
            del batch  # who keeps the exception keeps this frame, and must not keep the slot

    def attach(self) -> None:
        """Have the engine work for this thread from now on."""
        if self.semaphore is None or not self._stays_inside:
            self._engine.attach(self.inbox, self._pause, self._have_done)
        else:
            self._engine.attach(
                self.inbox, self._pause, self._have_done, self.semaphore.is_available
            )

    def _pause(self) -> None:
        """Between two of the engine's steps: no lock is held."""
        if self.is_stopping:
            raise _Stop
        self.pause()

    def _have_done(self, function: Callable[[], None]) -> None:
        """Have the user's thread do something, and wait for it."""
        self._call = call = Call(function)
        self.results.put(call)
        with self.resting():
            if not self.is_stopping:
                call.over.wait()
        self._call = None
        if self.is_stopping:
            raise _Stop
        call.raise_error()


def end(engine: EngineBase, stage: Stage) -> None:
    """Close a stage, then its engine, whose slots the stage may read."""
    try:
        stage.close()
    finally:
        try:
            engine.close()
        finally:
            engine.detach()  # it need not wait for the collector of cycles


class Running:
    """What runs for an iterator: ended by it, or when it is garbage.

    Args:
        engine: Its engine.
        stage: What follows.
    """

    def __init__(self, engine: EngineBase, stage: Stage) -> None:
        self._engine = engine
        self._stage = stage
        self.pid = os.getpid()
        self.thread: _Thread | None = None

    def begin(self) -> _Thread:
        """A thread for an epoch, not started yet."""
        self.thread = thread = _Thread(self._engine, self._stage)
        thread.attach()
        return thread

    def end_epoch(self) -> None:
        """End the thread, if there is one. The engine belongs to the calling thread afterwards.

        What was drawn is loaded all the same: the workers' random streams go on as torch's do.
        Waits for as long as the stage takes for its batch: the user's transform may be compiled
        just then.
        """
        thread = self.thread
        if thread is not None:
            thread.stop(None)
            self.thread = None
            thread.results.clear()
            try:
                if not self._engine.is_closed:
                    self._engine.take_tickets()
            except BaseException:
                self._engine.close()  # a ticket may be with a worker that was never told
                raise
            finally:
                self._engine.detach()

    def end(self) -> None:
        """End the thread, close the stage and the engine. May be called again."""
        if os.getpid() != self.pid:
            self._engine.close()  # a forked child: neither the thread nor the device is its own
            return
        uninterruptible(self._end_here)

    def _end_here(self) -> None:
        thread = self.thread
        if thread is not None and not thread.stop(_JOIN_S) and thread.leave_closing():
            # We are on that thread, by way of the garbage collector; or it is stuck in the user's
            # transform. It looks at what we would close, but for the workers.
            if may_wait_here():
                self._engine.end_workers()
            return
        self.thread = None
        if thread is not None:
            thread.results.clear()
        end(self._engine, self._stage)


class StageThread:
    """An engine's batches, after a stage on another thread. Used on the user's thread.

    Args:
        engine: The engine; its workers run.
        stage: What is done to each batch.
        window: Tickets that are drawn at an epoch's start.
        timeout_s: Longest wait for a batch; 0 for ever.

    Attributes:
        running: What must be ended; holds neither this object nor the sampler.
    """

    def __init__(self, engine: EngineBase, stage: Stage, window: int, timeout_s: float) -> None:
        self.running = Running(engine, stage)
        self._engine = engine
        self._stage = stage
        self._window = window
        self._timeout_s = timeout_s
        self._draw: Callable[[], object] = iter(()).__next__
        # How the engine's thread is woken for a ticket; when a batch was last given to the user.
        self._wake: Callable[[], None] = engine.wake
        self._left_ns = 0
        # Drawn in this epoch, less those that were answered.
        self._tickets_out = 0
        #: As :attr:`EngineBase.in_transit`.
        self.in_transit = False
        #: As :attr:`EngineBase.told`.
        self.told = 0
        #: As :attr:`EngineBase.delivery`.
        self.delivery: Delivery | None = None
        #: Of the batch that was given last: see :class:`Ready`.
        self.staged: tuple[str, int, int] | None = None

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch."""
        self._draw = tickets.__next__
        self._tickets_out = 0
        thread = self.running.begin()
        try:
            for _ in range(self._window):
                if not self._draw_one(thread):
                    break
        finally:
            try:
                thread.start()
            except BaseException:
                self.close()
                raise

    def set_window(self, window: int) -> None:
        """Draw so many tickets at the next epoch's start."""
        self._window = window

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers; see :meth:`EngineBase.restart`."""
        self._check_process()
        self.running.end_epoch()
        self._stage.close()
        self._engine.restart(iter(()))
        self.start(tickets)

    def next_batch(self) -> object:
        """The next batch; see :meth:`EngineBase.next_batch`."""
        self.in_transit = False
        self.told = 0
        self.delivery = None  # that of the last call is told once
        thread = self.running.thread
        if thread is None:
            self._engine.check_open()
            raise ClosedLoaderError("the iterator is closed")
        self._check_process()  # what is ready here would be given in the child as well
        is_away = time.monotonic_ns() - self._left_ns > _STEP_NS
        self._wake = self._engine.wake_soon if is_away else self._engine.wake
        deadline = time.monotonic() + self._timeout_s if self._timeout_s > 0 else None
        while True:
            # Interrupted here, nothing is lost.
            result = self._wait_for_result(thread, deadline)
            try:
                self.in_transit = True
                if isinstance(result, Ready | Raised):
                    batch = self._take(thread, result)
                    self._left_ns = time.monotonic_ns()
                    return batch
                self._serve(thread, result)
                self.in_transit = False
            except BaseException as error:
                del result  # an exception's traceback holds this frame
                if self.loses(error):
                    self.give_up(error)
                raise

    def loses(self, error: BaseException) -> bool:
        """See :meth:`EngineBase.loses`."""
        return self.in_transit and self.told != id(error)

    def give_up(self, error: BaseException, *, in_sampler: bool = False) -> None:
        """See :meth:`EngineBase.give_up`."""
        self._engine.note_interruption(error, in_sampler=in_sampler)
        self.close()

    def _serve(self, thread: _Thread, request: Request | Call) -> None:
        """Do what the thread asks for."""
        thread.results.drop_first()
        if isinstance(request, Call):
            request.make()
        else:
            self._draw_one(thread)

    def _take(self, thread: _Thread, result: Ready | Raised) -> object:
        if isinstance(result, Raised) and result.is_last:
            self.in_transit = False
            self._raise_last(result.error)
        thread.results.drop_first()
        if thread.semaphore is not None:
            thread.semaphore.release()
        if result.delivery is not None:  # else an error that came in no batch's place
            self._tickets_out -= 1
            self._draw_one(thread)  # which wakes the engine
        self.delivery = result.delivery
        if isinstance(result, Ready):
            self.staged = result.staged
            return self._stage.hand_over(result.result)
        error = result.error
        self.told = id(error)
        try:
            raise error
        finally:
            del error, result  # the traceback holds this frame

    def _raise_last(self, error: BaseException) -> NoReturn:
        if isinstance(error, StopIteration):
            raise StopIteration  # the result stays, for a user who asks again
        self.close()
        try:
            raise error
        finally:
            del error

    def _wait_for_result(self, thread: _Thread, deadline: float | None) -> Result:
        """The first of the thread's results, which stays with them."""
        results = thread.results
        while (result := results.first) is None:
            # Looked at after each ring: by now the one who closes may have done all there is to do.
            if thread.is_stopping:
                self._engine.check_open()
                raise ClosedLoaderError("the iterator is closed")
            self._check_process()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._raise_late(results)
            else:
                self._engine.hurry()
                results.wait(left)
        return result

    def _check_process(self) -> None:
        if os.getpid() != self.running.pid:
            raise ClosedLoaderError("the iterator belongs to the process that made it")

    def _raise_late(self, results: Results) -> None:
        """Raise that no batch has come in time; unless one has, while workers were asked."""
        try:
            late = self._engine.late()
        except (OSError, ValueError) as error:  # the engine's thread closes what we look at
            if not results or is_interruption(error):
                raise
            return
        if not results:
            raise late

    def _draw_one(self, thread: _Thread) -> bool:
        try:
            indices = self._draw()
        except StopIteration:
            thread.inbox.end(self._wake)
            return False
        except BaseException as error:
            if is_interruption(error):
                self.give_up(error, in_sampler=True)
                raise
            # The sampler's own. As in torch's loader, the epoch goes on, with a ticket fewer.
            if self._tickets_out == 0:
                thread.inbox.end(self._wake)
            else:
                thread.wake()
            self.told = id(error)
            raise
        self._tickets_out += 1
        thread.inbox.put(indices, self._wake)
        return True

    def close(self) -> None:
        """End everything. May be called again."""
        self._draw = iter(()).__next__
        self.running.end()
