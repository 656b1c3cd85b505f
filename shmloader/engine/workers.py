"""The workers' records, and the table of their states. Pure: no process, no thread, no clock.

::

                 ┌───────────────────┐
    GONE ──▶ STARTING ──▶ READY ◀──▶ LEAVING ──▶ GONE
                 │          │           │
                 └──────────┴───────────┴──▶ LOST ──▶ STARTING    (it is restarted)
                                        └──▶ DEAD                 (no restart is left)

A worker is busy while it has tickets in flight; that is a number, not a state. A worker that is
STARTING has been started and may be sent tasks; it is READY when its first answer comes. With a
fixed number of workers no worker is ever LEAVING or GONE.

Rule: everything that is known about a worker is in its record, and only :meth:`WorkerTable.move`
changes its state, as the table above allows. A record outlives the process or thread: the
replacement has the same number, and resumes where the record says the dataset was.
"""

import enum
from dataclasses import dataclass, field

from shmloader.batch.dataset_checkpoint import DatasetCheckpoint
from shmloader.errors import InternalError


class WorkerState(enum.Enum):
    """The state of a worker."""

    # Hash by identity, without a call of a Python function.
    __hash__ = object.__hash__

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving, once its tickets are answered"
    GONE = "not running"
    LOST = "lost, and about to be restarted"
    DEAD = "dead, and not restarted"


# Looking a member up by these names takes 10 ns, and by its class 100 ns, in Python 3.11.
STARTING, READY, LEAVING, GONE, LOST, DEAD = WorkerState

_ALLOWED = {
    GONE: {STARTING},
    STARTING: {
        READY,
        LEAVING,
        LOST,
        DEAD,
    },
    READY: {LEAVING, LOST, DEAD},
    LEAVING: {
        STARTING,
        READY,
        GONE,
        LOST,
        DEAD,
    },
    LOST: {STARTING},
    DEAD: set[WorkerState](),
}


@dataclass(slots=True)
class Worker:
    """The record of one worker. Only the scheduler changes it.

    Attributes:
        worker_id: Its number, from 0.
        state: Its state.
        in_flight: Tickets it was assigned and has not answered.
        has_stream: Whether its iterable dataset has not ended in this epoch; always true with a
            map-style dataset.
        checkpoint: How far its dataset has come, up to its last answer; a replacement resumes
            there. Used only if states of the loader contain the dataset's.
        undelivered: Its answers that were not delivered yet; counted only with checkpoints.
        next_beginning: Pieces of the pickled ``Beginning`` of its next epoch that have come.
        has_left_epoch: Whether it has finished with the epoch that is being left.
        last_answer_ns: When it last answered, by the engine's clock; 0 before its first answer.
        death: How it died, while it is LOST or DEAD. The scheduler does not look at it.
        is_death_untold: Whether it is DEAD and no ticket of its own reports that to the user.
        hang: Text for the log, if the worker was ended since a sample took too long; otherwise "".
    """

    worker_id: int
    state: WorkerState = STARTING
    in_flight: int = 0
    has_stream: bool = True
    checkpoint: DatasetCheckpoint = field(default_factory=DatasetCheckpoint)
    undelivered: int = 0
    next_beginning: bytearray = field(default_factory=bytearray)
    has_left_epoch: bool = False
    last_answer_ns: int = 0
    death: object = None
    is_death_untold: bool = False
    hang: str = ""

    @property
    def takes_tasks(self) -> bool:
        """Whether it may be sent a task now."""
        return self.state is READY or self.state is STARTING

    @property
    def is_alive(self) -> bool:
        """Whether its process or thread runs, as far as is known."""
        return self.takes_tasks or self.state is LEAVING


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
        # Read several times a batch, and so updated where states change.
        self._counts = dict.fromkeys(WorkerState, 0)
        self._counts[STARTING] = present
        self._counts[GONE] = worker_count - present

    @property
    def present_count(self) -> int:
        """The number of present workers. May be read from any thread."""
        counts = self._counts
        return len(self) - counts[GONE] - counts[LEAVING]

    @property
    def are_all_dead(self) -> bool:
        """Whether all present workers are dead."""
        return self.present_count == self._counts[DEAD]

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
        self._counts[worker.state] -= 1
        self._counts[new] += 1
        worker.state = new
        if not worker.is_alive:  # its replacement knows none of this
            worker.last_answer_ns = 0
            worker.next_beginning.clear()

    def balance(self) -> None:
        """Make unwanted workers leave, and make leaving workers stay that are wanted again.

        A worker that is LOST leaves only after it has been restarted, since its tickets still have
        to be answered.
        """
        for worker in self[self.wanted_count :]:
            if worker.takes_tasks:
                self.move(worker.worker_id, LEAVING)
        for worker in self[: self.wanted_count]:
            if worker.state is LEAVING:
                self._stay(worker)

    def let_all_stay(self) -> None:
        """Make all leaving workers stay."""
        for worker in self:
            if worker.state is LEAVING:
                self._stay(worker)
        self.wanted_count = self.present_count

    def _stay(self, worker: Worker) -> None:
        has_answered = worker.last_answer_ns > 0
        self.move(worker.worker_id, READY if has_answered else STARTING)

    def next_restart(self) -> Worker | None:
        """Return a worker that is LOST; None if there is none."""
        return self._first(LOST)

    def next_start(self) -> Worker | None:
        """Return a worker that is wanted and GONE; None if there is none."""
        first = self._first(GONE)
        return None if first is None or first.worker_id >= self.wanted_count else first

    def next_stop(self) -> Worker | None:
        """Return a LEAVING worker without tickets in flight; None if there is none."""
        if not self._counts[LEAVING]:
            return None
        leaving = (one for one in self if one.state is LEAVING)
        return next((one for one in leaving if one.in_flight == 0), None)

    def first_dead(self) -> Worker | None:
        """Return a worker that is DEAD; None if there is none."""
        return self._first(DEAD)

    def _first(self, state: WorkerState) -> Worker | None:
        if not self._counts[state]:
            return None
        return next(worker for worker in self if worker.state is state)
