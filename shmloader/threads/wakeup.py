"""Events that take no lock of Python code.

The ``Event`` and ``Condition`` of :mod:`threading` take one, in Python code, where two things may
happen while it is held. The garbage collector may run a finalizer on that thread, which waits for
its own thread for ever if it sets the event. And a signal handler may raise just after the lock was
acquired, so that it stays locked: the next ``set()`` and the next ``wait()`` never return.
"""

import math
import threading
import time

from shmloader.interruptions import is_interruption

#: Longest sleep in seconds before signal handlers can run. Python runs handlers between two of its
#: instructions. A Ctrl-C that arrives after the last instruction and before the system call does
#: not interrupt the call, so its handler would run only after the wait.
SIGNAL_S = 0.5


class Wakeup:
    """An event for one waiting thread. :meth:`wait` clears it."""

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        if not self._unset.locked():
            return  # set already; an exception for each call would cost more
        try:
            self._unset.release()
        except RuntimeError as error:  # another thread was faster
            if is_interruption(error):
                raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the event is set, at most ``timeout_s`` seconds, and clear it."""
        left_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        while not self._unset.acquire(timeout=max(0.0, min(left_s, SIGNAL_S))):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return


class Latch:
    """An event that stays set. Any number of threads may wait for it.

    Attributes:
        is_set: Whether it was set.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._wakeup = Wakeup()

    def set(self) -> None:
        """Set the event for good."""
        self.is_set = True
        self._wakeup.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the event is set, at most ``timeout_s`` seconds. Returns whether it is set."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # The flag is read again from time to time: of several waiting threads, one is woken.
        while not self.is_set and (left_s := deadline - time.monotonic()) > 0:
            self._wakeup.wait(min(left_s, SIGNAL_S))
        return self.is_set
