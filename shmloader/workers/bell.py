"""One thread waits, others ring.

Holds no lock of Python's own while it is rung, since the garbage collector may have it rung
anywhere.
"""

import threading


class Bell:
    """One thread waits, others ring. Rung before, it need not wait."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Have the one that waits go on; from any thread."""
        try:  # noqa: SIM105 - once or twice a batch
            self._silence.release()
        except RuntimeError:
            pass  # it rings already

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has rung, or for a time."""
        if timeout_s is None:
            self._silence.acquire()
        else:
            self._silence.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
