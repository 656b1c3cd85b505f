"""The engine's words for where a ticket is and how a worker ended.

Where torch has a text, ours begins with it, since people search for it.
"""

import itertools
import reprlib
import signal
from collections.abc import Iterable

from shmloader.batch.iterable_state import IterableCheckpoint
from shmloader.engine.scheduler import Ticket
from shmloader.pools.answers import Death
from shmloader.pools.status_page import AtWork, Phase
from shmloader.sampling.indices import without_position

_SIGBUS_HINT = (
    "It is possible that dataloader's workers are out of shared memory. "
    "Please try to raise your shared memory limit. "
)

# Indices that a text names one by one.
_SHOWN = 8
# Calls of a stack that a text shows.
_FRAMES_SHOWN = 12


def describe_worker(worker_id: int, pid: int | None) -> str:
    """A worker by its number, and that of its process; a thread has no such number."""
    return f"worker thread {worker_id}" if pid is None else f"worker {worker_id} (pid {pid})"


def describe_loading(ticket: Ticket, pid: int | None) -> str:
    """For an exception's note: which worker raised it, and where."""
    who = describe_worker(max(ticket.worker_id, 0), pid)
    return f"W{who[1:]} was loading {describe_ticket(ticket)}."


def describe_end(death: Death) -> str:
    """How a worker ended, in torch's words."""
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


def describe_indices(indices: object) -> str:
    """A batch's indices in a few words: "indices 64 to 127"."""
    indices = without_position(indices)
    if not isinstance(indices, list | tuple):
        return f"index {reprlib.repr(indices)}"
    if len(indices) > 1 and all(isinstance(index, int) for index in indices):
        first = indices[0]
        if list(indices) == list(range(first, first + len(indices))):
            return f"indices {first} to {indices[-1]}"
    shown = ", ".join(reprlib.repr(index) for index in indices[:_SHOWN])
    if len(indices) > _SHOWN:
        return f"{len(indices)} indices: {shown}, …"
    return f"indices {shown}" if indices else "no indices"


def describe_ticket(ticket: Ticket) -> str:
    """A ticket by its number and indices."""
    return f"batch {ticket.seq} ({describe_indices(ticket.indices)})"


def describe_death(worker_id: int, death: Death, ticket: Ticket | None) -> str:
    """How a worker ended, what it had to load, and why none took its place."""
    work = "had no batch to load" if ticket is None else f"was loading {describe_ticket(ticket)}"
    text = f"{describe_end(death)}Worker {worker_id} {work}."
    text += _describe_oom(death)
    if not death.restart_limit:
        return text
    if ticket is not None and ticket.kill_count > 1:
        return f"{text} This batch had killed a worker before, and is not loaded a third time."
    return (
        f"{text} As many workers as may be (worker_restarts={death.restart_limit}) were replaced "
        "in this epoch."
    )


def _describe_oom(death: Death) -> str:
    if death.oom_kills <= 0:
        return ""
    processes = f"{death.oom_kills} process{'' if death.oom_kills == 1 else 'es'}"
    return (
        f" The kernel's out-of-memory killer ended {processes} of this control group since the "
        "loader started: lower num_workers or prefetch_factor, or give it more memory."
    )


def describe_restart(
    worker_id: int,
    death: Death,
    seqs: list[int],
    checkpoint: IterableCheckpoint | None,
    *,
    is_seeded: bool = False,
) -> str:
    """For the log: a worker has taken a dead one's place."""
    again = ", ".join(map(str, seqs))
    text = f"{describe_end(death)}A new process takes the place of worker {worker_id}"
    text += f" and loads again what it had in work: batch {again}." if seqs else "."
    if checkpoint is not None and not checkpoint.has_ended:
        text += _describe_resumption(checkpoint)
    if not (is_seeded or (checkpoint is not None and checkpoint.snapshot is None)):
        text += " Its random streams start anew."
    return text + _describe_oom(death)


def _describe_resumption(checkpoint: IterableCheckpoint) -> str:
    given = "the batch that was" if checkpoint.skip == 1 else f"{checkpoint.skip} batches that were"
    if checkpoint.snapshot is None:
        return (
            f" Its dataset is iterated anew, past {given} given already." if checkpoint.skip else ""
        )
    batches = "its first batch" if checkpoint.at == 1 else f"{checkpoint.at} batches"
    text = f" Its dataset goes on from its state after {batches}"
    return f"{text}, past {given} given since." if checkpoint.skip else f"{text}."


