"""The base class of background threads: starts, parks, ends and joins one.

**Parking.** A fork copies only the forking thread, and all locks as they are. If a thread is inside
torch or the GPU's driver at that moment, the locks that it holds stay locked for ever in the child.
So while a worker is forked, our threads wait at points where they hold no lock: they are parked.

At the interpreter's exit all threads are parked for good. A daemon thread that takes the GIL then
is ended wherever it is, even inside torch's C++ code, which aborts the process. At the exit this
includes threads that run the user's code, such as those of :mod:`shmloader.pools.thread`. A fork
does not wait for these (``parks_for_forks``).

The thread that calls Ray Client (:mod:`shmloader.cluster`) is not derived from it, since a call may
not return; nor are those of :mod:`shmloader.streams.fingerprints`, which end before the call that
starts them. Every other thread of the package keeps these rules:

* Threads are daemons, because a thread may be inside the user's code when the interpreter exits.
* No thread waits for a thread that is parked for good. Neither a background thread nor a thread
  that forks waits for a background thread, not even in a finalizer that the garbage collector runs
  on it.
* The end of a thread is a latch, since in Python 3.11 an interrupted ``Thread.join()`` marks the
  thread as ended although it runs.
* A thread that cannot be waited for closes what it uses when it ends. Either the thread or the
  caller closes, never both.
"""

import abc
import contextlib
import math
import multiprocessing.util
import threading
import time
from collections.abc import Iterator

from shmloader.interruptions import SIGNAL_S, Latch, Wakeup
from shmloader.process_state import PROCESS

# Longest wait for a thread to be parked: it may be in the user's own transform.
_PARK_S = 5.0


class BackgroundThread:
    """A thread that runs :meth:`work` once.

    It often calls :meth:`pause` at points where it holds no lock. While it waits for another thread
    of this process, it is in a :meth:`resting` block, where it counts as parked.

    Attributes:
        parks_for_forks: Whether the thread is parked while this process forks, and not only at the
            interpreter's exit.
        exit_s: The longest time in seconds that the interpreter's exit waits for it to be parked.

    Args:
        name: Name of the thread. The system shows its first 15 characters.
    """

    parks_for_forks = True
    exit_s = math.inf

    def __init__(self, name: str) -> None:
        self._end = Latch()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_parked = True
        self._parked, self._go = Wakeup(), Wakeup()
        # Whether the thread or the caller closes what the thread uses. The first of the two that
        # sets this decides; dict.setdefault() is atomic.
        self._closer: dict[str, str] = {}

    @abc.abstractmethod
    def work(self) -> None:
        """Do the thread's work. Runs on the thread."""

    def begin(self) -> None:
        """Prepare, before the thread can be parked. Runs on it. Does nothing by default."""

    def close_what_it_uses(self) -> None:
        """Close what the thread uses, after :meth:`leave_closing`. Runs on the thread."""

    def depart(self) -> None:
        """Finish, when the thread can no longer be parked. May wait for our other threads."""

    def wake(self) -> None:
        """Make the thread reach its next pause soon. Does nothing by default."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread's end, unless the calling thread must not wait.

        Returns:
            Whether the thread no longer uses anything: it has ended, was never started, or is
            parked for good.
        """
        is_parked_for_good = PROCESS.threads.is_exiting and self._is_parked
        if self._thread.ident is None or is_parked_for_good:
            return True
        if not may_wait() or not self._end.wait(timeout_s):
            return self._end.is_set
        self._thread.join()
        return True

    def leave_closing(self) -> bool:
        """Leave closing to the thread. Returns False if the thread has ended already."""
        return self._closer.setdefault("is", "the thread") == "the thread"

    @property
    def system_id(self) -> int | None:
        """The kernel's id of the thread; None while the thread does not run."""
        thread = self._thread
        return None if self._end.is_set else thread.native_id

    def _run(self) -> None:
        threads, ident = PROCESS.threads, threading.get_ident()
        try:
            self.begin()
            with threads.lock:
                threads.live.add(self)
                threads.unwilling.add(ident)
                if not threads.is_watching_exit:
                    threads.is_watching_exit = True
                    # This runs before the pools are closed: their priority is lower.
                    multiprocessing.util.Finalize(None, _park_for_good, exitpriority=110)
            try:
                self._wait_for_go()
                try:
                    self.work()
                finally:
                    if self._closer.setdefault("is", "the caller") == "the thread":
                        self.close_what_it_uses()
            finally:
                self._park()
                with threads.lock:
                    threads.live.discard(self)
                    threads.unwilling.discard(ident)
                self.depart()
        finally:
            self._end.set()

    # Parking ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stay parked while the thread is asked to. Called on the thread."""
        if self in PROCESS.threads.to_park:
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

    def _park(self) -> None:
        self._is_parked = True
        self._parked.set()

    def _wait_for_go(self) -> None:
        while True:
            while self in PROCESS.threads.to_park:
                self._go.wait(SIGNAL_S)  # an interrupted release may have woken nobody
            # Each side first says what it does, and then reads what the other says: no lock is
            # needed, which a signal handler's exception could leave locked.
            self._is_parked = False
            if self not in PROCESS.threads.to_park:
                return
            self._park()

    def _await_parked(self, deadline: float) -> None:
        while not self._is_parked and (left_s := deadline - time.monotonic()) > 0:
            self._parked.wait(left_s)


@contextlib.contextmanager
def all_parked() -> Iterator[None]:
    """Park our threads for a block that forks. Waits up to five seconds for them."""
    threads, ident = PROCESS.threads, threading.get_ident()
    with threads.lock:
        was_unwilling, parked_before = ident in threads.unwilling, threads.to_park
        parked = {one for one in threads.live if one.parks_for_forks and one._thread.ident != ident}
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
                thread._go.set()


def may_wait() -> bool:
    """Return whether the calling thread may wait for one of our threads to end.

    It may not if it is one itself, or if it is forking: the other may be parked for that fork.
    """
    return threading.get_ident() not in PROCESS.threads.unwilling


def _await_all(threads: set[BackgroundThread], *, is_exit: bool = False) -> None:
    for thread in threads:
        thread.wake()
    start = time.monotonic()
    for thread in threads:
        thread._await_parked(start + (min(_PARK_S, thread.exit_s) if is_exit else _PARK_S))


def _park_for_good() -> None:
    with PROCESS.threads.lock:
        PROCESS.threads.to_park = PROCESS.threads.live.copy()
        _await_all(PROCESS.threads.to_park, is_exit=True)
    PROCESS.threads.is_exiting = True
