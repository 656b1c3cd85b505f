"""The engine's words for where a ticket is and how a worker ended.

Where torch has a text, ours begins with it, since people search for it.
"""

import reprlib
import signal
from collections.abc import Iterable

from shmloader.engine.answers import Death
from shmloader.engine.scheduler import Ticket

_SIGBUS_HINT = (
    "It is possible that dataloader's workers are out of shared memory. "
    "Please try to raise your shared memory limit. "
)

# Indices that a text names one by one.
_SHOWN = 8


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
    """How a worker ended, and what it had to load."""
    work = "had no batch to load" if ticket is None else f"was loading {describe_ticket(ticket)}"
    return f"{describe_end(death)}Worker {worker_id} {work}."


def describe_timeout(timeout_s: float, waiting: Iterable[tuple[Ticket, int]]) -> str:
    """What a timeout waited for.

    Args:
        timeout_s: How long.
        waiting: Tickets, each with its worker's process number.
    """
    parts = [f"DataLoader timed out after {timeout_s:g} seconds."]
    parts += [
        f"B{describe_ticket(ticket)[1:]} is with worker {ticket.worker_id} (pid {pid})."
        for ticket, pid in waiting
    ]
    return " ".join([*parts, "No batch is lost: next() may be called again."])
