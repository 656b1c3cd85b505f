"""What happens when workers are late: ``sample_timeout`` ends them, ``timeout`` says what they do.

Both look only while the engine waits. While it has batches to deliver, the user's loop is not held
up by a slow sample, and the sample's worker may go on.
"""

import time

from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.engine.records import Worker
from shmloader.engine.scheduler import Scheduler
from shmloader.engine.texts import (
    describe_hang,
    describe_hung_work,
    describe_ticket,
    describe_work,
)
from shmloader.errors import LoaderTimeoutError
from shmloader.pools import Pool, ReplaceablePool
from shmloader.pools.status_page import AtWork, Phase

# The most time spent on asking workers for their stacks, once a batch is late.
_ASK_S = 1.0


def late_batch(timeout_s: float, pool: Pool, scheduler: Scheduler) -> LoaderTimeoutError:
    """Return the error for a batch that has not come in time. Called from any thread."""
    tickets = [ticket for ticket in scheduler.tickets if ticket.is_awaited]
    awaited = f"any of {len(tickets)} batches"
    if scheduler.in_order and tickets:
        awaited = describe_ticket(tickets[0])
    text = (
        f"{awaited}. No batch is lost. A for loop ends here; call next() on the same iterator to "
        "go on waiting, or raise timeout=. Without executor=, sample_timeout= replaces a worker "
        "whose sample hangs."
    )
    workers = [worker for worker in scheduler.workers if worker.is_alive]
    return _late(timeout_s, text, pool, scheduler, workers)


def late_start(timeout_s: float, pool: Pool, scheduler: Scheduler) -> LoaderTimeoutError:
    """Return the error for workers that have not left the previous epoch in time."""
    text = (
        "its workers to finish the previous epoch. The workers were ended; iter() starts new ones."
    )
    workers = [one for one in scheduler.workers if one.is_alive and not one.has_left_epoch]
    return _late(timeout_s, text, pool, scheduler, workers)


def _late(
    timeout_s: float, text: str, pool: Pool, scheduler: Scheduler, workers: list[Worker]
) -> LoaderTimeoutError:
    """Return an error that says what was waited for, and what each worker is doing.

    If many workers do not answer, the last of them are not asked for their stacks.
    """
    until = time.monotonic() + _ASK_S
    tickets = {ticket.seq: ticket for ticket in scheduler.tickets}
    lines = [f"DataLoader timed out after {timeout_s:g} seconds, waiting for {text}"]
    for worker in workers:
        look = pool.ask if time.monotonic() < until else pool.was_at
        pid, at_work = pool.pid(worker.worker_id), look(worker.worker_id)
        ticket = tickets.get(at_work.seq) if at_work.epoch == scheduler.epoch else None
        lines.append(describe_work(worker.worker_id, pid, at_work, ticket))
    return LoaderTimeoutError("\n".join(lines))


def end_hanging(pool: ReplaceablePool, scheduler: Scheduler, timeout_s: float) -> float:
    """End the workers whose sample takes longer than ``sample_timeout``.

    Returns:
        In how many seconds to look again; 0 if a worker was ended, so that the engine replaces it
        instead of waiting. (A thread that was left behind sends nothing that would end a wait.)
    """
    wait_s = timeout_s
    for worker in scheduler.workers:
        if worker.is_alive and not worker.hang:
            at_work = pool.was_at(worker.worker_id)
            if _is_late(at_work):
                wait_s = 0.0 if _end(pool, scheduler, worker, timeout_s) else wait_s
            elif at_work.sample != NO_SAMPLE:
                wait_s = min(wait_s, at_work.sample_left_s)
    return wait_s


def _is_late(at_work: AtWork) -> bool:
    is_loading = at_work.phase is Phase.LOADING and at_work.sample != NO_SAMPLE
    return is_loading and at_work.sample_left_s <= 0


def _end(pool: ReplaceablePool, scheduler: Scheduler, worker: Worker, timeout_s: float) -> bool:
    """End a worker; return False if it has finished its sample meanwhile."""
    worker_id = worker.worker_id
    # Waiting for the worker's stack gives the worker another moment to finish: all workers are
    # late if the whole job was stopped for a while.
    asked, now = pool.ask(worker_id), pool.was_at(worker_id)
    sample = (now.epoch, now.seq, now.sample)
    if (asked.epoch, asked.seq, asked.sample) != sample or not _is_late(now):
        return False
    pid = pool.pid(worker_id)
    if not pool.kill(worker_id, now.seq):
        return False
    seqs = {ticket.seq: ticket for ticket in scheduler.tickets}
    ticket = seqs.get(now.seq) if now.epoch == scheduler.epoch else None
    batch = "the previous epoch" if ticket is None else describe_ticket(ticket)
    work = describe_hung_work(worker_id, pid, asked)
    hang = describe_hang(worker_id, pid, timeout_s, batch)
    scheduler.sample_timed_out(worker_id, now.seq, now.epoch, now.sample, work, hang)
    return True
