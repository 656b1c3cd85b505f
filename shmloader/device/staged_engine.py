"""An engine behind a stage on another thread, as the user's thread sees it."""

import os
import time
from collections.abc import Callable, Iterator

from shmloader.device.exchange import Raised, Ready, Request, Result, Results, UserThreadCall
from shmloader.device.stage import Stage
from shmloader.device.thread import EngineThread, ThreadOwner
from shmloader.engine.delivery import Delivery, Instead
from shmloader.engine.engine import Engine
from shmloader.errors import ITERATOR_CLOSED, ClosedLoaderError
from shmloader.interruptions import is_interruption


class StagedEngine:
    """Delivers an engine's batches, after a stage on another thread. Used on the user's thread.

    Args:
        engine: The engine, whose workers are running.
        stage: Processes each batch.
        window: Tickets that are drawn at an epoch's start.
        timeout_s: Longest wait for a batch in seconds; 0 waits without a limit.

    Attributes:
        owner: Ends the engine, the stage and the thread. Refers neither to this object nor to the
            sampler.
        is_waiting: Whether :meth:`next_batch` waits, or was left by an exception while it only
            waited.
        delivery: See :attr:`Engine.delivery`.
        draw_ns: See :attr:`Engine.draw_ns`.
        staged: :attr:`Ready.staged` of the batch that was returned last.
    """

    def __init__(self, engine: Engine, stage: Stage, window: int, timeout_s: float) -> None:
        self.owner = ThreadOwner(engine, stage)
        self._engine = engine
        self._stage = stage
        self._window = window
        self._timeout_s = timeout_s
        self._draw: Callable[[], object] = iter(()).__next__
        # Tickets of this epoch that are not answered yet.
        self._tickets_out = 0
        self.is_waiting = False
        self.delivery: Delivery | None = None
        self.draw_ns = 0
        self.staged: tuple[str, int, int] | None = None

    def start(self, tickets: Iterator[object]) -> None:
        """Begin the first epoch."""
        self._draw = tickets.__next__
        self._tickets_out = self.draw_ns = 0
        thread = self.owner.begin()
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
        """Set how many tickets are drawn at the next epoch's start."""
        self._window = window

    def restart(self, tickets: Iterator[object]) -> None:
        """Begin a further epoch with the same workers; see :meth:`Engine.restart`."""
        self._check_process()
        self.owner.end_epoch()
        self._stage.close()
        self._engine.restart(iter(()))
        self.start(tickets)

    def next_batch(self) -> object:
        """Return the next batch; see :meth:`Engine.next_batch`."""
        self.is_waiting = False
        self.delivery = None  # a delivery is reported only once
        self.draw_ns = 0
        thread = self.owner.thread
        if thread is None:
            self._engine.check_open()
            raise Instead(ClosedLoaderError(ITERATOR_CLOSED))
        self._check_process()  # a forked child has a copy of what is ready here
        deadline = time.monotonic() + self._timeout_s if self._timeout_s > 0 else None
        while True:
            result = self._wait_for_result(thread, deadline)
            if isinstance(result, Ready | Raised):
                return self._take(thread, result)
            self._serve(thread, result)

    def give_up(self, error: BaseException) -> None:
        """See :meth:`Engine.give_up`."""
        self._engine.note_interruption(error)
        self.close()

    def _serve(self, thread: EngineThread, request: Request | UserThreadCall) -> None:
        """Do what the engine's thread has asked for."""
        thread.results.drop_first()
        if isinstance(request, UserThreadCall):
            request.make()
        else:
            if request is Request.REPLACEMENT:
                self._tickets_out -= 1
            self._draw_one(thread)

    def _take(self, thread: EngineThread, result: Ready | Raised) -> object:
        """Return the batch of a result, or raise its exception."""
        if isinstance(result, Raised) and result.is_last:
            if not isinstance(result.error, StopIteration):  # which stays, for further calls
                self._engine.note_interruption(result.error)  # unless the engine reported it
                self.close()
            raise Instead(result.error)
        thread.results.drop_first()
        if thread.semaphore is not None:
            thread.semaphore.release()
        if result.delivery is not None:  # otherwise an exception that replaces no batch
            self._tickets_out -= 1
            self._draw_one(thread)  # which wakes the engine
        self.delivery = result.delivery
        if isinstance(result, Ready):
            self.staged = result.staged
            return self._stage.hand_over(result.result)
        raise Instead(result.error)

    def _wait_for_result(self, thread: EngineThread, deadline: float | None) -> Result:
        """Wait for the first of the thread's results, and leave it in the queue."""
        results = thread.results
        while (result := results.first) is None:
            # Checked after each wait, because another thread may have closed the iterator.
            if thread.is_stopping:
                self._engine.check_open()
                raise Instead(ClosedLoaderError(ITERATOR_CLOSED))
            self._check_process()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                self._raise_late(results)
            else:
                self.is_waiting = True  # an interruption of this call loses nothing
                results.wait(left_s)
                self.is_waiting = False
        return result

    def _check_process(self) -> None:
        if os.getpid() != self.owner.pid:
            raise Instead(ClosedLoaderError("the iterator belongs to the process that made it"))

    def _raise_late(self, results: Results) -> None:
        """Raise a LoaderTimeoutError, unless a result came while the workers were examined."""
        try:
            late = self._engine.late()
        except (OSError, ValueError) as error:  # the engine's thread closes what is examined
            if not results or is_interruption(error):
                raise
            return
        if not results:
            raise Instead(late)

    def _draw_one(self, thread: EngineThread) -> bool:
        """Draw a ticket for the engine's thread. Returns False if the sampler has ended."""
        began_ns = time.monotonic_ns()
        try:
            indices = self._draw()
        except StopIteration:
            thread.inbox.end(self._engine.wake)
            return False
        except BaseException as error:
            if is_interruption(error):
                self._engine.note_interruption(error, in_sampler=True)
                raise
            # The sampler's own exception. As with torch, the epoch continues with one ticket fewer.
            if self._tickets_out == 0:
                thread.inbox.end(self._engine.wake)
            else:
                thread.wake()
            raise Instead(error) from None
        self.draw_ns += time.monotonic_ns() - began_ns
        self._tickets_out += 1
        thread.inbox.put(indices, self._engine.wake)
        return True

    def close(self) -> None:
        """End the thread, the stage and the engine. May be called again."""
        self._draw = iter(()).__next__
        self.owner.end()
