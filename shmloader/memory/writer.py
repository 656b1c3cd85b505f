"""Hands out the bytes of a task's slot in the worker, from the front to the back.

Assumes one task at a time. If user code still holds memory of the slot when the batch is made, the
reference count of the task's arrays shows that, and that memory becomes private to this process
(``part``).
"""

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shmloader.errors import SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.memory.arena import ALIGNMENT, EXCESS_BYTES, Arena, Slot, has_excess
from shmloader.memory.limits import MemoryAdmission

# References to an array when only the writer holds it: its list, and the argument of getrefcount.
_OWN_REFERENCES = 2

# What grows in small pieces gets this part more than it needs.
_AHEAD_DIVISOR = 8


class SlotWriter:
    """Writer of one task's slot.

    Attributes:
        is_offered: Whether user code may have memory of the slot at the moment: while it collates,
            and while it loads items that are batches already. Samples that will be collated must
            not lie in the slot.
        slot: The slot of the current task; that of the last one between two tasks.
        used_bytes: Bytes handed out so far, counted from the slot's start.
        pid: Id of the process that makes the batch. A child that it forks must not write.

    Args:
        arena: The slots.
        admission: Admits the first touch of a slot's memory; None if memory is not checked.
    """

    def __init__(self, arena: Arena, admission: MemoryAdmission | None = None) -> None:
        self._arena, self._admission = arena, admission
        self.slot: Slot = arena.slots[0]
        # Arrays over the mappings that the slot has had in this task, for tensors in them. The last
        # one is over the present mapping if ``_has_array``.
        self._arrays: list[ctypes.Array[ctypes.c_char]] = []
        self._has_array = self.is_offered = False
        # Bytes that the last task needed, which this one is likely to need as well.
        self._usual = self._rewound = self.used_bytes = 0
        self._thread, self.pid = 0, os.getpid()

    def open(self, slot: Slot, *, is_offered: bool = False) -> None:
        """Begin a task with an empty slot."""
        if slot.nbytes > EXCESS_BYTES and has_excess(slot.nbytes, slot.touched_bytes):
            slot.unmap()
        self.slot, self.is_offered = slot, is_offered
        self._arrays.clear()
        self._has_array = False
        self._usual, self._rewound, self.used_bytes = self.used_bytes, 0, 0
        self._thread, self.pid = threading.get_ident(), os.getpid()

    def rewind(self, used_bytes: int = 0) -> None:
        """Forget what was written after the first ``used_bytes``, to write it again."""
        self._rewound = self.touched_bytes
        self.used_bytes = used_bytes

    @property
    def may_allocate(self) -> bool:
        """Whether the calling thread may get memory of the slot now.

        Only the task's own thread may: a thread that user code has started may outlive the task.
        """
        return self.is_offered and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Offer no memory of the slot inside the block, for batches that will be discarded."""
        thread, self._thread = self._thread, 0
        try:
            yield
        finally:
            self._thread = thread

    @property
    def touched_bytes(self) -> int:
        """Bytes written so far, counted from the slot's start, including what was rewound."""
        return max(self.used_bytes, self._rewound)

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a tensor fits what is left of the slot."""
        return self.used_bytes + math.prod(shape) * dtype.itemsize <= self._arena.slot_bytes

    def part(self) -> bool:
        """End the batch: leave to user code what it still holds of the tensors handed out.

        That memory becomes private to this process, so that the slot may be filled again. Returns
        whether user code held any.

        Raises:
            OSError: If the system has no memory for that.
        """
        self.is_offered = self._has_array = is_held = False
        arrays = self._arrays
        for n in range(len(arrays)):
            if sys.getrefcount(arrays[n]) > _OWN_REFERENCES:
                used_bytes = min(self.touched_bytes, len(arrays[n]))
                self._arena.part(self.slot, arrays[n], used_bytes)
                is_held = True
        arrays.clear()
        return is_held

    def allocate(self, nbytes: int) -> int:
        """Hand out the next ``nbytes``. Returns their offset, a multiple of ``ALIGNMENT``.

        Raises:
            SharedMemoryError: If they do not fit, or there is not enough memory.
        """
        start, slot, arena = self.used_bytes, self.slot, self._arena
        end = start + nbytes
        if end > arena.slot_bytes:
            raise SharedMemoryError(
                f"a batch needs at least {end} bytes of shared memory, and its slot may "
                f"have {arena.slot_bytes}: {arena.describe_limit(end)}; or "
                "lower batch_size, num_workers or prefetch_factor."
            )
        if end > slot.nbytes:
            self._has_array = False
            arena.reach(slot, end, likely=max(slot.touched_bytes, self._usual))
        if end > slot.touched_bytes and self._admission is not None:
            self._admission.grow(arena, slot, end)
        self.used_bytes = (end + ALIGNMENT - 1) & -ALIGNMENT  # as align() does
        return start

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized contiguous tensor in the slot, with a storage of its own.

        Raises:
            SharedMemoryError: If it does not fit, or there is not enough memory.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        offset = self.allocate(count * dtype.itemsize)
        if not self._has_array:
            self._arrays.append(self.slot.array())
            self._has_array = True
        flat = torch.frombuffer(self._arrays[-1], dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def write(self, data: Any) -> int:
        """Append bytes without a gap, as a file does. A pickler writes a long pickle to it."""
        start, nbytes = self.used_bytes, memoryview(data).nbytes
        end = start + nbytes
        # A pickle of many objects comes in small pieces, and each check of memory takes 100 µs.
        ahead = end // _AHEAD_DIVISOR if end > self.slot.touched_bytes else 0
        self.allocate(nbytes + min(ahead, max(0, self._arena.slot_bytes - end)))
        self.used_bytes = end
        self.slot.memory[start:end] = data
        return nbytes

    def put(self, data: bytes) -> tuple[int, int]:
        """Copy bytes into the slot. Returns their offset and number."""
        nbytes = len(data)
        offset = self.allocate(nbytes)
        if FAULTS is not None:
            FAULTS.reach("worker.write")
        self.slot.memory[offset : offset + nbytes] = data
        return offset, nbytes

    def put_memory(self, address: int, nbytes: int) -> int:
        """Copy ``nbytes`` at ``address`` of this process into the slot; return their offset."""
        offset = self.allocate(nbytes)
        if FAULTS is not None:
            FAULTS.reach("worker.write")
        ctypes.memmove(self.slot.address + offset, address, nbytes)
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of bytes that lie in the slot already; None if they lie elsewhere."""
        for array in self._arrays:
            offset = address - ctypes.addressof(array)
            if offset >= 0 and offset + nbytes <= min(self.used_bytes, len(array)):
                return offset
        return None
