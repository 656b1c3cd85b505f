"""What is raised when workers are late: what each of them is at, with its Python stack."""

import time
from collections.abc import Iterable

from shmloader.engine.scheduler import Scheduler
from shmloader.engine.wording import describe_late_start, describe_timeout, describe_work
from shmloader.errors import LoaderTimeoutError
from shmloader.workers.pool import Pool

# Time for asking workers what they are at, once a batch is late.
_ASK_S = 1.0


def late_batch(
    timeout_s: float, pool: Pool, scheduler: Scheduler, living: list[int]
) -> LoaderTimeoutError:
    """The error for a batch that has not come in time. From any thread.

    Args:
        timeout_s: The time.
        pool: The workers.
        scheduler: Their tickets.
        living: Workers that are not dead; such have nothing to say.
    """
    tickets = scheduler.tickets
    if scheduler.delivers_in_order:
        tickets = [ticket for ticket in tickets if not ticket.is_dropped][:1]
    tickets = [ticket for ticket in tickets if ticket.answer is None]
    waiting = [(ticket, pool.pid(ticket.worker_id)) for ticket in tickets]
    # Those that have what is waited for come first.
    first = [ticket.worker_id for ticket in tickets if ticket.worker_id in living]
    work = _ask(pool, scheduler, dict.fromkeys([*first, *living]))
    return LoaderTimeoutError(describe_timeout(timeout_s, waiting, work))


def late_start(
    timeout_s: float, pool: Pool, scheduler: Scheduler, busy: list[int]
) -> LoaderTimeoutError:
    """The error for workers that have not left the epoch before; ``busy`` are those."""
    return LoaderTimeoutError(describe_late_start(timeout_s, _ask(pool, scheduler, busy)))


def _ask(pool: Pool, scheduler: Scheduler, worker_ids: Iterable[int]) -> list[str]:
    """What workers are at, in words.

    Where many do not answer, the last of them are not asked for their stacks.
    """
    until = time.monotonic() + _ASK_S
    tickets = {ticket.seq: ticket for ticket in scheduler.tickets}
    texts = []
    for worker_id in worker_ids:
        look = pool.ask if time.monotonic() < until else pool.was_at
        pid, at_work = pool.pid(worker_id), look(worker_id)
        is_ours = at_work.epoch == scheduler.epoch
        ticket = tickets.get(at_work.seq) if is_ours else None
        texts.append(describe_work(worker_id, pid, at_work, ticket))
    return texts
