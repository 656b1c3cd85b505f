"""The states of the slots. Pure: no memory, no process, no clock.

::

    FREE ──▶ FILLING ──▶ FULL ──▶ LENT ──▶ FREE
                │          └────────────▶ FREE     (the batch was copied out, or is not delivered)
                └───────────────────────▶ FREE     (the ticket was dropped, or its worker was lost)
    any ──▶ RETIRED                                (another process may use it for ever)

Rule: a slot has exactly one holder (I1), and every change of state is made here, by the table.
"""

import enum
from collections.abc import Callable

from shmloader.errors import InternalError


class SlotState(enum.Enum):
    """The state of a slot, which says what holds it."""

    # Hash by identity: enum's own hash is a Python function, called six times a batch.
    __hash__ = object.__hash__

    FREE = "the free list"
    FILLING = "a worker"
    FULL = "the reorder buffer"
    LENT = "a lease"
    RETIRED = "no holder, for ever"


# Looking a member up by these names takes 10 ns, and by its class 100 ns, in Python 3.11.
FREE, FILLING, FULL, LENT, RETIRED = SlotState

_ALLOWED = {
    FREE: {FILLING, RETIRED},
    FILLING: {FULL, FREE, RETIRED},
    FULL: {LENT, FREE, RETIRED},
    LENT: {FREE, RETIRED},
    RETIRED: set[SlotState](),
}


class SlotTable:
    """All slots of an engine, and which of them are free.

    A slot is made when it is first needed. There are never more than ``capacity`` that are
    not retired (I4).

    Args:
        capacity: The most slots that are not retired.
        on_free: Called with each slot that becomes FREE; None calls nothing.
    """

    def __init__(self, capacity: int, on_free: Callable[[int], None] | None = None) -> None:
        self._on_free = on_free
        self._capacity = capacity
        self._states: dict[int, SlotState] = {}
        self._free: list[int] = []
        self._last_worker: dict[int, int] = {}
        self._next_id = 0
        #: The number of slots that are lent.
        self.lent_count = 0
        #: Slots that were retired and are not unmapped yet.
        self.retired: list[int] = []

    @property
    def free_ids(self) -> list[int]:
        """The free slots."""
        return list(self._free)

    @property
    def states(self) -> dict[int, SlotState]:
        """A copy of all states that are not RETIRED, by slot number."""
        return dict(self._states)

    def take(self, worker_id: int) -> int | None:
        """Return a slot for this worker to fill; None if all are in use.

        Prefers a free slot that this worker was the last to fill, since the worker has mapped its
        pages. Otherwise takes the slot that was freed last, since its bytes may still be in a
        cache.
        """
        free = self._free
        if free:
            for position in range(len(free) - 1, -1, -1):
                if self._last_worker.get(free[position]) == worker_id:
                    slot_id = free.pop(position)
                    break
            else:
                slot_id = free.pop()
            self._states[slot_id] = FILLING
        elif len(self._states) < self._capacity:
            slot_id = self._next_id
            self._next_id += 1
            self._states[slot_id] = FILLING
        else:
            return None
        self._last_worker[slot_id] = worker_id
        return slot_id

    def move(self, slot_id: int, new: SlotState) -> None:
        """Change a slot's state.

        Raises:
            InternalError: If the table does not allow the change.
        """
        old = self._states.get(slot_id, RETIRED)
        if new not in _ALLOWED[old]:
            raise InternalError(
                f"slot {slot_id} is with {old.value} and cannot go to {new.value} (I1)"
            )
        if old is FREE:
            self._free.remove(slot_id)
        if old is LENT:
            self.lent_count -= 1
        if new is LENT:
            self.lent_count += 1
        if new is RETIRED:
            del self._states[slot_id]
            self._last_worker.pop(slot_id, None)
            self.retired.append(slot_id)
            return
        self._states[slot_id] = new
        if new is FREE:
            if self._on_free is not None:
                self._on_free(slot_id)
            self._free.append(slot_id)
