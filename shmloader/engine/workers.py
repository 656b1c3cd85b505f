"""The workers' records, and the table of their states. Pure: no process, no thread, no clock.

::

    GONE ──▶ RUNNING ──▶ LEAVING ──▶ GONE
                │           ├──────▶ GONE    (it died)
                ├───────────┴──────▶ DEAD    (it died, and no restart is left)
                └──▶ LOST ──▶ RUNNING        (it is restarted)

A worker is busy while it has tickets; that is no state. With a fixed number of workers no worker is
ever LEAVING or GONE.

Rule: everything that is known about a worker is in its record, and only :meth:`WorkerTable.move`
changes its state, as the table above allows. A record outlives the process or thread: the
replacement has the same number, and resumes where the record says the dataset was.
"""

import enum
from dataclasses import dataclass, field

from shmloader.batch.checkpoint import Checkpoint
from shmloader.errors import InternalError


class WorkerState(enum.Enum):
    """The state of a worker."""

    # Hash by identity, without a call of a Python function.
    __hash__ = object.__hash__

    RUNNING = "running"
    LEAVING = "leaving, once it has answered its ticket"
    GONE = "not running"
    LOST = "lost, and about to be restarted"
    DEAD = "dead, and not restarted"


# Looking a member up by these names takes 10 ns, and by its class 100 ns, in Python 3.11.
RUNNING, LEAVING, GONE, LOST, DEAD = WorkerState

_ALLOWED = {
    GONE: {RUNNING},
    RUNNING: {LEAVING, LOST, DEAD},
    LEAVING: {GONE, DEAD},
    LOST: {RUNNING},
    DEAD: set[WorkerState](),
}


@dataclass(slots=True)
class Worker:
    """The record of one worker. Only the scheduler changes it.

    Attributes:
        worker_id: Its number, from 0.
        state: Its state.
        in_flight: Tickets it was assigned and has not answered; not counted for a pool's queue.
        has_stream: Whether its iterable dataset has not ended in this epoch; always true with a
            map-style dataset.
        checkpoint: How far its dataset has come, up to its last answer; a replacement resumes
            there. Used only if states of the loader contain the dataset's.
        next_beginning: Pieces of the pickled checkpoint of its next epoch that have come.
        has_left_epoch: Whether it has finished with the epoch that is being left.
        death: How it died, while it is LOST or DEAD. The scheduler does not look at it.
        unfinished: Numbers of the tickets that were lost with it, while it is LOST.
        hang: Text for the log, if the worker was ended since a sample took too long; otherwise "".
    """

    worker_id: int
    state: WorkerState = RUNNING
    in_flight: int = 0
    has_stream: bool = True
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    next_beginning: bytearray = field(default_factory=bytearray)
    has_left_epoch: bool = False
    death: object = None
    unfinished: list[int] = field(default_factory=list)
    hang: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its process or thread runs, as far as is known."""
        return self.state is RUNNING or self.state is LEAVING


class WorkerTable(list[Worker]):
    """All workers of an engine by number, and how many of them are wanted.

    Attributes:
        wanted_count: How many workers should be present. These are the first ones by number, so
            that the ranks of a host, each of which has a table, agree on them.

    Args:
        worker_count: The most workers there may be.
        present: How many workers run at first; the others are GONE.
    """

    def __init__(self, worker_count: int, present: int) -> None:
        super().__init__(Worker(worker_id) for worker_id in range(worker_count))
        for worker in self[present:]:
            worker.state = GONE
        self.wanted_count = present

    @property
    def present_count(self) -> int:
        """The number of present workers. May be read from any thread."""
        return sum(worker.state is not GONE and worker.state is not LEAVING for worker in self)

    def move(self, worker_id: int, new: WorkerState) -> None:
        """Change a worker's state.

        Raises:
            InternalError: If the table does not allow the change.
        """
        worker = self[worker_id]
        if new not in _ALLOWED[worker.state]:
            raise InternalError(
                f"worker {worker_id} is {worker.state.value} and cannot be {new.value}"
            )
        worker.state = new
        if not worker.is_alive:  # its replacement does not know this
            worker.next_beginning.clear()

    def next_leaving(self) -> Worker | None:
        """Make a running worker that is not wanted LEAVING, and return it; None if there is none.

        A worker that is LOST leaves only after it has been restarted.
        """
        for worker in self[self.wanted_count :]:
            if worker.state is RUNNING:
                worker.state = LEAVING
                return worker
        return None

    def next_start(self) -> Worker | None:
        """Return a worker that is wanted and GONE; None if there is none."""
        return next((one for one in self[: self.wanted_count] if one.state is GONE), None)

    def first(self, state: WorkerState) -> Worker | None:
        """Return the first worker in a state; None if there is none."""
        return next((worker for worker in self if worker.state is state), None)
