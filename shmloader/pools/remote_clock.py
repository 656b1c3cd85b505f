"""Relates the clock of another machine to this machine's, by the times of calls to that machine.

A call begins there after it was sent here, and its result is received here after it ended there::

    here      sent ───────────────────────────────────────── received
    there             began ──────────────────── ended

So this machine's clock is ahead by at least ``sent - began`` and at most ``received - ended``. The
fastest transfer there and the fastest transfer back so far give the narrowest bounds. The middle
between the bounds is used, as NTP does, which assumes that these two transfers took equally long.
So the time that the network always takes is not counted as work. The error is half of the
difference between the two transfers. A call that had to wait behind others on its way does not
widen the bounds.
"""

# Clocks of two machines drift apart, so old bounds are widened by this many millionths of the time
# since then. That is more than the error of a quartz clock.
_DRIFT_PPM = 200


class RemoteClock:
    """Estimates by how much this machine's monotonic clock is ahead of another machine's."""

    def __init__(self) -> None:
        self._least_ns: int | None = None
        self._most_ns = 0
        self._noted_ns = 0

    def note(self, sent_ns: int, began_ns: int, ended_ns: int, received_ns: int) -> None:
        """Note the times of a call.

        Args:
            sent_ns: When the call was sent, by this machine's clock.
            began_ns: When the call began, by the other machine's clock.
            ended_ns: When the call ended, by the other machine's clock.
            received_ns: When its result was received, by this machine's clock.
        """
        least_ns, most_ns = sent_ns - began_ns, received_ns - ended_ns
        if self._least_ns is not None:
            drift_ns = max(0, received_ns - self._noted_ns) * _DRIFT_PPM // 1_000_000
            at_least_ns = max(least_ns, self._least_ns - drift_ns)
            at_most_ns = min(most_ns, self._most_ns + drift_ns)
            if at_least_ns <= at_most_ns:
                least_ns, most_ns = at_least_ns, at_most_ns
            # Otherwise a clock has jumped, as when a virtual machine was suspended.
        self._least_ns, self._most_ns, self._noted_ns = least_ns, most_ns, received_ns

    @property
    def ahead_ns(self) -> int:
        """What to add to a time of the other clock to get this machine's time."""
        return 0 if self._least_ns is None else (self._least_ns + self._most_ns) // 2
