"""Relates the clock of another machine to this one's, by the calls that go there and back.

A call begins there after it was sent here, and its result is here after it ended there::

    here      sent ───────────────────────────────────────── received
    there             began ──────────────────── ended

So what this machine's clock is ahead by lies between ``sent - began`` and ``received - ended``. The
fastest ways there and back so far are the narrowest bounds, and the middle between them is taken,
as by NTP: the two fastest ways are taken to be equally long. A time that the network always takes
is thereby told from the time of the work. What the two differ by, half of that is the error; a call
that had to wait on its way, behind others, counts only if none was faster.
"""

# Clocks of two machines drift apart. So old bounds are trusted less: by so many millionths of the
# time since then, more than a quartz is wrong by.
_DRIFT_PPM = 200


class RemoteClock:
    """By how much this machine's monotonic clock is ahead of another one's."""

    def __init__(self) -> None:
        self._least_ns: int | None = None
        self._most_ns = 0
        self._noted_ns = 0

    def note(self, sent_ns: int, began_ns: int, ended_ns: int, received_ns: int) -> None:
        """Note the times of a call.

        Args:
            sent_ns: When it was sent, by this machine's clock.
            began_ns: When it began, by the other one's.
            ended_ns: When it ended, by the other one's.
            received_ns: When its result was here, by this machine's.
        """
        least_ns, most_ns = sent_ns - began_ns, received_ns - ended_ns
        if self._least_ns is not None:
            drift_ns = max(0, received_ns - self._noted_ns) * _DRIFT_PPM // 1_000_000
            at_least_ns = max(least_ns, self._least_ns - drift_ns)
            at_most_ns = min(most_ns, self._most_ns + drift_ns)
            if at_least_ns <= at_most_ns:
                least_ns, most_ns = at_least_ns, at_most_ns
            # Else a clock has jumped, as in a virtual machine that was suspended.
        self._least_ns, self._most_ns, self._noted_ns = least_ns, most_ns, received_ns

    @property
    def ahead_ns(self) -> int:
        """What to add to a time of the other clock to get this machine's time."""
        return 0 if self._least_ns is None else (self._least_ns + self._most_ns) // 2
