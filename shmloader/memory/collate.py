"""Collating straight into the slot.

In a worker the function for tensors in torch's own ``default_collate_fn_map`` is replaced by
one that takes its output from the slot. So ``default_collate`` gains wherever it is called from,
a user's own collate function included; a collate written by hand asks for its output by
:func:`empty`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from shmloader.memory.flat import FlatLayout
from shmloader.memory.packer import FlatPacker
from shmloader.memory.slot_writer import SlotWriter
from shmloader.memory.stacking import stack_into


class _Worker:
    """The writer of this process; None outside a worker. A process has one at the most."""

    writer: SlotWriter | None = None


_torch_collate_tensor_fn = torch_collate.collate_tensor_fn


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor for a collate function to write its result into.

    Called by a collate function in a worker (or, with ``batch_size=None``, by a dataset whose
    items are batches), it lies in the shared memory that the batch travels in, so that nothing
    is copied again when the batch is handed over. Anywhere else it is ``torch.empty(shape,
    dtype=dtype)``.

    Args:
        shape: Size of each dimension, or the one size.
        dtype: Of the elements; torch's default dtype if None.

    Returns:
        A contiguous CPU tensor with a storage of its own. Its values are not set.

    Raises:
        SharedMemoryError: If it does not fit the slot, or there is no memory for it.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    writer = _Worker.writer
    if writer is None or not writer.may_be_asked:
        return torch.empty(sizes, dtype=dtype)
    return writer.empty(sizes, dtype or torch.get_default_dtype())


def _collate_by_torch(batch: Any, collate_fn_map: Any) -> torch.Tensor:
    """By torch's own function, but not into a file in /dev/shm, as it does in a worker."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return cast("torch.Tensor", _torch_collate_tensor_fn(batch, collate_fn_map=collate_fn_map))
    finally:
        torch_worker._worker_info = info


def _collate_tensor_fn(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors as torch's own function does in a worker, but into the slot."""
    first = batch[0]
    if type(first) is not torch.Tensor or first.layout is not torch.strided or not first.is_cpu:
        return _collate_by_torch(batch, collate_fn_map)
    if first.is_nested or first.is_quantized:
        return _collate_by_torch(batch, collate_fn_map)
    shape = (len(batch), *first.shape)
    writer = _Worker.writer
    out: torch.Tensor | None = None
    # What does not fit may be but a step on the way to a smaller batch. What there is no memory
    # for is told by the writer: there would be none for it elsewhere.
    if writer is not None and writer.may_be_asked and writer.has_place(shape, first.dtype):
        out = writer.empty(shape, first.dtype)
    if out is None:
        out = torch.empty(shape, dtype=first.dtype, device="cpu")
    try:
        stack_into(batch, out)
    except RuntimeError as error:
        # An output that cannot be resized hides what torch.stack says of unequal shapes.
        if "resize" in str(error):
            return torch.stack(batch, 0)
        raise
    return out


def install(writer: SlotWriter) -> None:
    """Make ``writer`` this process's own, and torch's collate use it. Once, in a worker."""
    _Worker.writer = writer
    collate_map = torch_collate.default_collate_fn_map
    if collate_map.get(torch.Tensor) is _torch_collate_tensor_fn:
        collate_map[torch.Tensor] = _collate_tensor_fn


class SlotCollate:
    """A collate function wrapped for the fetcher of a worker.

    Args:
        collate_fn: The function.
        writer: Of the slot.

    Returns:
        What the wrapped function returned; or the :class:`FlatLayout` of a batch that is in
        the slot already.

    Attributes:
        before: Called before the function is, and so not for a batch that was packed in its place.
    """

    def __init__(self, collate_fn: Callable[[object], object], writer: SlotWriter) -> None:
        self._collate_fn = collate_fn
        self._writer = writer
        self.packer = FlatPacker(writer) if is_plain(collate_fn) else None
        self.before: Callable[[], None] | None = None

    def __call__(self, samples: object) -> "object | FlatLayout":
        """Collate the samples of one batch."""
        if self.packer is not None:
            layout = self.packer.pack(samples)
            if layout is not None:
                return layout
        if self.before is not None:
            self.before()
        was_offered, self._writer.is_offered = self._writer.is_offered, True
        try:
            return self._collate_fn(samples)
        finally:
            self._writer.is_offered = was_offered


def is_plain(collate_fn: object) -> bool:
    """Whether a function makes of tensors, arrays and numbers what torch's own collate makes.

    A user who changed torch's map, which says what becomes of which, means to be asked.
    """
    collate_map = dict(torch_collate.default_collate_fn_map)
    if collate_map.get(torch.Tensor) is _collate_tensor_fn:
        collate_map[torch.Tensor] = _torch_collate_tensor_fn
    plain = _plain_map()
    return collate_fn is torch_collate.default_collate and collate_map.items() <= plain.items()


def _plain_map() -> dict[object, object]:
    """torch's map as it is with nothing added by the user."""
    return {
        torch.Tensor: _torch_collate_tensor_fn,
        np.ndarray: torch_collate.collate_numpy_array_fn,
        (np.bool_, np.number, np.object_): torch_collate.collate_numpy_scalar_fn,
        float: torch_collate.collate_float_fn,
        int: torch_collate.collate_int_fn,
        str: torch_collate.collate_str_fn,
        bytes: torch_collate.collate_str_fn,
    }
