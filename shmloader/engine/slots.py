"""The states of the slots. Pure: no memory, no process, no clock.

::

    FREE ──▶ FILLING ──▶ FULL ──▶ LENT ──▶ FREE
                │          └────────────▶ FREE     (the batch was copied out, or is not delivered)
                └───────────────────────▶ FREE     (the ticket was dropped, or its worker was lost)

Rule: a slot has exactly one holder (I1), and every change of state is made here, by the table.
"""

import enum

from shmloader.errors import InternalError


class SlotState(enum.Enum):
    """The state of a slot, which says what holds it."""

    # Hash by identity: enum's own hash is a Python function, called six times a batch.
    __hash__ = object.__hash__

    FREE = "the free list"
    FILLING = "a worker"
    FULL = "the reorder buffer"
    LENT = "a lease"


# Looking a member up by these names takes 10 ns, and by its class 100 ns, in Python 3.11.
FREE, FILLING, FULL, LENT = SlotState

_ALLOWED = {
    FREE: {FILLING},
    FILLING: {FULL, FREE},
    FULL: {LENT, FREE},
    LENT: {FREE},
}


class SlotTable:
    """All slots of an engine, and which of them are free.

    There are ``capacity`` slots (I4). One that was used before is preferred to a fresh one.

    Args:
        capacity: The number of slots.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # The states of the slots that were used so far, by number.
        self._states: dict[int, SlotState] = {}
        self._free: list[int] = []
        self._last_worker: dict[int, int] = {}
        #: The number of slots that are lent.
        self.lent_count = 0

    @property
    def free_ids(self) -> list[int]:
        """The free slots."""
        return list(self._free)

    @property
    def states(self) -> dict[int, SlotState]:
        """The states of the slots that were used so far, by number."""
        return dict(self._states)

    def take(self, worker_id: int) -> int:
        """Return a slot for this worker to fill.

        Prefers a free slot that this worker was the last to fill, since the worker has mapped its
        pages. Otherwise takes the slot that was freed last, since its bytes may still be in a
        cache.

        Raises:
            InternalError: If all are in use.
        """
        free = self._free
        if free:
            for position in range(len(free) - 1, -1, -1):
                if self._last_worker.get(free[position]) == worker_id:
                    slot_id = free.pop(position)
                    break
            else:
                slot_id = free.pop()
        elif len(self._states) < self._capacity:
            slot_id = len(self._states)
        else:
            raise InternalError("all slots are in use (I5)")
        self._states[slot_id] = FILLING
        self._last_worker[slot_id] = worker_id
        return slot_id

    def move(self, slot_id: int, new: SlotState) -> None:
        """Change a slot's state.

        Raises:
            InternalError: If the table does not allow the change.
        """
        old = self._states.get(slot_id)
        if old is None:
            raise InternalError(f"slot {slot_id} is not in use and cannot go to {new.value} (I1)")
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
        self._states[slot_id] = new
        if new is FREE:
            self._free.append(slot_id)
