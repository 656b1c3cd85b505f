"""What is said of tickets and workers, and what happens when workers are late.

``sample_timeout`` ends a worker whose sample hangs, and ``timeout`` says what all workers do. Both
look only while the engine waits. While it has batches to deliver, the user's loop is not held up by
a slow sample, and the sample's worker may go on.

Where torch has a text, ours begins with it, since people search for it.
"""

import itertools
import re
import signal
import time

from shmloader.batch.failures import describe_indices
from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.engine.records import Worker
from shmloader.engine.scheduler import Scheduler, Ticket
from shmloader.errors import LoaderTimeoutError
from shmloader.grammar import describe_worker
from shmloader.pools import Pool
from shmloader.pools.answers import Death
from shmloader.pools.status_page import AtWork, Phase

# The most time spent on asking workers for their stacks, once a batch is late.
_ASK_S = 1.0

_NEW_WORKERS = "The workers were ended; iter() starts new ones."
_NOTHING_IS_LOST = (
    "No batch is lost. A for loop ends here; call next() on the same iterator to go on waiting, or "
    "raise timeout=. With worker processes, sample_timeout= replaces one whose sample hangs."
)

_SIGBUS_HINT = (
    "It is possible that dataloader's workers are out of shared memory. "
    "Please try to raise your shared memory limit. "
)

_SIGKILL_HINT = (
    " If nobody sent the signal, the kernel's out-of-memory killer did: lower num_workers or "
    "prefetch_factor, or allow more memory."
)

# The most calls of a stack that a text shows.
_FRAMES_SHOWN = 12
# The frames from which a worker calls the user's code.
_OURS = re.compile(r"/shmloader/(batch/|pools/(answers|batch_server|worker_dataset|thread)\.py)")


def _capitalized(worker_id: int, pid: int | None) -> str:
    return f"W{describe_worker(worker_id, pid)[1:]}"


def describe_ticket(ticket: Ticket) -> str:
    """Name a ticket by its number and indices."""
    return f"batch {ticket.seq} ({describe_indices(ticket.indices)})"


def describe_loading(ticket: Ticket, pid: int | None) -> str:
    """Return an exception's note: which worker raised it, and on which batch."""
    who = _capitalized(max(ticket.worker_id, 0), pid)
    return f"{who} was loading {describe_ticket(ticket)}."


def describe_end(death: Death) -> str:
    """Say how a worker ended, in torch's words."""
    if death.reason:
        return f"DataLoader worker exited unexpectedly: {death.reason}. "
    text, code = f"DataLoader worker (pid {death.pid})", death.exit_code
    if code is None:
        return f"{text} exited unexpectedly. "
    if code < 0:
        text += f" is killed by signal: {signal.strsignal(-code) or f'signal {-code}'}. "
        return text + _SIGBUS_HINT if -code == signal.SIGBUS else text
    return (
        f"{text} exited unexpectedly with exit code {code}. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace. "
    )


def describe_death(
    worker_id: int, death: Death, ticket: Ticket | None, *, restart_limit: int = 0
) -> str:
    """Say how a worker ended, what it was loading, and why it was not replaced."""
    if death.because:
        return death.because
    work = "had no batch to load" if ticket is None else f"was loading {describe_ticket(ticket)}"
    text = f"{describe_end(death)}Worker {worker_id} {work}."
    if death.exit_code == -signal.SIGKILL:
        text += _SIGKILL_HINT
    if restart_limit and not death.is_final:
        text += f" No restart is left in this epoch (worker_restarts={restart_limit})."
    return text


def _with_stack(text: str, at_work: AtWork) -> str:
    """Add the calls of a worker's stack that are in the user's code, or called by it."""
    frames = itertools.takewhile(lambda frame: not _OURS.search(frame), at_work.stack.splitlines())
    shown = list(itertools.islice(frames, _FRAMES_SHOWN))
    return "\n".join([f"{text}, the innermost call first:", *shown]) if shown else f"{text}."


def describe_restart(worker: Worker) -> str:
    """Return the log message for a worker that was LOST, and is replaced."""
    death, again = worker.death, ", ".join(map(str, worker.unfinished)) or "none"
    why = worker.hang or (f"{death.because} " if death.because else describe_end(death))
    return f"{why}Worker {worker.worker_id} is replaced. Batches loaded again: {again}."


