"""Reports to the owner of a host's workers how long this rank waits (``num_workers="auto"``)."""

import time
from collections.abc import Callable

from shmloader.pools.host_messages import Demand, EpochBegun

#: How often an iterator reports. The owner's decision takes reports of at least half a second.
REPORT_NS = 100_000_000


class DemandReporter:
    """Adds up the times of an iterator's batches, and reports them. Used on the user's thread.

    Args:
        report: Sends a message to the owner without blocking. Returns whether it was sent.
    """

    def __init__(self, report: Callable[[tuple[object, ...]], bool]) -> None:
        self._report = report
        self._clear(0)

    def begin(self) -> None:
        """Begin an epoch."""
        self._report(EpochBegun())
        self._clear(time.monotonic_ns())

    def _clear(self, now_ns: int) -> None:
        self._reported_ns = now_ns
        self._batches = self._wait_ns = self._busy_ns = 0

    def note(self, now_ns: int, wait_ns: int, busy_ns: int) -> None:
        """Note that the user took a batch; see :meth:`shmloader.pools.adapting.Adapter.note`."""
        self._batches += 1
        self._wait_ns += wait_ns
        self._busy_ns += busy_ns
        if now_ns - self._reported_ns >= REPORT_NS and self._report(
            Demand(self._batches, self._wait_ns, self._busy_ns)
        ):
            self._clear(now_ns)
