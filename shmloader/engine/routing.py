"""Which worker gets the next ticket. Pure.

Both rules are torch's. In order, ticket i goes to worker i mod n, since a worker's random
streams make the batch's content depend on it; a worker whose stream has ended is passed over.
In any order, the next worker round the circle that has not yet its share of the window.
"""

from collections.abc import Sequence


class Router:
    """Walks round the workers, from ``first`` on in the first epoch."""

    def __init__(self, worker_count: int, window: int, *, in_order: bool, first: int = 0) -> None:
        self._worker_count = worker_count
        self._window = window
        self._in_order = in_order
        self._next = first

    def restart(self) -> None:
        """Begin at worker 0 again, as each epoch does."""
        self._next = 0

    def pick(self, active: Sequence[bool], in_flight: Sequence[int]) -> int | None:
        """The worker for the next ticket.

        Args:
            active: For each worker, whether it takes tickets.
            in_flight: For each worker, the tickets that it has.

        Returns:
            Its number; None if no worker takes tickets.
        """
        worker_id = self._next
        fallback: int | None = None
        share = self._window // max(1, sum(active)) if not self._in_order else 0
        for _ in range(self._worker_count):
            if active[worker_id]:
                if self._in_order or in_flight[worker_id] < share:
                    self._next = (worker_id + 1) % self._worker_count
                    return worker_id
                if fallback is None or in_flight[worker_id] < in_flight[fallback]:
                    fallback = worker_id
            worker_id = (worker_id + 1) % self._worker_count
        if fallback is not None:
            self._next = (fallback + 1) % self._worker_count
        return fallback
