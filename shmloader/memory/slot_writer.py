"""Hands out the bytes of a task's slot in the worker, from the front to the back.

Assumes one task at a time. If user code still holds memory of the slot when the task is answered,
the reference count of the task's array shows that (``is_kept``), and the slot is never filled
again.
"""

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shmloader.errors import SharedMemoryError
from shmloader.faults import FAULTS
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.slot import Slot, align
from shmloader.memory.slot_size import describe_most

# References to the task's array when only the writer holds it: the attribute, and the argument of
# getrefcount.
_OWN_REFERENCES = 2


class SlotWriter:
    """Writer of one task's slot.

    Attributes:
        is_offered: Whether user code may have memory of the slot at the moment: while it collates,
            and while it loads items that are batches already. Samples that will be collated must
            not lie in the slot.
        pid: Id of the process that makes the batch. A child that it forks must not write.

    Args:
        admission: Admits the first touch of a slot's memory; None if memory is not checked.
        slots: Returns all slots of the same owner. If there is no address space for the slot that
            is written to, the others may be unmapped.
    """

    def __init__(
        self, admission: MemoryAdmission | None = None, slots: Callable[[], Iterable[Slot]] = tuple
    ) -> None:
        self._admission = admission
        self._slots = slots
        self._slot: Slot | None = None
        self._backed = 0
        self._rewound = 0
        self._array: ctypes.Array[ctypes.c_char] | None = None
        # Arrays over the mappings that the slot had before in this task, with their addresses.
        self._older: list[tuple[ctypes.Array[ctypes.c_char], int]] = []
        self._used = 0
        # Bytes that the last task needed, which this one is likely to need as well.
        self._usual = 0
        self._thread = 0
        self.pid = os.getpid()
        self.is_offered = False

    def open(self, slot: Slot, *, is_offered: bool = False, touched_bytes: int = 0) -> None:
        """Begin a task with an empty slot, of which ``touched_bytes`` have pages already."""
        slot.shorten(touched_bytes)
        self._slot = slot
        self._backed = touched_bytes
        self._rewound = 0
        self._array = None
        self._older.clear()
        self._usual = self._used
        self._used = 0
        self._thread, self.pid = threading.get_ident(), os.getpid()
        self.is_offered = is_offered

    def rewind(self, used_bytes: int = 0) -> None:
        """Forget what was written after the first ``used_bytes``, to write it again."""
        self._rewound = self.touched_bytes
        self._used = used_bytes

    @property
    def slot(self) -> Slot:
        """The slot of the current task."""
        if self._slot is None:
            raise RuntimeError("there is no current task")
        return self._slot

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
    def used_bytes(self) -> int:
        """Bytes handed out so far, counted from the slot's start."""
        return self._used

    @property
    def touched_bytes(self) -> int:
        """Bytes written so far, counted from the slot's start, including what was rewound."""
        return max(self._used, self._rewound)

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether a tensor fits what is left of the slot."""
        return self._used + math.prod(shape) * dtype.itemsize <= self.slot.most_bytes

    def is_kept(self) -> bool:
        """Whether user code still holds memory that was handed out as a tensor since ``open``."""
        if self._array is not None and sys.getrefcount(self._array) > _OWN_REFERENCES:
            return True
        older = self._older
        return any(sys.getrefcount(older[n][0]) > _OWN_REFERENCES for n in range(len(older)))

    def close(self) -> None:
        """End the task."""
        self.is_offered = False
        self._slot = None
        self._array = None
        self._older.clear()

    def allocate(self, nbytes: int) -> int:
        """Hand out the next ``nbytes``.

        Returns:
            Their offset from the slot's start, a multiple of ``ALIGNMENT``.

        Raises:
            SharedMemoryError: If they do not fit, or there is not enough memory.
        """
        start = self._used
        slot = self.slot
        end = start + nbytes
        if end > slot.most_bytes:
            slot_count = None if self._admission is None else self._admission.share_count
            raise SharedMemoryError(
                f"a batch needs at least {end} bytes of shared memory, and its slot may "
                f"have {slot.most_bytes}: {describe_most(slot.most_bytes, end, slot_count)}; or "
                "lower batch_size, num_workers or prefetch_factor."
            )
        if end > slot.nbytes:
            self._map(slot, end)
        if end > self._backed and self._admission is not None:
            self._backed = self._admission.grow(slot, self._backed, end)
        self._used = align(end)
        return start

    def _map(self, slot: Slot, end: int) -> None:
        """Map the slot up to ``end``, and as far as it is likely to be filled."""
        if self._array is not None:
            self._older.append((self._array, slot.address))
            self._array = None
        slot.reach(end, likely=max(self._backed, self._usual), others=self._slots())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized contiguous tensor in the slot, with a storage of its own.

        Raises:
            SharedMemoryError: If it does not fit, or there is not enough memory.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        offset = self.allocate(count * dtype.itemsize)
        if self._array is None:
            self._array = self.slot.array()
        flat = torch.frombuffer(self._array, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def put(self, data: object) -> tuple[int, int]:
        """Copy a buffer into the slot.

        Args:
            data: Anything with a contiguous buffer.

        Returns:
            Offset and number of bytes.
        """
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        nbytes = view.nbytes
        offset = self.allocate(nbytes)
        if FAULTS is not None:
            FAULTS.reach("worker.write")
        self.slot.mapping[offset : offset + nbytes] = view
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
        slot = self.slot
        offset = address - slot.address
        if offset >= 0 and offset + nbytes <= min(self._used, slot.nbytes):
            return offset
        for array, start in self._older:
            offset = address - start
            if offset >= 0 and offset + nbytes <= len(array):
                return offset
        return None
