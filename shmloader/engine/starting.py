"""Which workers are still to be started: no more get ready at a time than there are cores for.

An interpreter that is started afresh imports torch and unpickles the dataset, which is seconds of
a core's time. Where all do so at once on fewer cores, the first is ready when all are; the first
batch of eight workers on two cores then comes as late as the eighth. So a worker is started when
another one is ready. Pure: says whom to start, starts nobody.
"""

from collections.abc import Iterable


class Starting:
    """Workers that are not ready yet.

    Attributes:
        waiting: Those that are not started.
    """

    def __init__(self, started: Iterable[int], waiting: Iterable[int], at_once: int) -> None:
        """Take note of who is started.

        Args:
            started: They are getting ready.
            waiting: They are to be started, in this order.
            at_once: How many get ready at a time; at least 1.
        """
        self.waiting: dict[int, None] = dict.fromkeys(waiting)
        self._getting_ready = set(started)
        self._at_once = at_once

    def heard(self, worker_id: int) -> None:
        """It is ready. One that died is so when its replacement is."""
        self._getting_ready.discard(worker_id)

    def next(self) -> int | None:
        """Whom to start now, if anybody."""
        if not self.waiting or len(self._getting_ready) >= self._at_once:
            return None
        return next(iter(self.waiting))

    def begun(self, worker_id: int) -> None:
        """It has been started."""
        del self.waiting[worker_id]
        self._getting_ready.add(worker_id)
