"""Chooses the worker that gets the next ticket. Pure.

:class:`Router` follows torch's two rules. It is used where a batch's content depends on its worker:
on the worker's random number generators, or on its stream of an iterable dataset. With
``in_order``, ticket i goes to worker i mod n, and workers whose streams have ended are skipped.
Without it, the ticket goes to the next worker in turn that has less than its share of the window.

With dynamic dispatch a ticket waits until a worker has room for it (:func:`pick_idle`). A worker
has room for one task: a second would be stuck behind a slow one while others are idle. While
batches are short, so that the round trip to the main process matters, it has room for two
(:class:`Pace`). (An alternative was tried, in which workers request the next task shortly before
they finish one. In five interleaved rounds, no figure of the benchmark's rows A, D, E and I changed
beyond the spread.)
"""

from collections.abc import Iterable, Sequence

from shmloader.engine.workers import Worker

# With one task, a worker is idle for some 0.1 ms after each batch; with two, the second may be
# stuck behind a slow one. Simulated with 1 % of samples 50 times slower, 16 samples in a batch,
# 2 workers and 4 tickets, an epoch takes this multiple of the ideal time: for batches of 1 ms, 1.10
# with one task and 1.13 with two; for batches of 3 ms, 1.06 and 1.12. If all samples take the same
# time: 1.10 and 1.00 for batches of 1 ms, 1.03 and 1.00 for batches of 3 ms.
_SHORT_NS = 2_000_000
# The weight of the newest batch in the running mean.
_WEIGHT = 1 / 16


# More tasks than any worker has.
_MANY = 1 << 62


def pick_idle(
    workers: Iterable[Worker], limit: int, loads: Sequence[int] | None = None
) -> Worker | None:
    """Return the worker for the oldest waiting ticket, with dynamic dispatch.

    Args:
        workers: All workers, those that are preferred first.
        limit: The most tasks that a worker may have from this engine.
        loads: How many tasks each worker has from other engines, by worker number; None if that is
            not known, or if there are no other engines.

    Returns:
        The first worker with the fewest tasks; None if no worker has room.
    """
    found = None
    if loads is None:
        fewest = limit
        for worker in workers:
            count = worker.in_flight
            if count < fewest and worker.takes_tasks:
                found, fewest = worker, count
        return found
    fewest = _MANY
    for worker in workers:
        count = worker.in_flight
        if count < limit and worker.takes_tasks:
            count += loads[worker.worker_id]
            if count < fewest:
                found, fewest = worker, count
    return found


class Pace:
    """The running mean of the time for a batch, which sets the tasks per worker."""

    def __init__(self) -> None:
        self._mean_ns: float | None = None

    def note(self, elapsed_ns: int) -> int:
        """Note how long a worker took for a batch, including the time between two batches.

        Returns:
            The most tasks that a worker should hold: 1, or 2 while batches are short.
        """
        mean_ns = self._mean_ns
        mean_ns = elapsed_ns if mean_ns is None else mean_ns + _WEIGHT * (elapsed_ns - mean_ns)
        self._mean_ns = mean_ns
        return 2 if mean_ns < _SHORT_NS else 1
