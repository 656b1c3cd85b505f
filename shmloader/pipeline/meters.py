"""Measures the stages of one epoch. Pure: the epoch sets the clock.

A stage counts as ``concurrency`` *workers*, one for each item that may be in work at once, whatever
runs the op. At each moment a worker is in work (its item is in the op, or about to be), behind (its
results wait for those of an earlier item), blocked (its results wait for space in the queue), or
free (it waits for an item). The meters sum up these times over all workers, once for all time and
once for the time in which the consumer waited.

Summing up at each change would cost more than passing the items on. So the state is measured only
before a change that comes at least ``SAMPLE_NS`` after the last measurement, and counts for all the
time since then. If changes are rarer than that, the sums are exact.
"""

from shmloader.insight.histogram import Histogram

#: Changes that come sooner after one another than this are summed up together, in ns.
SAMPLE_NS = 200_000


class Clock:
    """The time of an epoch, in ns: all of it, and the part in which the consumer waited.

    Attributes:
        first_ns: When the epoch began.
        now_ns: The present time.
        waited_ns: How long the consumer has waited so far.
        startup_ns: How long the consumer has waited for the first item; 0 before it has come.
        is_waiting: Whether the consumer waits now.
    """

    __slots__ = ("first_ns", "is_waiting", "now_ns", "startup_ns", "waited_ns")

    def __init__(self, now_ns: int = 0) -> None:
        self.first_ns = self.now_ns = now_ns
        self.waited_ns = self.startup_ns = 0
        self.is_waiting = False


class Meter:
    """Measures one stage, or the sink.

    Attributes:
        concurrency: Number of workers: items that may be in work at once.
        in_count: Items taken in.
        out_count: Results passed on.
        failed_count: Calls that failed.
        left_out_count: Calls without a result.
        calls: Times in the op, one for each call; for the source, one for each item.
        work_ns: Sum of the times in work of these calls: in the op, and before and after it; 0 for
            the source.
        working_ns: Time in work, over all workers.
        blocked_ns: Time blocked.
        behind_ns: Time behind.
        queued_ns: Number of items in the queue before the stage, over time.
        waited_occupied_ns: Time in work or behind while the consumer waited.
    """

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.in_count = self.out_count = self.failed_count = self.left_out_count = 0
        self.calls = Histogram()
        self.work_ns = 0
        self.working_ns = self.blocked_ns = self.behind_ns = self.queued_ns = 0
        self.waited_occupied_ns = 0

    def add(self, working: int, blocked: int, behind: int, elapsed_ns: int, waited_ns: int) -> None:
        """Add a period in which the stage was in one state.

        Args:
            working: Number of workers in work.
            blocked: Number of workers blocked.
            behind: Number of workers behind.
            elapsed_ns: Length of the period.
            waited_ns: For how much of the period the consumer waited.
        """
        self.working_ns += working * elapsed_ns
        self.blocked_ns += blocked * elapsed_ns
        self.behind_ns += behind * elapsed_ns
        self.waited_occupied_ns += (working + behind) * waited_ns
