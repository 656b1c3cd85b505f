"""Ends workers that take longer than ``sample_timeout`` for a sample. Runs while the engine waits.

While the engine has batches to deliver, the user's loop is not held up by the slow sample, and the
sample's worker may go on.
"""

from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.engine.scheduler import Scheduler
from shmloader.engine.wording import describe_hang, describe_hung_work, describe_ticket
from shmloader.engine.workers import Worker
from shmloader.pools import ReplaceablePool
from shmloader.pools.status_page import AtWork, Phase


class HangWatch:
    """Looks at what the workers do, whenever the engine waits.

    Args:
        pool: The workers.
        scheduler: Their tickets.
        timeout_s: The longest time for one sample, in seconds.
    """

    def __init__(self, pool: ReplaceablePool, scheduler: Scheduler, timeout_s: float) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._timeout_s = timeout_s

    def look(self) -> float:
        """End the workers whose sample takes too long.

        Returns:
            In how many seconds to look again; 0 if a worker was ended, so that the engine replaces
            it instead of waiting. (A thread that was left behind sends nothing that would end a
            wait.)
        """
        wait_s = self._timeout_s
        for worker in self._scheduler.workers:
            if worker.is_alive and not worker.hang:
                at_work = self._pool.was_at(worker.worker_id)
                if _is_late(at_work):
                    wait_s = 0.0 if self._end(worker) else wait_s
                elif at_work.sample != NO_SAMPLE:
                    wait_s = min(wait_s, at_work.sample_left_s)
        return wait_s

    def _end(self, worker: Worker) -> bool:
        """End a worker; return False if it has finished its sample meanwhile."""
        worker_id = worker.worker_id
        # Waiting for the worker's stack gives the worker another moment to finish: all workers are
        # late if the whole job was stopped for a while.
        at_work = self._pool.ask(worker_id)
        again = self._pool.was_at(worker_id)
        is_same = (at_work.epoch, at_work.seq, at_work.sample) == (
            again.epoch, again.seq, again.sample,
        )  # fmt: skip
        if not is_same or not _is_late(again):
            return False
        pid = self._pool.pid(worker_id)
        if not self._pool.kill(worker_id, again.seq):
            return False
        scheduler = self._scheduler
        tickets = {ticket.seq: ticket for ticket in scheduler.tickets}
        ticket = tickets.get(again.seq) if again.epoch == scheduler.epoch else None
        batch = "the previous epoch" if ticket is None else describe_ticket(ticket)
        scheduler.sample_timed_out(
            worker_id,
            again.seq,
            again.epoch,
            again.sample,
            describe_hung_work(worker_id, pid, at_work),
            describe_hang(worker_id, pid, self._timeout_s, batch),
        )
        return True


def _is_late(at_work: AtWork) -> bool:
    is_loading = at_work.phase is Phase.LOADING and at_work.sample != NO_SAMPLE
    return is_loading and at_work.sample_left_s <= 0
