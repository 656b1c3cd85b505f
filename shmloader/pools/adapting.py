"""Decides how many workers there should be (``num_workers="auto"``). Pure.

In each period it may try one worker more, which stays if batches come faster. The first trial of an
epoch that does not help is its last one. The worker works on until the epoch's end, and the next
epoch begins without it, unless workers persist: then trials begin with those that there are.
"""

# A period lasts at least this long, and has at least this many batches for each worker.
PERIOD_NS = 500_000_000
_BATCHES_EACH = 4
# If the consumer waits for more than this share of its time, another worker may help.
_WAITS = 0.1
# The factor by which the rate has to grow for an additional worker to stay.
_GAIN = 1.05


class Adapter:
    """Chooses the worker count, at most ``most``, from the times that the consumer sees.

    Attributes:
        count: How many workers there should be.
    """

    def __init__(self, count: int, most: int) -> None:
        self.count, self.most = count, most
        # The number of batches per nanosecond before the present trial; 0 if there is none.
        self._rate_before = 0.0
        self.begin(count)

    def begin(self, present: int) -> None:
        """Begin an epoch, with so many workers that are there.

        Its first period, in which workers start, does not count.
        """
        self.count = max(self.count, present)
        self._is_settling, self._has_failed = True, False
        self._start_ns: int | None = None
        self._batches = self._wait_ns = 0

    def count_batch(self, now_ns: int, wait_ns: int) -> int:
        """Count a batch that the consumer has received. Returns the worker count from now on.

        Args:
            now_ns: The present time by ``time.monotonic_ns()``.
            wait_ns: How long the consumer waited for the batch.
        """
        if self._start_ns is None:
            self._start_ns = now_ns
            return self.count
        self._batches += 1
        self._wait_ns += wait_ns
        elapsed_ns = now_ns - self._start_ns
        if elapsed_ns >= PERIOD_NS and self._batches >= _BATCHES_EACH * self.count:
            is_settling, self._is_settling = self._is_settling, False
            if not is_settling and not self._has_failed:
                self._decide(elapsed_ns)
            self._start_ns = now_ns
            self._batches = self._wait_ns = 0
        return self.count

    def _decide(self, elapsed_ns: int) -> None:
        rate, rate_before = self._batches / elapsed_ns, self._rate_before
        self._rate_before = 0.0
        if rate_before and rate < _GAIN * rate_before:
            self.count -= 1
            self._has_failed = True
        elif self._wait_ns > _WAITS * elapsed_ns and self.count < self.most:
            self.count += 1
            self._rate_before, self._is_settling = rate, True
