"""Collates straight into the slot.

In a worker, the function for tensors in torch's own ``default_collate_fn_map`` is replaced by one
that allocates its output in the slot. So every call of ``default_collate`` writes to the slot,
even a call in the user's own collate function. A collate function written by hand allocates its
output with :func:`empty`.

Some libraries allocate torch's shared memory in their own collate functions, as torch does in a
worker, with the private ``UntypedStorage._new_shared`` (PyTorch Geometric does). That is served
from the slot as well: otherwise their batch would be copied there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from shmloader.memory.flat import stack_into
from shmloader.memory.writer import SlotWriter
from shmloader.process_state import PROCESS

_torch_collate_tensor_fn = torch_collate.collate_tensor_fn
_torch_new_shared: Any = torch.UntypedStorage._new_shared


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor for a collate function to write its result into.

    In a collate function in a worker process (or, with ``batch_size=None``, in a dataset whose
    items are batches), the tensor lies in the shared memory that the batch travels in, so that the
    data is not copied again. Anywhere else, and on threads that such a function starts, this is
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
    # A result that does not fit goes to private memory, since it may only be an intermediate one.
    # But if there is no memory, the writer raises: there would be none elsewhere either.
    shape, writer = (len(batch), *first.shape), _present_writer()
    if writer is None or not writer.fits(shape, first.dtype):
        out = torch.empty(shape, dtype=first.dtype, device="cpu")
    else:
        out = writer.empty(shape, first.dtype)
    try:
        stack_into(batch, out)
    except RuntimeError as error:
        # With an output that cannot be resized, torch.stack does not name the unequal shapes.
        if "resize" in str(error):
            return torch.stack(batch, 0)
        raise
    return out


def _new_shared(kind: Any, size: int, *, device: Any = "cpu") -> Any:
    """Return a storage of ``size`` bytes for a collate function: in the slot, if it fits there."""
    writer = _present_writer()
    is_ours = kind is torch.UntypedStorage and torch.device(device).type == "cpu" and size > 0
    if not is_ours or writer is None:
        return _torch_new_shared(size, device=device)
    if not writer.fits((size,), torch.uint8):
        return torch.UntypedStorage(size)
    return writer.empty((size,), torch.uint8).untyped_storage()


def install(writer: SlotWriter) -> None:
    """Make torch's collate functions in this worker process write to the slot of ``writer``."""
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
    ours = (torch_collate.__name__, __name__)
    functions = torch_collate.default_collate_fn_map.values()
    return all(getattr(function, "__module__", None) in ours for function in functions)