_AT_WORK = {
    Phase.STARTING: "starting",
    Phase.GETTING_READY: "preparing (dataset, worker_init_fn)",
    Phase.IDLE: "idle",
    Phase.LOADING: "loading {}",
    Phase.LEAVING_EPOCH: "finishing the previous epoch (iter(dataset))",
}


def describe_work(worker_id: int, pid: int | None, at_work: AtWork, ticket: Ticket | None) -> str:
    """Say what a worker is doing, by its status page, with the frames of its stack."""
    batch = describe_ticket(ticket) if ticket is not None else f"batch {at_work.seq}"
    work = _AT_WORK[at_work.phase].format(batch)
    text = f"{_capitalized(worker_id, pid)} has been {work} for {at_work.elapsed_s:.1f} s"
    if at_work.is_stopped:
        return f"{text}; the process is stopped (SIGSTOP)."
    return f"{text}." if at_work.phase is Phase.IDLE else _with_stack(text, at_work)


def late_batch(
    timeout_s: float, pool: Pool, scheduler: Scheduler, *, is_start: bool = False
) -> LoaderTimeoutError:
    """Return the error for a batch that has not come in time, with what each worker is doing.

    Called from any thread. With ``is_start`` the workers have not left the previous epoch in time.
    """
    until = time.monotonic() + _ASK_S
    workers = [worker for worker in scheduler.workers if worker.is_alive]
    awaited = [ticket for ticket in scheduler.tickets if ticket.is_awaited]
    if is_start:
        workers = [worker for worker in workers if not worker.has_left_epoch]
        text = f"its workers to finish the previous epoch. {_NEW_WORKERS}"
    elif scheduler.in_order and awaited:
        text = f"{describe_ticket(awaited[0])}. {_NOTHING_IS_LOST}"
    else:
        text = f"any of {len(awaited)} batches. {_NOTHING_IS_LOST}"
    lines = [f"DataLoader timed out after {timeout_s:g} seconds, waiting for {text}"]
    for worker_id in (worker.worker_id for worker in workers):
        at_work = pool.was_at(worker_id, with_stack=time.monotonic() < until)
        ticket = scheduler.find(at_work.seq, at_work.epoch)
        lines.append(describe_work(worker_id, pool.pid(worker_id), at_work, ticket))
    return LoaderTimeoutError("\n".join(lines))


def end_hanging(pool: Pool, scheduler: Scheduler, timeout_s: float) -> float:
    """End the workers whose sample takes longer than ``sample_timeout``.

    Returns in how many seconds to look again.
    """
    wait_s = timeout_s
    for worker in scheduler.workers:
        if worker.is_alive and not worker.hang:
            at_work = pool.was_at(worker.worker_id)
            if at_work.is_late:
                _end(pool, scheduler, worker, timeout_s)
            elif at_work.sample != NO_SAMPLE:
                wait_s = min(wait_s, at_work.sample_left_s)
    return wait_s


def _end(pool: Pool, scheduler: Scheduler, worker: Worker, timeout_s: float) -> None:
    """End a worker, unless it has finished its sample meanwhile."""
    worker_id = worker.worker_id
    # Waiting for the worker's stack gives the worker another moment to finish: all workers are
    # late if the whole job was stopped for a while.
    asked, now = pool.was_at(worker_id, with_stack=True), pool.was_at(worker_id)
    is_same = (asked.epoch, asked.seq, asked.sample) == (now.epoch, now.seq, now.sample)
    if not (is_same and now.is_late):
        return
    pool.kill(worker_id)
    ticket, who = scheduler.find(now.seq, now.epoch), _capitalized(worker_id, pool.pid(worker_id))
    batch = "the previous epoch" if ticket is None else describe_ticket(ticket)
    work = _with_stack(f"{who} was killed in it", asked)
    hang = f"{who} took longer than {timeout_s:g} s (sample_timeout) for a sample of {batch}. "
    scheduler.sample_timed_out(worker_id, ticket, now.sample, work, hang)
