"""Events that take no lock of Python code.

The ``Event`` and ``Condition`` of :mod:`threading` take one, in Python code, where two things may
happen while it is held. The garbage collector may run a finalizer on that thread, which waits for
its own thread for ever if it sets the event. And a signal handler may raise just after the lock was
acquired, so that it stays locked: the next ``set()`` and the next ``wait()`` never return.
"""

import math
import queue
import time

#: Longest sleep in seconds before signal handlers can run. Python runs handlers between two of its
#: instructions. A Ctrl-C that arrives after the last instruction and before the system call does
#: not interrupt the call, so its handler would run only after the wait.
SIGNAL_S = 0.5


class Wakeup:
    """An event for one waiting thread. :meth:`wait` clears it."""

    def __init__(self) -> None:
        # Its methods are written in C, and take no lock that a finalizer could wait for.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        if self._tokens.empty():
            self._tokens.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the event is set, at most ``timeout_s`` seconds, and clear it.

        If two threads set it at the same moment, the next call may return at once as well.
        """
        left_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        while left_s >= 0:
            try:
                self._tokens.get(timeout=min(left_s, SIGNAL_S))
            except queue.Empty:
                left_s = deadline - time.monotonic()
            else:
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
