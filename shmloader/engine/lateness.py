"""Builds the errors for late workers: what each of them is doing, with its Python stack."""

import time
from collections.abc import Iterable, Sequence

from shmloader.engine.scheduler import UNASSIGNED, Scheduler, Ticket
from shmloader.engine.wording import describe_late_start, describe_timeout, describe_work
from shmloader.errors import LoaderTimeoutError
from shmloader.pools import Pool
from shmloader.pools.status_page import Phase

# The most time spent on asking workers for their stacks, once a batch is late.
_ASK_S = 1.0


def late_batch(
    timeout_s: float, pool: Pool, scheduler: Scheduler, living: list[int]
) -> LoaderTimeoutError:
    """Return the error for a batch that has not come in time. Called from any thread.

    Args:
        timeout_s: The timeout in seconds.
        pool: The workers.
        scheduler: Their tickets.
        living: Numbers of the workers that are alive. Dead workers are not asked.
    """
    tickets = scheduler.tickets
    if scheduler.delivers_in_order:
        tickets = [ticket for ticket in tickets if not ticket.is_dropped][:1]
    awaited = [ticket for ticket in tickets if ticket.answer is None]
    return _late(timeout_s, pool, awaited, living, scheduler.epoch, scheduler.tickets)


def late_start(
    timeout_s: float, pool: Pool, scheduler: Scheduler, busy: list[int]
) -> LoaderTimeoutError:
    """Return the error for the ``busy`` workers, which have not left the previous epoch."""
    work = _ask(pool, busy, scheduler.epoch, scheduler.tickets)
    return LoaderTimeoutError(describe_late_start(timeout_s, work))


def _late(
    timeout_s: float,
    pool: Pool,
    awaited: Sequence[Ticket],
    worker_ids: Sequence[int],
    epoch: int,
    in_flight: Sequence[Ticket],
) -> LoaderTimeoutError:
    takers: dict[int, int] = {}
    if pool.has_queue:  # only the worker knows which ticket it took, until it answers
        for worker_id in worker_ids:
            at_work = pool.was_at(worker_id)
            if at_work.phase is Phase.LOADING and at_work.epoch == epoch:
                takers[at_work.seq] = worker_id
    holders = [
        takers.get(ticket.seq) if ticket.worker_id == UNASSIGNED else ticket.worker_id
        for ticket in awaited
    ]
    waiting = [
        (ticket, worker_id, None if worker_id is None else pool.pid(worker_id))
        for ticket, worker_id in zip(awaited, holders, strict=True)
    ]
    # Workers that have an awaited ticket come first.
    first = [one for one in holders if one is not None]
    asked = [one for one in dict.fromkeys([*first, *worker_ids]) if one in worker_ids]
    work = _ask(pool, asked, epoch, in_flight)
    return LoaderTimeoutError(describe_timeout(timeout_s, waiting, work))


def _ask(
    pool: Pool, worker_ids: Iterable[int], epoch: int, in_flight: Sequence[Ticket]
) -> list[str]:
    """Describe what workers are doing.

    If many do not answer, the last of them are not asked for their stacks.
    """
    until = time.monotonic() + _ASK_S
    tickets = {ticket.seq: ticket for ticket in in_flight}
    texts = []
    for worker_id in worker_ids:
        look = pool.ask if time.monotonic() < until else pool.was_at
        pid, at_work = pool.pid(worker_id), look(worker_id)
        ticket = tickets.get(at_work.seq) if at_work.epoch == epoch else None
        texts.append(describe_work(worker_id, pid, at_work, ticket))
    return texts
