"""The thread that runs an engine and the stage after it.

::

    user's thread                                this thread, one for each epoch
    ─────────────                                ───────────────────────────────
    draw the sampler ── Inbox ─────────────────▶ engine.next_batch()
    next() ◀── queue: a batch, an exception, ─── stage.run(batch): pin, or copy to the device
               or a call to be made there

Only the user's thread draws the sampler, one ticket for each batch that is taken, so the main
process's random generators are used as torch uses them. It also starts workers that replace dead
ones, and additional workers: a fork copies the forking thread, and the user's thread is the one
that forked the others.

"""

import functools
import os
import time
from collections.abc import Callable

from shmloader.device.exchange import Raised, Ready, Request, Results, Semaphore, UserThreadCall
from shmloader.device.stage import Stage, StageBrokenError
from shmloader.engine.delivery import Instead
from shmloader.engine.engine import Engine
from shmloader.engine.inbox import Inbox
from shmloader.faults import FAULTS
from shmloader.threads.background import BackgroundThread, may_wait_here
from shmloader.threads.uninterruptible import uninterruptible

# How long `ThreadOwner.end` waits for the thread, which may be in the user's transform, in seconds.
_JOIN_S = 5.0


class _Stop(BaseException):
    """Ends the thread."""


def _explained(error: StopIteration) -> RuntimeError:
    """Return an error in place of a StopIteration, which would silently end the epoch."""
    explained = RuntimeError("a batch's device_transform or pin_memory raised StopIteration")
    explained.__cause__ = error
    return explained


def _ask(results: Results, is_addition: bool) -> None:
    results.put(Request.ADDITION if is_addition else Request.REPLACEMENT)


class EngineThread(BackgroundThread):
    """Runs the engine and the stage for one epoch.

    Does not refer to the sampler, which may hold the loader: when the loader is garbage, the thread
    must end.

    Attributes:
        results: Results for the user's thread.
        semaphore: Limits the results that are ready and not yet taken; None without a limit.
        inbox: Tickets from the user's thread.
        is_stopping: Whether the thread is to end.
    """

    def __init__(self, engine: Engine, stage: Stage) -> None:
        super().__init__(stage.name)
        self._engine = engine
        self._stage = stage
        self._call: UserThreadCall | None = None
        self.results = Results()
        self.semaphore = Semaphore(stage.ahead) if stage.ahead else None
        self.is_stopping = False
        # Does not refer to this object: a reference cycle would delay the end of what it holds.
        self.inbox = Inbox(functools.partial(_ask, self.results))

    def wake(self) -> None:
        """End the present or the next wait of the engine on this thread."""
        self._engine.wake()

    def stop(self, timeout_s: float | None) -> bool:
        """End the thread.

        Returns:
            Whether it has ended. False if it takes longer, or if the calling thread must not wait.
        """
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
        """Run the engine and the stage until the last result, or until :meth:`stop`."""
        try:
            self._stage.start()
            while self._take_one():
                pass
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread's outermost line
            self.results.put(Raised(error, is_last=True))

    def close_what_it_uses(self) -> None:
        """Close the stage and the engine, and drop all results."""
        self.results.clear()
        close(self._engine, self._stage)

    def _take_one(self) -> bool:
        """Pass one result to the user's thread. Returns whether another may follow."""
        if self.semaphore is not None and not self.semaphore.try_acquire():
            with self.resting():
                self.semaphore.acquire()
        self._pause()
        result = self._next_result()
        self.results.put(result)
        is_last = type(result) is Raised and result.is_last
        del result  # an exception's traceback pins this frame
        return not is_last

    def _next_result(self) -> Ready | Raised:
        try:
            batch = self._engine.next_batch()
        except _Stop:
            raise
        except Instead as instead:
            error = instead.error
            is_last = self._engine.is_closed or isinstance(error, StopIteration)
            return Raised(error, is_last, self._engine.delivery)
        delivery = self._engine.delivery
        try:
            if FAULTS is not None:
                FAULTS.reach("main.stage")
            began_ns = time.monotonic_ns()
            result = self._stage.run(batch)
            return Ready(result, delivery, (self._stage.kind, began_ns, time.monotonic_ns()))
        except StopIteration as error:
            return Raised(_explained(error), False, delivery)
        except BaseException as error:  # noqa: BLE001 - the user's thread raises it
            return Raised(error, isinstance(error, StageBrokenError), delivery)
        finally:
            del batch  # an exception's traceback pins this frame, which must not pin the slot

    def attach(self) -> None:
        """Make the engine belong to this thread; see :meth:`Engine.attach`."""
        self._engine.attach(self.inbox, self._pause, self._call_in_user_thread)

    def _pause(self) -> None:
        """Pause or end if asked to. Called between two steps, when no lock is held."""
        if self.is_stopping:
            raise _Stop
        self.pause()

    def _call_in_user_thread(self, function: Callable[[], None]) -> None:
        """Have the user's thread call a function, and wait until it has."""
        self._call = call = UserThreadCall(function)
        self.results.put(call)
        with self.resting():
            if not self.is_stopping:
                call.over.wait()
        self._call = None
        if self.is_stopping and not call.is_made:
            raise _Stop
        # The thread does not end here after a call: the engine has yet to note what was done.
        call.raise_error()


def close(engine: Engine, stage: Stage) -> None:
    """Close a stage, then its engine, whose slots the stage may read."""
    try:
        stage.close()
    finally:
        try:
            engine.close()
        finally:
            engine.detach()  # this breaks a reference cycle


class ThreadOwner:
    """Owns an engine, its stage, and the present epoch's thread.

    An iterator's finalizer calls :meth:`end`, so this refers neither to the iterator nor to the
    sampler.

    Attributes:
        pid: Id of the process that made this object.
        thread: The thread of the present epoch, or None.
    """

    def __init__(self, engine: Engine, stage: Stage) -> None:
        self._engine = engine
        self._stage = stage
        self.pid = os.getpid()
        self.thread: EngineThread | None = None

    def begin(self) -> EngineThread:
        """Make a thread, without starting it, and make the engine belong to it."""
        self.thread = thread = EngineThread(self._engine, self._stage)
        thread.attach()
        return thread

    def end_epoch(self) -> None:
        """End the thread, if there is one. The engine belongs to the calling thread afterwards.

        Tickets that were drawn are still loaded, so that the workers' random generators advance as
        torch's do. Waits for the stage's present batch without a limit, because the user's
        transform may be compiling at that moment.
        """
        thread = self.thread
        if thread is not None:
            thread.stop(None)
            self.thread = None
            thread.results.clear()
            try:
                if not self._engine.is_closed:
                    self._engine.take_tickets()
            finally:
                self._engine.detach()

    def end(self) -> None:
        """End the thread, and close the stage and the engine. May be called again."""
        if os.getpid() != self.pid:
            self._engine.close()  # neither the thread nor the device belongs to a forked child
            return
        uninterruptible(self._end_here)

    def _end_here(self) -> None:
        thread = self.thread
        if thread is not None and not thread.stop(_JOIN_S) and thread.leave_closing():
            # The garbage collector runs this on that thread, or the thread is stuck in the user's
            # transform. The thread closes the rest when it ends, because it still uses that; only
            # the workers can be ended here.
            if may_wait_here():
                self._engine.end_workers()
            return
        self.thread = None
        if thread is not None:
            thread.results.clear()
        close(self._engine, self._stage)
