"""Which worker gets the next ticket. Pure.

:class:`Router` has torch's two rules, where a batch's content depends on its worker, by that one's
random streams or by its stream of an iterable dataset. In order, ticket i goes to worker i mod n;
a worker whose stream has ended is passed over. In any order, the next worker round the circle that
has not yet its share of the window.

Where any worker will do, a ticket waits until one has room for it (:func:`pick_idle`). A worker has
room for one task: a second would be stuck behind a slow one while others are idle. When it is about
to be done it asks for the next one, and has room for two until it is. While batches are short, so
that asking would take too long, it has room for two all the time (:class:`Pace`).
"""

from collections.abc import Container, Iterable, Sequence

# With one task, a worker is idle for some 0.1 ms after each batch; with two, one of them may be
# stuck behind a slow one. Simulated, with 1 % of samples 50 times slower, 16 in a batch, 2 workers
# and 4 tickets, the epoch to the ideal: 1.10 with one and 1.13 with two for batches of 1 ms; 1.06
# and 1.12 for 3 ms. Where all samples are equal: 1.10 and 1.00 for 1 ms, 1.03 and 1.00 for 3 ms.
_SHORT_S = 2e-3
# Of each batch in the mean.
_WEIGHT = 1 / 16


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


def pick_idle(
    candidates: Iterable[int], in_flight: Sequence[int], limit: int, asking: Container[int]
) -> int | None:
    """The worker for the oldest ticket where any will do.

    Args:
        candidates: Workers that live.
        in_flight: For each worker, the tickets that it has.
        limit: Most tasks of a worker.
        asking: Those that may have two, since they are about to be done with one.

    Returns:
        The one with the fewest tasks, of several the first; None if none has room.
    """
    found, fewest = None, max(limit, 2)
    for worker_id in candidates:
        count = in_flight[worker_id]
        if count < fewest and (count < limit or worker_id in asking):
            found, fewest = worker_id, count
    return found


class Pace:
    """How long recent batches took.

    Attributes:
        task_limit: Most tasks that a worker should hold: 1, or 2 while batches are short.
    """

    def __init__(self) -> None:
        self.task_limit = 1
        self._mean_s: float | None = None

    def note(self, elapsed_s: float) -> None:
        """A worker has taken so long for a batch, and for what lies between two of them."""
        mean_s = self._mean_s
        mean_s = elapsed_s if mean_s is None else mean_s + _WEIGHT * (elapsed_s - mean_s)
        self._mean_s = mean_s
        self.task_limit = 2 if mean_s < _SHORT_S else 1
