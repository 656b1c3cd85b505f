"""Large states of datasets, which a worker pickles into a slot of its own.

A state that is taken rarely but is large would otherwise grow a batch's slot each time: fresh pages
for the state, beside a batch that needs few. A worker's state slot keeps its pages. Its first byte
says whether it holds a state that the main process has not copied yet. Then, and wherever the slot
cannot grow, a state goes beside its batch.
"""

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from shmloader.batch.dataset_state import Saved, dump_state
from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import ALIGNMENT, Arena, Slot
from shmloader.memory.limits import MemoryAdmission
from shmloader.messages import InStateSlot

#: A state of at least this many bytes goes into the worker's state slot.
LARGE_BYTES = 1 << 20

_FREE, _FULL = 0, 1


class StatePickler:
    """Pickles the states of one worker's dataset. Runs in the worker.

    Args:
        arena: The slots.
        worker_id: Number of the worker.
        admission: Admits the first touch of a slot's memory; None if memory is not checked.

    Attributes:
        is_by_value: Whether the dataset was pickled by cloudpickle, so that its state may need
            that, too.
    """

    def __init__(self, arena: Arena, worker_id: int, admission: MemoryAdmission | None) -> None:
        self.is_by_value = False
        self._arena, self._admission = arena, admission
        slots = arena.state_slots
        self._slot: Slot | None = slots[worker_id] if slots else None
        self._end = 0
        # Whether the next state may be large: the first one may, and others are like the last one.
        self._may_be_large = True

    def dump(self, saved: Saved) -> bytes | InStateSlot:
        """Pickle a state.

        Raises:
            Exception: What pickling the user's state raises.
        """
        slot = self._slot
        if slot is not None and self._may_be_large:
            try:
                if self._is_free(slot):
                    return self._dump_to(slot, saved)
            except SharedMemoryError:
                self._slot = None
        data = self.dumps(saved)
        self._may_be_large = len(data) >= LARGE_BYTES
        return data

    def dumps(self, saved: Saved) -> bytes:
        """Pickle a state that does not come with a batch.

        Raises:
            Exception: What pickling the user's state raises.
        """
        return dump_state(saved, by_value=self.is_by_value)

    def _is_free(self, slot: Slot) -> bool:
        self._arena.reach(slot, ALIGNMENT)
        return slot.memory[0] == _FREE

    def _dump_to(self, slot: Slot, saved: Saved) -> bytes | InStateSlot:
        self._end = ALIGNMENT
        make = cloudpickle.Pickler if self.is_by_value else pickle.Pickler
        make(self, pickle.HIGHEST_PROTOCOL).dump(tuple(saved))
        nbytes = self._end - ALIGNMENT
        if nbytes < LARGE_BYTES:
            self._may_be_large = False
            return bytes(slot.memory[ALIGNMENT : self._end])
        slot.memory[0] = _FULL
        return InStateSlot(nbytes)

    def write(self, data: Any) -> int:
        """Append to the state slot. The pickler calls this.

        Raises:
            SharedMemoryError: If the slot cannot grow.
        """
        slot = self._slot
        assert slot is not None
        view = memoryview(data).cast("B")
        start, end = self._end, self._end + view.nbytes
        if end > self._arena.slot_bytes:
            raise SharedMemoryError("the state does not fit a slot")
        self._arena.reach(slot, end)
        if end > slot.touched_bytes and self._admission is not None:
            self._admission.grow(self._arena, slot, end)
        slot.memory[start:end] = view
        self._end = end
        return view.nbytes


def read_state_slot(
    arena: Arena, worker_id: int, nbytes: int, copy: Callable[[memoryview], memoryview]
) -> memoryview:
    """Copy a state out of a worker's state slot, which is free then. Runs in the main process.

    Args:
        arena: The slots.
        worker_id: Number of the worker.
        nbytes: Size of the state.
        copy: Copies a view; its result is returned.

    Raises:
        SharedMemoryError: If the slot cannot be mapped.
    """
    slot, end = arena.state_slots[worker_id], ALIGNMENT + nbytes
    arena.reach(slot, end)
    copied = copy(slot.memory[ALIGNMENT:end])
    slot.memory[0] = _FREE
    return copied


def free_state_slot(arena: Arena, worker_id: int) -> None:
    """Free the state slot of a worker that has died. Its answers were read."""
    if arena.state_slots and arena.state_slots[worker_id].nbytes:
        arena.state_slots[worker_id].memory[0] = _FREE
