"""Builds the texts of errors and log messages about tickets and workers.

Where torch has a text, ours begins with it, since people search for it.
"""

import itertools
import signal
from collections.abc import Iterable

from shmloader.batch.checkpoint import Checkpoint
from shmloader.batch.failures import describe_indices
from shmloader.engine.scheduler import Ticket
from shmloader.grammar import UNKNOWN_PID, describe_worker
from shmloader.pools.answers import Death
from shmloader.pools.main_guard import NO_GUARD_EXIT, NO_GUARD_TEXT
from shmloader.pools.status_page import AtWork, Phase

_SIGBUS_HINT = (
    "It is possible that dataloader's workers are out of shared memory. "
    "Please try to raise your shared memory limit. "
)

# The most calls of a stack that a text shows.
_FRAMES_SHOWN = 12


def describe_loading(ticket: Ticket, pid: int | None) -> str:
    """Return an exception's note: which worker raised it, and on which batch."""
    who = describe_worker(max(ticket.worker_id, 0), pid)
    return f"W{who[1:]} was loading {describe_ticket(ticket)}."


def describe_end(death: Death) -> str:
    """Say how a worker ended, in torch's words."""
    if death.reason:
        return f"DataLoader worker exited unexpectedly: {death.reason}. "
    code = death.exit_code
    if code is None:
        return f"DataLoader worker (pid {death.pid}) exited unexpectedly. "
    if code < 0:
        name = signal.strsignal(-code) or f"signal {-code}"
        text = f"DataLoader worker (pid {death.pid}) is killed by signal: {name}. "
        return text + _SIGBUS_HINT if -code == signal.SIGBUS else text
    return (
        f"DataLoader worker (pid {death.pid}) exited unexpectedly with exit code {code}. "
        "Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better "
        "error trace. "
    )


def describe_ticket(ticket: Ticket) -> str:
    """Name a ticket by its number and indices."""
    return f"batch {ticket.seq} ({describe_indices(ticket.indices)})"


def describe_death(worker_id: int, death: Death, ticket: Ticket | None) -> str:
    """Say how a worker ended, what it was loading, and why it was not replaced."""
    work = "had no batch to load" if ticket is None else f"was loading {describe_ticket(ticket)}"
    if death.because:
        return death.because
    if death.exit_code == NO_GUARD_EXIT:
        return f"DataLoader worker (pid {death.pid}) exited unexpectedly. {NO_GUARD_TEXT}"
    text = f"{describe_end(death)}Worker {worker_id} {work}."
    text += _describe_oom(death)
    if death.reason:
        return text + _describe_lost_task(death)
    if not death.restart_limit:
        return text
    if ticket is not None and ticket.kill_count > 1:
        return f"{text} This batch has killed a worker before, and is not loaded a third time."
    return text + _describe_used_up(death)


def _describe_used_up(death: Death) -> str:
    return f" No restart is left in this epoch (worker_restarts={death.restart_limit})."


def _describe_lost_task(death: Death) -> str:
    """Say why a task that the executor has lost was not submitted again."""
    if death.is_final:
        return ""
    if not death.restart_limit:
        return " With worker_restarts=n, up to n lost batches of an epoch are made again."
    return _describe_used_up(death)


def _describe_oom(death: Death) -> str:
    if death.oom_kills <= 0:
        return ""
    processes = f"{death.oom_kills} process{'' if death.oom_kills == 1 else 'es'}"
    return (
        f" The kernel's out-of-memory killer ended {processes} of this control group since the "
        "loader started: lower num_workers or prefetch_factor, or allow more memory."
    )


def describe_hang(worker_id: int, pid: int | None, timeout_s: float, batch: str) -> str:
    """Say that a worker was ended since a sample took too long, for the log."""
    who = describe_worker(worker_id, pid)
    return f"W{who[1:]} took longer than {timeout_s:g} s (sample_timeout) for a sample of {batch}. "


def describe_hung_work(worker_id: int, pid: int | None, at_work: AtWork) -> str:
    """Say in which code a worker was ended since a sample took too long, for the error."""
    who = describe_worker(worker_id, pid)
    end = "left behind" if pid is None else "killed"
    text = f"W{who[1:]} was {end} in it"
    frames = _user_frames(at_work)
    return "\n".join([f"{text}, the innermost call first:", *frames]) if frames else f"{text}."


def describe_restart(
    worker_id: int,
    death: Death | None,
    seqs: list[int],
    checkpoint: Checkpoint | None,
    *,
    is_seeded: bool = False,
    hang: str = "",
) -> str:
    """Return the log message for a worker that was replaced.

    Args:
        worker_id: Number of the worker.
        death: How it ended; None if it is a thread.
        seqs: The batches that it had not finished.
        checkpoint: Where its dataset is resumed, if it is iterable or has a state.
        is_seeded: Whether each sample has random number generators of its own.
        hang: Says that it was ended since a sample took too long; "" if it ended by itself.
    """
    again = ", ".join(map(str, seqs))
    if death is None:
        return f"{hang}A new thread replaces it."
    if death.reason:
        end = describe_end(death)
        return f"{end}Batches are made again: {again}." if seqs else end.rstrip()
    because = f"{death.because} " if death.because else ""
    text = f"{hang or because or describe_end(death)}A new process replaces worker {worker_id}"
    text += f" and loads its unfinished batches again: {again}." if seqs else "."
    if checkpoint is not None and not checkpoint.has_ended:
        text += _describe_resumption(checkpoint)
    if not (is_seeded or (checkpoint is not None and checkpoint.snapshot is None)):
        text += " Its random number generators start over."
    return text + _describe_oom(death)


