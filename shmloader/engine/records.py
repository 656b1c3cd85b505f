"""The records of slots and workers, which only the scheduler changes. Pure.

The states of a slot::

    FREE ──▶ TAKEN ──▶ LENT ──▶ FREE
               └──────────────▶ FREE     (the batch was copied out, or is not delivered)

The states of a worker::

    GONE ──▶ RUNNING ──▶ DEAD             (it died, and no restart is left)
                └──▶ LOST ──▶ RUNNING     (it is restarted)

A worker is GONE before it is started. A worker's record outlives the process or thread: the
replacement has the same number, and resumes where the record says.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

from shmloader.batch.checkpoint import Checkpoint
from shmloader.errors import InternalError


class SlotTable:
    """All slots of an engine: ``capacity`` of them (I4).

    Each one that was used is in one of the collections (I1).

    Attributes:
        free_ids: The FREE ones; the one that was freed last comes last.
        taken_ids: The TAKEN ones.
        lent_ids: The LENT ones.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used_count = capacity, 0
        self.free_ids: list[int] = []
        self.taken_ids: set[int] = set()
        self.lent_ids: set[int] = set()

    def take(self) -> int:
        """Return a free slot: the one that was freed last, whose bytes may still be in a cache.

        Raises an InternalError if all are in use.
        """
        if not self.free_ids:
            if self._used_count == self._capacity:
                raise InternalError("all slots are in use (I5)")
            self.free_ids.append(self._used_count)
            self._used_count += 1
        slot_id = self.free_ids.pop()
        self.taken_ids.add(slot_id)
        return slot_id

    def lend(self, slot_id: int) -> None:
        """Pass a slot from its ticket to a lease."""
        if slot_id not in self.taken_ids:
            raise InternalError(f"slot {slot_id} is not a ticket's, and cannot be lent (I1)")
        self.taken_ids.remove(slot_id)
        self.lent_ids.add(slot_id)

    def free(self, slot_id: int) -> None:
        """Free a slot that a ticket or a lease holds."""
        ids = self.taken_ids if slot_id in self.taken_ids else self.lent_ids
        if slot_id not in ids:
            raise InternalError(f"slot {slot_id} is free already, or was never used (I1)")
        ids.remove(slot_id)
        self.free_ids.append(slot_id)


class WorkerState(enum.Enum):
    """The state of a worker."""

    RUNNING = "running"
    GONE = "not started"
    LOST = "lost, and about to be restarted"
    DEAD = "dead, and not restarted"


RUNNING, GONE, LOST, DEAD = WorkerState


@dataclass(slots=True)
class Worker:
    """The record of one worker.

    Attributes:
        worker_id: Its number, from 0.
        state: Its state.
        has_stream: Whether its iterable dataset has not ended in this epoch; always true with a
            map-style dataset.
        checkpoint: How far its dataset has come, up to its last answer; a replacement resumes
            there. Used only if states of the loader contain the dataset's.
        has_left_epoch: Whether it has finished with the epoch that is being left.
        death: How it died, while it is LOST or DEAD: a Death. None for a thread.
        unfinished: Numbers of the tickets that were lost with it, while it is LOST.
        hang: Text for the log, if the worker was ended since a sample took too long; otherwise "".
    """

    worker_id: int
    state: WorkerState = RUNNING
    has_stream: bool = True
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    has_left_epoch: bool = False
    death: Any = None
    unfinished: list[int] = field(default_factory=list)
    hang: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its process or thread runs, as far as is known."""
        return self.state is RUNNING


class WorkerTable(list[Worker]):
    """All workers of an engine by number, and how many of them are wanted.

    Attributes:
        wanted_count: How many workers should be present, at least: the first ones by number.

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
        return sum(worker.state is not GONE for worker in self)

    def next_missing(self) -> Worker | None:
        """Return a worker that is LOST, or that is wanted and GONE; None if there is none."""
        gone = (worker for worker in self[: self.wanted_count] if worker.state is GONE)
        return self.first(LOST) or next(gone, None)

    def first(self, state: WorkerState) -> Worker | None:
        """Return the first worker in a state; None if there is none."""
        return next((worker for worker in self if worker.state is state), None)
