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
"""

import enum
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from shmloader.engine.engine import Engine
from shmloader.engine.inbox import Inbox
from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.workers.parking import Parkable

# How long close() waits for the thread: it may be in the user's own transform.
_JOIN_S = 5.0


class Stage(Protocol):
    """What is done to each batch."""

    #: Batches that may be ready and not taken; None for as many as there are tickets.
    ahead: int | None
    #: Of the thread.
    name: str

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


@dataclass(frozen=True, slots=True)
class _Ready:
    result: Any


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class _Wish(enum.Enum):
    """What the thread asks for without waiting."""

    TICKET = enum.auto()


class _Call:
    """Something that the user's thread does for this one, which waits."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.error: BaseException | None = None
        self.is_over = threading.Event()

    def make(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - handed on to the thread that asked
            self.error = error
        self.is_over.set()


class _Thread(Parkable):
    """One epoch's thread. Holds no sampler, which may hold the loader, whose end must end us."""

    def __init__(self, engine: Engine, stage: Stage) -> None:
        super().__init__()
        self._engine = engine
        self._stage = stage
        self._call: _Call | None = None
        self.results: queue.SimpleQueue[_Ready | _Raised | _Wish | _Call] = queue.SimpleQueue()
        self.room = threading.Semaphore(stage.ahead) if stage.ahead else None
        self.is_stopping = False
        # Nothing of this refers to this object: no cycle delays the end of what it holds.
        self.inbox = Inbox(engine.wake, functools.partial(self.results.put, _Wish.TICKET))
        self._thread = threading.Thread(target=self._run, name=stage.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._engine.wake()

    def stop(self) -> bool:
        """End it. Whether it has ended; not so if it is the thread that calls."""
        self.is_stopping = True
        # For a user's thread that waits.
        self.results.put(_Raised(ClosedLoaderError("the iterator is closed")))
        if self._call is not None:
            self._call.is_over.set()
        if self.room is not None:
            self.room.release()
        self.wake()
        if self._thread is threading.current_thread():
            return False
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.enter()
        try:
            self._stage.start()
            while self._take_one():
                pass
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread's outermost line
            self.results.put(_Raised(error))
        finally:
            self.leave()
            if self._ends_all:
                end(self._engine, self._stage)

    #: Whether nobody else is left to close the engine and the stage.
    _ends_all = False

    def end_all_afterwards(self) -> None:
        """Close the engine and the stage when the thread ends, which it is about to."""
        self._ends_all = True

    def _take_one(self) -> bool:
        """One batch; whether there may be a further one."""
        if self.room is not None:
            with self.resting():
                self.room.acquire()
        self._pause()
        try:
            batch = self._engine.next_batch()
        except _Stop:
            raise
        except StopIteration:
            self.results.put(_Raised(StopIteration()))  # a new one, whose traceback holds nothing
            return False
        except BaseException as error:  # noqa: BLE001 - the user's thread raises it
            self.results.put(_Raised(error))
            return not self._engine.is_closed
        try:
            if FAULTS is not None:
                FAULTS.reach("main.stage")
            result: _Ready | _Raised = _Ready(self._stage.run(batch))
        except BaseException as error:  # noqa: BLE001 - as above
            result = _Raised(error)
        self.results.put(result)
        return True

    def attach(self) -> None:
        """Have the engine work for this thread from now on."""
        self._engine.attach(self.inbox, self._pause, self._have_done)

    def _pause(self) -> None:
        """Between two of the engine's steps: no lock is held."""
        if self.is_stopping:
            raise _Stop
        self.pause()

    def _have_done(self, function: Callable[[], None]) -> None:
        """Have the user's thread do something, and wait for it."""
        self._call = call = _Call(function)
        self.results.put(call)
        with self.resting():
            if not self.is_stopping:
                call.is_over.wait()
        self._call = None
        if self.is_stopping:
            raise _Stop
        if call.error is not None:
            raise call.error


def end(engine: Engine, stage: Stage) -> None:
    """Close a stage, then its engine, whose slots the stage may read."""
    stage.close()
    engine.close()
    engine.detach()  # it need not wait for the collector of cycles


class Running:
    """What runs for an iterator: ended by it, or when it is garbage.

    Args:
        engine: Its engine.
        stage: What follows.
    """

    def __init__(self, engine: Engine, stage: Stage) -> None:
        self._engine = engine
        self._stage = stage
        self._pid = os.getpid()
        self.thread: _Thread | None = None

    def begin(self) -> _Thread:
        """A thread for an epoch, not started yet."""
        self.thread = thread = _Thread(self._engine, self._stage)
        thread.attach()
        return thread

    def end_epoch(self) -> None:
        """End the thread, if there is one. The engine belongs to the calling thread afterwards."""
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.stop()
            self._engine.detach()

    def end(self) -> None:
        """End the thread, close the stage and the engine. May be called again."""
        if os.getpid() != self._pid:
            self._engine.close()  # a forked child: neither the thread nor the device is its own
            return
        thread = self.thread
        if thread is not None and not thread.stop():
            # We are on that thread, by way of the garbage collector; or it is stuck in the user's
            # transform. It looks at what we would close.
            thread.end_all_afterwards()
            return
        self.thread = None
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

    def __init__(self, engine: Engine, stage: Stage, window: int, timeout_s: float) -> None:
        self.running = Running(engine, stage)
        self._engine = engine
        self._stage = stage
        self._window = window
        self._timeout_s = timeout_s
        self._draw: Callable[[], object] = iter(()).__next__

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch."""
        self._draw = tickets.__next__
        thread = self.running.begin()
        for _ in range(self._window):
            if not self._draw_one(thread):
                break
        thread.start()

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers; see :meth:`Engine.restart`."""
        self.running.end_epoch()
        self._stage.close()
        self._engine.restart(iter(()))
        self.start(tickets)

    def next_batch(self) -> object:
        """The next batch; see :meth:`Engine.next_batch`."""
        thread = self.running.thread
        if thread is None:
            self._engine.check_open()
            raise ClosedLoaderError("the iterator is closed")
        result = self._wait_for_result(thread)
        if thread.room is not None:
            thread.room.release()
        if isinstance(result, _Ready):
            self._draw_one(thread)
            return self._stage.hand_over(result.result)
        error = result.error
        if isinstance(error, StopIteration):
            thread.results.put(result)  # for a user who asks again
            raise StopIteration
        if self._engine.is_closed:
            self.running.end_epoch()
        else:
            self._draw_one(thread)
        try:
            raise error
        finally:
            del error, result  # the traceback holds this frame

    def _wait_for_result(self, thread: _Thread) -> "_Ready | _Raised":
        deadline = time.monotonic() + self._timeout_s if self._timeout_s > 0 else None
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                result = thread.results.get(timeout=left)
            except queue.Empty:
                raise self._engine.late() from None
            if result is _Wish.TICKET:
                self._draw_one(thread)
            elif isinstance(result, _Call):
                result.make()
            elif isinstance(result, _Ready | _Raised):
                return result

    def _draw_one(self, thread: _Thread) -> bool:
        try:
            indices = self._draw()
        except StopIteration:
            thread.inbox.end()
            return False
        thread.inbox.put(indices)
        return True

    def close(self) -> None:
        """End everything. May be called again."""
        self._draw = iter(()).__next__
        self.running.end()