def _describe_resumption(checkpoint: Checkpoint) -> str:
    given = "the batch that was" if checkpoint.skip == 1 else f"{checkpoint.skip} batches that were"
    if checkpoint.snapshot is None:
        return (
            f" Its dataset is iterated again, skipping {given} already delivered."
            if checkpoint.skip
            else ""
        )
    batches = "its first batch" if checkpoint.at == 1 else f"{checkpoint.at} batches"
    text = f" Its dataset resumes from its state after {batches}"
    return f"{text}, skipping {given} delivered since." if checkpoint.skip else f"{text}."


def describe_lost_state(worker_id: int, nbytes: int, slot_bytes: int) -> str:
    """Return the log message for a dataset's state that did not fit into its slot."""
    return (
        f"The state of worker {worker_id}'s dataset ({nbytes} bytes) does not fit beside its batch "
        f"in a slot of at most {slot_bytes} bytes, and is left out. No batch is lost: a resumed "
        "loader or a replaced worker starts from an older state, or from the dataset's beginning, "
        "and skips the batches that were delivered since. Raise shm_size or make the state "
        "smaller; snapshot_every_n_steps only sets how often states are taken."
    )


def describe_work(worker_id: int, pid: int | None, at_work: AtWork, ticket: Ticket | None) -> str:
    """Say what a worker is doing, with the frames of its stack.

    Args:
        worker_id: Number of the worker.
        pid: Its process id; None for a thread.
        at_work: What its status page says.
        ticket: The ticket that it is loading, if that is in flight.
    """
    text = f"W{describe_worker(worker_id, pid)[1:]} "
    what = describe_ticket(ticket) if ticket is not None else f"batch {at_work.seq}"
    text += {
        Phase.STARTING: "has been starting",
        Phase.GETTING_READY: "has been preparing (dataset, worker_init_fn)",
        Phase.IDLE: "has been idle",
        Phase.LOADING: f"has been loading {what}",
        Phase.LEAVING_EPOCH: "has been finishing the previous epoch (iter(dataset))",
    }[at_work.phase]
    text += f" for {at_work.elapsed_s:.1f} s"
    if at_work.is_stopped:
        return f"{text}; the process is stopped (SIGSTOP)."
    frames = _user_frames(at_work)
    if not frames or at_work.phase is Phase.IDLE:
        return f"{text}."
    return "\n".join([f"{text}, the innermost call first:", *frames])


def _user_frames(at_work: AtWork) -> list[str]:
    """Return the calls of a worker's stack that are in the user's code, or called by it."""
    frames = list(itertools.takewhile(_is_not_ours, at_work.stack.splitlines()))
    if len(frames) > _FRAMES_SHOWN:
        frames = [*frames[:_FRAMES_SHOWN], f"  … {len(frames) - _FRAMES_SHOWN} more"]
    return frames


# The modules from which a worker calls the user's code.
_CALLERS = (
    "/shmloader/pools/batch_server.py",
    "/shmloader/pools/task_server.py",
    "/shmloader/pools/worker_dataset.py",
    "/shmloader/pools/object_answers.py",
    "/shmloader/batch/",
)


def _is_not_ours(frame: str) -> bool:
    return not any(module in frame for module in _CALLERS)


def describe_change(ticket: Ticket, pid: int | None, sums: str) -> str:
    """Say that a batch changed in its slot after its worker had answered.

    Args:
        ticket: The batch's ticket.
        pid: The worker's process id.
        sums: The number of bytes and both checksums, in words.
    """
    return (
        f"SHMLOADER_DEBUG: {describe_ticket(ticket)} changed in slot {ticket.slot_id} after worker "
        f"{ticket.worker_id} (pid {pid}) had answered (checksum of its {sums}). Check whether "
        "a thread of the dataset or of collate_fn still writes to memory from shmloader.empty; if "
        "none does, this is a bug in shmloader."
    )


def describe_timeout(
    timeout_s: float, waiting: Iterable[tuple[Ticket, int | None, int | None]], work: list[str]
) -> str:
    """Say what a call of ``next()`` waited for when it timed out.

    Args:
        timeout_s: The timeout in seconds.
        waiting: Tickets, each with the number of its worker (None if no worker has it) and that
            worker's process id (None for a thread, UNKNOWN_PID for a task of an executor).
        work: What each worker is doing, from :func:`describe_work`.
    """
    parts = [f"DataLoader timed out after {timeout_s:g} seconds."]
    for ticket, worker_id, pid in waiting:
        where = "waits for a worker"
        if worker_id is not None:
            where = f"is with {describe_worker(worker_id, pid)}"
        parts.append(f"B{describe_ticket(ticket)[1:]} {where}.")
    parts.append(
        "No batch is lost. A for loop ends here; call next() on the same iterator to go on waiting"
    )
    if any(pid == UNKNOWN_PID for _, _, pid in waiting):
        parts[-1] += (
            ". Nothing can end a task of an executor from here: raise timeout=, or have the "
            "dataset limit its own waits."
        )
    else:
        parts[-1] += ", or give sample_timeout= to replace a worker whose sample hangs."
    head = " ".join(parts)
    return "\n".join([head, *work])


def describe_late_start(timeout_s: float, work: list[str]) -> str:
    """Say what a timeout at an epoch's start waited for.

    Args:
        timeout_s: The timeout in seconds.
        work: What each late worker is doing, from :func:`describe_work`.
    """
    head = (
        f"DataLoader timed out after {timeout_s:g} seconds, waiting for its workers to finish the "
        "previous epoch. The workers were ended; iter() starts new ones."
    )
    return "\n".join([head, *work])
