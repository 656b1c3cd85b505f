"""Parks our threads while this process forks, and when it ends.

A fork copies only the forking thread, and all locks as they are. If a thread is inside torch or the
GPU's driver at that moment, the locks that it holds stay locked for ever in the child. So each of
our threads registers here. While a worker is forked, the thread waits at a point where it holds no
lock: it is parked.

At the interpreter's exit all threads are parked for good. A daemon thread that takes the GIL then
is ended wherever it is, even inside torch's C++ code, which aborts the process. At the exit this
includes threads that run the user's code, such as those of :mod:`shmloader.pools.thread`. A fork
does not wait for these (``parks_for_forks``).
"""

import contextlib
import math
import multiprocessing.util
import threading
import time
from collections.abc import Iterator

from shmloader.process_state import PROCESS
from shmloader.threads.wakeup import SIGNAL_S, Wakeup

# Longest wait for a thread to be parked: it may be in the user's own transform.
_PARK_S = 5.0


class Parkable:
    """A thread that can be parked. It often calls :meth:`pause` at points where it holds no lock.

    While the thread waits for another thread of this process, it is in a :meth:`resting` block,
    where it counts as parked.

    Attributes:
        parks_for_forks: Whether the thread is parked while this process forks, and not only at the
            interpreter's exit.
        exit_s: The longest time in seconds that the interpreter's exit waits for it to be parked.
    """

    parks_for_forks = True
    exit_s = math.inf

    def __init__(self) -> None:
        self._is_parked = True
        self._parked = Wakeup()
        self._go = Wakeup()
        self._ident = 0

    def enter(self) -> None:
        """Register the thread. Called on the thread when it begins."""
        self._ident = threading.get_ident()
        with PROCESS.threads.lock:
            PROCESS.threads.live.add(self)
            PROCESS.threads.unwilling.add(self._ident)
            if not PROCESS.threads.is_watching_exit:
                PROCESS.threads.is_watching_exit = True
                # This runs before the pools are closed: their priority is lower.
                multiprocessing.util.Finalize(None, _park_for_good, exitpriority=110)
        self._wait_for_go()

    def leave(self) -> None:
        """Unregister the thread. Called on the thread when it ends."""
        self._park()
        with PROCESS.threads.lock:
            PROCESS.threads.live.discard(self)
            PROCESS.threads.unwilling.discard(self._ident)

    def pause(self) -> None:
        """Stay parked while the thread is asked to. Called on the thread."""
        if self._must_park():
            with self.resting():
                pass

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Count as parked in this block, and after it while asked to park. Called on the thread."""
        self._park()
        try:
            yield
        finally:
            self._wait_for_go()

    def _must_park(self) -> bool:
        return self in PROCESS.threads.to_park

    def _park(self) -> None:
        self._is_parked = True
        self._parked.set()

    def _wait_for_go(self) -> None:
        while True:
            while self._must_park():
                self._go.wait(SIGNAL_S)  # an interrupted release() may have woken nobody
            # Each side first says what it does, and then reads what the other says: no lock is
            # needed, which a signal handler's exception could leave locked.
            self._is_parked = False
            if not self._must_park():
                return
            self._park()

    def wake(self) -> None:
        """Make the thread reach its next pause soon. Subclasses may override this."""

    def await_parked(self, deadline: float) -> None:
        """Wait until the thread is parked, or until ``deadline``."""
        while not self._is_parked and (left_s := deadline - time.monotonic()) > 0:
            self._parked.wait(left_s)

    def release(self) -> None:
        """Make the thread continue, if it need not park any more."""
        self._go.set()

    @property
    def is_parked_for_good(self) -> bool:
        """Whether the interpreter is exiting, so that the parked thread will never continue."""
        return PROCESS.threads.is_exiting and self._is_parked


@contextlib.contextmanager
def all_parked() -> Iterator[None]:
    """Park our threads for a block that forks. Waits up to five seconds for them."""
    threads, ident = PROCESS.threads, threading.get_ident()
    with threads.lock:
        was_unwilling, parked_before = ident in threads.unwilling, threads.to_park
        parked = {one for one in threads.live if one.parks_for_forks and one._ident != ident}
        try:
            threads.unwilling.add(ident)
            threads.to_park = parked_before | parked
            _await_all(parked)
            yield
        finally:
            threads.to_park = parked_before
            if not was_unwilling:
                threads.unwilling.discard(ident)
            for thread in parked:
                thread.release()


def may_wait_here() -> bool:
    """Return whether the calling thread may wait for one of our threads to end.

    It may not if it is one of our threads itself, or if it is forking: the other thread may be
    parked for that fork. Finalizers ask this, and the garbage collector may run one on any thread.
    """
    return threading.get_ident() not in PROCESS.threads.unwilling


def is_exiting() -> bool:
    """Return whether the interpreter is exiting, so that our threads are parked for good."""
    return PROCESS.threads.is_exiting


def _await_all(threads: set[Parkable], *, is_exit: bool = False) -> None:
    for thread in threads:
        thread.wake()
    start = time.monotonic()
    for thread in threads:
        thread.await_parked(start + (min(_PARK_S, thread.exit_s) if is_exit else _PARK_S))


def _park_for_good() -> None:
    with PROCESS.threads.lock:
        PROCESS.threads.to_park = PROCESS.threads.live.copy()
        _await_all(PROCESS.threads.to_park, is_exit=True)
    PROCESS.threads.is_exiting = True
