"""An event that one thread waits for, and that any code may set, even a finalizer.

``threading.Event.set`` takes a lock. While a thread holds the lock, the garbage collector may run a
finalizer on that thread. If the finalizer set the event, it would wait for its own thread for ever.
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
