"""Hands out the bytes of a task's slot in the worker, and has torch collate into them.

In a worker, the function for tensors in torch's own ``default_collate_fn_map`` is replaced by one
that allocates its output in the slot. So every call of ``default_collate`` writes to the slot,
even a call in the user's own collate function. A collate function written by hand allocates its
output with :func:`empty`. Some libraries (PyTorch Geometric) allocate torch's shared memory, as
torch does in a worker, with the private ``UntypedStorage._new_shared``: that is served from the
slot as well, since their batch would be copied there otherwise.

A large batch is not in the caches any more when the main process, or a GPU, reads it. Writing it
through the caches reads each line before it is overwritten, and evicts the samples. Streaming
stores (:mod:`_streaming`, a few lines of C) halve that traffic.

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
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from shmloader.errors import SharedMemoryError
from shmloader.grammar import size
from shmloader.memory.arena import ALIGNMENT, EXCESS_BYTES, Arena, Slot, has_excess
from shmloader.memory.compiled import copy_rows as _copy_rows
from shmloader.memory.limits import MemoryAdmission
from shmloader.process_state import PROCESS

#: Fields of at least this many bytes are written with streaming stores. Between the size of a
#: core's own cache (2 MiB on servers) and 16 MiB, it varies which kind of store is faster.
STREAM_BYTES = 8 << 20

#: With shorter rows, checking each tensor costs more than streaming saves.
ROW_BYTES = 16 << 10

_torch_collate_tensor_fn = torch_collate.collate_tensor_fn
_torch_new_shared: Any = torch.UntypedStorage._new_shared

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
        self._thread = threading.get_ident()

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
                f"a batch needs at least {size(end)} of shared memory, but "
                f"{arena.describe_limit(end)}. Or lower batch_size, num_workers or "
                "prefetch_factor."
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

    def put(self, source: int | bytes, nbytes: int) -> int:
        """Copy bytes, or those at an address of this process, to the slot; return their offset."""
        offset = self.allocate(nbytes)
        ctypes.memmove(self.slot.address + offset, source, nbytes)
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset of bytes that lie in the slot already; None if they lie elsewhere."""
        for array in self._arrays:
            offset = address - ctypes.addressof(array)
            if offset >= 0 and offset + nbytes <= min(self.used_bytes, len(array)):
                return offset
        return None


def stack_into(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Do ``torch.stack(tensors, 0, out=out)``, bypassing the caches where that is faster.

    ``out`` is a contiguous tensor of the result's shape. Returns it, as a tensor of a subclass if
    one of the tensors is such. Raises what torch.stack raises.
    """
    may_stream = out.nbytes >= max(STREAM_BYTES, ROW_BYTES * len(tensors))
    if may_stream and _copy_rows is not None and all(_is_row_of(out, one) for one in tensors):
        addresses = [tensor.data_ptr() for tensor in tensors]
        _copy_rows(out.data_ptr(), addresses, out.nbytes // len(tensors))
        return out
    return torch.stack(tensors, 0, out=out)  # type: ignore[arg-type]


def _is_row_of(out: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether stacking the tensor only copies its bytes."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == out.dtype
        and tensor.shape == out.shape[1:]
        and tensor.is_contiguous()
        and tensor.is_cpu
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor for a collate function to write its result into.

    In a collate function in a worker process, the tensor lies in the shared memory of the batch, so
    the data is not copied again. With ``batch_size=None``, the same holds in a dataset whose items
    are batches. Anywhere else, and on threads that such a function starts, this is
    ``torch.empty(shape, dtype=dtype)``.

    Args:
        shape: Size of each dimension; an int for one dimension.
        dtype: Dtype of the elements; None for torch's default dtype.

    Returns:
        A contiguous CPU tensor with a storage of its own.

    Raises:
        SharedMemoryError: If the tensor does not fit the shared memory of one batch, or there is
            not enough memory.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    writer = _present_writer()
    if writer is None:
        return torch.empty(sizes, dtype=dtype)
    return writer.empty(sizes, dtype or torch.get_default_dtype())


def _present_writer() -> SlotWriter | None:
    """Return the writer if the caller may get memory of the slot now."""
    writer: SlotWriter | None = PROCESS.slot_writer
    return writer if writer is not None and writer.may_allocate else None


def _collate_tensor_fn(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors as torch's own function does in a worker, but into the slot."""
    first = batch[0]
    is_plain = type(first) is torch.Tensor and first.layout is torch.strided and first.is_cpu
    if not is_plain or first.is_nested or first.is_quantized:
        # By torch, but not into a file in /dev/shm, as it does in a worker.
        info, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            collated: torch.Tensor
            collated = _torch_collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
            return collated
        finally:
            torch_worker._worker_info = info
    out = _allocate((len(batch), *first.shape), first.dtype)
    try:
        return stack_into(batch, out)
    except RuntimeError as error:
        # With an output that cannot be resized, torch.stack does not name the unequal shapes.
        if "resize" in str(error):
            return torch.stack(batch, 0)
        raise


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the slot, or in private memory where the caller may get none of the slot.

    A result that does not fit goes to private memory, since it may only be an intermediate one. But
    if there is no memory, the writer raises: there would be none elsewhere either.
    """
    writer = _present_writer()
    if writer is None or not writer.fits(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return writer.empty(shape, dtype)


def _new_shared(kind: Any, size: int, *, device: Any = "cpu") -> Any:
    """Return a storage of ``size`` bytes for a collate function: in the slot, if it fits there."""
    if kind is not torch.UntypedStorage or torch.device(device).type != "cpu":
        return _torch_new_shared(size, device=device)
    return _allocate((size,), torch.uint8).untyped_storage()


def install(writer: SlotWriter | None) -> None:
    """Make torch's collate functions in this process write to the slot of ``writer``.

    With None, they write to memory of this process, and not to shared memory as torch's workers do.
    """
    PROCESS.slot_writer = writer
    torch.UntypedStorage._new_shared = classmethod(_new_shared)  # type: ignore[assignment,method-assign]
    collate_map = torch_collate.default_collate_fn_map
    if collate_map.get(torch.Tensor) is _torch_collate_tensor_fn:
        collate_map[torch.Tensor] = _collate_tensor_fn


def is_plain(collate_fn: object) -> bool:
    """Whether a function collates tensors, arrays and numbers as torch's own does.

    It does not if the user has changed ``default_collate_fn_map``.
    """
    if collate_fn is not torch_collate.default_collate:
        return False
    for function in torch_collate.default_collate_fn_map.values():
        if getattr(function, "__module__", None) not in (torch_collate.__name__, __name__):
            return False
    return True
