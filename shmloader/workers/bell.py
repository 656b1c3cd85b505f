"""One thread waits, others ring.

Holds no lock of Python's own while it is rung, since the garbage collector may have it rung
anywhere.
"""

import math
import threading
import time

from shmloader.interruptions import is_interruption

#: Seconds that a wait sleeps at most before it looks for signals. Python's handlers run between
#: two instructions of Python: a Ctrl-C that comes after the last one and before the system call
#: interrupts nothing, and would be heard only when the wait is over.
SIGNAL_S = 0.5


class Bell:
    """One thread waits, others ring. Rung before, it need not wait."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Have the one that waits go on; from any thread."""
        try:
            self._silence.release()
        except RuntimeError as error:  # it rings already
            if is_interruption(error):
                raise

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has rung, or for a time."""
        left_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        while not self._silence.acquire(timeout=max(0.0, min(left_s, SIGNAL_S))):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
