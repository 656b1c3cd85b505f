"""An event that one thread waits for and that any code may set, the garbage collector's included.

``threading.Event`` takes a lock to be set. The garbage collector may run a finalizer in the middle
of that, and the finalizer would wait for its own thread for ever.
"""

import math
import threading
import time

from shmloader.interruptions import is_interruption

#: Seconds that a wait sleeps at most before it looks for signals. Python's handlers run between
#: two instructions of Python: a Ctrl-C that comes after the last one and before the system call
#: interrupts nothing, and would be heard only when the wait is over.
SIGNAL_S = 0.5


class Wakeup:
    """An event for one waiting thread. A wait clears it."""

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        try:
            self._unset.release()
        except RuntimeError as error:  # it is set already
            if is_interruption(error):
                raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is set, at most ``timeout_s`` seconds. Clears it."""
        left_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        while not self._unset.acquire(timeout=max(0.0, min(left_s, SIGNAL_S))):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
