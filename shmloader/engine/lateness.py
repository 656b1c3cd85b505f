"""What is raised when workers are late: what each of them is at, with its Python stack."""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from shmloader.engine.scheduler import Scheduler
from shmloader.engine.wording import (
    Numbered,
    describe_late_start,
    describe_timeout,
    describe_work,
)
from shmloader.errors import LoaderTimeoutError
from shmloader.workers.board import AtWork
from shmloader.workers.pool import Pool
from shmloader.workers.thread_task import ThreadTask
from shmloader.workers.threads import ThreadPool

# Time for asking workers what they are at, once a batch is late.
_ASK_S = 1.0


class _Asked(Protocol):
    """What may be asked of workers of either kind; see :class:`Pool`."""

    def pid(self, worker_id: int) -> int | None: ...

    def was_at(self, worker_id: int) -> AtWork: ...

    def ask(self, worker_id: int) -> AtWork: ...


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
    awaited = [ticket for ticket in tickets if ticket.answer is None]
    return _late(timeout_s, pool, awaited, living, scheduler.epoch, scheduler.tickets)


def late_in_threads(
    timeout_s: float, pool: ThreadPool, tasks: Sequence[ThreadTask], epoch: int, *, in_order: bool
) -> LoaderTimeoutError:
    """The same where workers are threads.

    Args:
        timeout_s: The time.
        pool: The threads.
        tasks: Those in flight.
        epoch: Theirs.
        in_order: Whether only the first of them is waited for.
    """
    awaited = [task for task in (tasks[:1] if in_order else tasks) if task.answer is None]
    return _late(timeout_s, pool, awaited, range(pool.worker_count), epoch, tasks)


def late_start(
    timeout_s: float, pool: Pool, scheduler: Scheduler, busy: list[int]
) -> LoaderTimeoutError:
    """The error for workers that have not left the epoch before; ``busy`` are those."""
    work = _ask(pool, busy, scheduler.epoch, scheduler.tickets)
    return LoaderTimeoutError(describe_late_start(timeout_s, work))


def _late(
    timeout_s: float,
    pool: _Asked,
    awaited: Sequence[Numbered],
    worker_ids: Sequence[int],
    epoch: int,
    in_flight: Sequence[Numbered],
) -> LoaderTimeoutError:
    waiting = [
        (ticket, None if (worker_id := ticket.worker_id) is None else pool.pid(worker_id))
        for ticket in awaited
    ]
    # Those that have what is waited for come first.
    first = [ticket.worker_id for ticket in awaited if ticket.worker_id is not None]
    asked = [one for one in dict.fromkeys([*first, *worker_ids]) if one in worker_ids]
    work = _ask(pool, asked, epoch, in_flight)
    return LoaderTimeoutError(describe_timeout(timeout_s, waiting, work))


def _ask(
    pool: _Asked, worker_ids: Iterable[int], epoch: int, in_flight: Sequence[Numbered]
) -> list[str]:
    """What workers are at, in words.

    Where many do not answer, the last of them are not asked for their stacks.
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