def describe_interruption(error: BaseException, *, in_sampler: bool = False) -> str:
    """Why an iterator is closed, after "the iterator is closed".

    Args:
        error: What came from outside.
        in_sampler: Whether it came out of the sampler's own code.
    """
    name = type(error).__name__
    if in_sampler:
        return (
            f" since {name} came, from outside, in the midst of the sampler, and a generator "
            "is ended by that. The loader's state_dict() is that of the last batch that next() "
            "returned."
        )
    return (
        f" since {name} came, from outside, while a batch was on its way: to go on would be to "
        "leave that out. The loader's state_dict() is that of the last batch that next() returned."
    )


def describe_lost_state(worker_id: int, nbytes: int, slot_bytes: int) -> str:
    """For the log: a state did not come."""
    return (
        f"The state of worker {worker_id}'s dataset, {nbytes} bytes, found no room beside its "
        f"batch, in a slot that may have {slot_bytes} bytes, and is left out. Nothing is lost: a "
        "loader that is resumed, or a worker that is replaced, begins at an older state, or at the "
        "dataset's beginning, and passes over what was given since. Raise shm_size, or have "
        "smaller states; snapshot_every_n_steps only says how often they are taken."
    )


def describe_work(worker_id: int, pid: int | None, at_work: AtWork, ticket: Ticket | None) -> str:
    """What a worker is at, with the frames of its stack.

    Args:
        worker_id: Which.
        pid: Its process number; None for a thread.
        at_work: What it says.
        ticket: What it says it loads, if that is in flight.
    """
    text = f"W{describe_worker(worker_id, pid)[1:]} "
    what = describe_ticket(ticket) if ticket is not None else f"batch {at_work.seq}"
    text += {
        Phase.STARTING: "has been starting",
        Phase.GETTING_READY: "has been getting ready (dataset, worker_init_fn)",
        Phase.IDLE: "has had nothing to do",
        Phase.LOADING: f"has been loading {what}",
        Phase.LEAVING_EPOCH: "has been leaving the epoch before (iter(dataset))",
    }[at_work.phase]
    text += f" for {at_work.elapsed_s:.1f} s"
    if at_work.is_stopped:
        return f"{text}; the process is stopped (SIGSTOP)."
    frames = list(itertools.takewhile(_is_not_ours, at_work.stack.splitlines()))
    if not frames or at_work.phase is Phase.IDLE:
        return f"{text}."
    if len(frames) > _FRAMES_SHOWN:
        frames = [*frames[:_FRAMES_SHOWN], f"  … {len(frames) - _FRAMES_SHOWN} more"]
    return "\n".join([f"{text}, the innermost call first:", *frames])


# Where a worker process calls the user's code.
_CALLERS = ("/shmloader/pools/child.py", "/shmloader/batch/maker.py")


def _is_not_ours(frame: str) -> bool:
    return not any(module in frame for module in _CALLERS)


def describe_change(ticket: Ticket, pid: int | None, sums: str) -> str:
    """That a batch changed in its slot, between its worker's answer and us.

    Args:
        ticket: Its ticket.
        pid: Its worker's process number.
        sums: The bytes and their checksums, in words.
    """
    return (
        f"SHMLOADER_DEBUG: {describe_ticket(ticket)} changed in slot {ticket.slot_id} after worker "
        f"{ticket.worker_id} (pid {pid}) had answered (checksum of its {sums}). Does a thread of "
        "the dataset or collate_fn go on writing into memory of shmloader.empty? If not, it is a "
        "bug in shmloader."
    )


def describe_timeout(
    timeout_s: float, waiting: Iterable[tuple[Ticket, int | None, int | None]], work: list[str]
) -> str:
    """What a timeout waited for.

    Args:
        timeout_s: How long.
        waiting: Tickets, each with its worker's number, None where none has it, and with that one's
            process number, None for a thread.
        work: What each worker is at.
    """
    parts = [f"DataLoader timed out after {timeout_s:g} seconds."]
    for ticket, worker_id, pid in waiting:
        where = "waits for a worker"
        if worker_id is not None:
            where = f"is with {describe_worker(worker_id, pid)}"
        parts.append(f"B{describe_ticket(ticket)[1:]} {where}.")
    head = " ".join([*parts, "No batch is lost: next() may be called again."])
    return "\n".join([head, *work])


def describe_late_start(timeout_s: float, work: list[str]) -> str:
    """What a timeout at an epoch's start waited for; ``work`` as above."""
    head = (
        f"DataLoader timed out after {timeout_s:g} seconds, waiting for its workers to leave the "
        "epoch before. They were ended; iter() starts new ones."
    )
    return "\n".join([head, *work])
