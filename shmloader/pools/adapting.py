"""Decides how many workers there should be (``num_workers="auto"``). Pure.

In each period it may try one worker more or one fewer. An additional worker stays if batches come
faster. A removed worker stays away if the consumer then does not wait much. After a trial that did
not help, it pauses for twice as many periods as after the previous failed trial.
"""

# A period lasts at least this long, and has at least this many batches for each worker.
PERIOD_NS = 500_000_000
_BATCHES_EACH = 4
# If the consumer waits for more than this share of its time, another worker may help.
_WAITS = 0.1
# If it waits for no more than this share, a worker can go if the others can do its work.
_NEVER_WAITS = 0.02
# The others can do it if all the work would keep them busy for less than this share of their time.
_BUSY = 0.7
# The factor by which the rate has to grow for an additional worker to stay.
_GAIN = 1.05
# The longest pause, in periods.
_LONGEST_PAUSE = 64


class AutoCount(int):
    """The present number of workers of a loader with ``num_workers="auto"``.

    Frameworks make a new loader from the attributes of another one. With this number as its
    ``num_workers``, the new loader is "auto" as well.
    """


class Adapter:
    """Chooses the worker count, at most ``most``, from the times that the consumer sees.

    Attributes:
        count: How many workers there should be.
    """

    def __init__(self, count: int, most: int) -> None:
        self.count, self.most = count, most
        # The number of workers, and of batches per nanosecond, before a change that is tried.
        self._trial: tuple[int, float] | None = None
        self._pause, self._next_pause = 0, 1
        self.begin()

    def begin(self) -> None:
        """Begin an epoch. Its first period, in which workers start, does not count."""
        self._is_settling = True
        self._start_ns: int | None = None
        self._batches = self._busy_ns = self._wait_ns = 0

    def count_batch(self, now_ns: int, wait_ns: int, busy_ns: int) -> int:
        """Count a batch that the consumer has received. Returns the worker count from now on.

        Args:
            now_ns: The present time by ``time.monotonic_ns()``.
            wait_ns: How long the consumer waited for the batch.
            busy_ns: How long a worker was busy with the batch.
        """
        if self._start_ns is None:
            self._start_ns = now_ns
            return self.count
        self._batches += 1
        self._wait_ns += wait_ns
        self._busy_ns += busy_ns
        elapsed_ns = now_ns - self._start_ns
        if elapsed_ns >= PERIOD_NS and self._batches >= _BATCHES_EACH * self.count:
            if self._is_settling:
                self._is_settling = False
            else:
                self._decide(elapsed_ns)
            self._start_ns = now_ns
            self._batches = self._busy_ns = self._wait_ns = 0
        return self.count

    def _decide(self, elapsed_ns: int) -> None:
        before, rate = self.count, self._batches / elapsed_ns
        wait_share = self._wait_ns / elapsed_ns
        busy_workers = self._busy_ns / elapsed_ns
        trial, self._trial = self._trial, None
        count_then, rate_then = trial or (0, 0.0)
        has_helped = rate > _GAIN * rate_then if before > count_then else wait_share < _WAITS / 2
        if trial is not None and not has_helped:
            self._pause, self.count = self._next_pause, count_then
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        elif self._pause:
            self._pause -= 1
        else:
            if trial is not None:
                self._next_pause = 1
            if wait_share > _WAITS and before < self.most:
                self.count += 1
            elif wait_share < _NEVER_WAITS and before > 1 and busy_workers < _BUSY * (before - 1):
                self.count -= 1
            if self.count != before:
                self._trial = before, rate
        self._is_settling = self.count != before
