"""Flat batches: the layout of batches of tensors, arrays and numbers, and their reader.

Where the collate function is torch's own ``default_collate`` and a sample is a tensor, an array, a
number, or a tuple, list or dict of these, the worker does not build the batch:
:mod:`shmloader.memory.packer` stacks the fields straight into the slot and describes them by a
:class:`FlatLayout`, from which :class:`FlatReader` builds the batch in the main process. All other
batches are pickled (:mod:`shmloader.memory.pickled`).
"""

import functools
import math
import os
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.arena import Slot

#: A field of at most this many bytes is copied out of the slot, so that a kept label does not
#: hold a slot of megabytes.
COPY_OUT_BYTES = 64 * 1024

#: Containers of a flat batch: a bare tensor, a list, a dict.
BARE, LIST, DICT = 0, 1, 2


class Field(NamedTuple):
    """A tensor in a slot.

    Attributes:
        offset: Its start, in bytes from the slot's start.
        dtype: Its dtype.
        shape: Its shape, batch dimension included. It is contiguous.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class FlatLayout(NamedTuple):
    """Where the fields of a flat batch lie in its slot.

    Attributes:
        container: One of ``BARE``, ``LIST`` and ``DICT``.
        keys: The dict's keys, in order; else empty.
        fields: The fields.
    """

    container: int
    keys: tuple[object, ...]
    fields: tuple[Field, ...]


#: The layout of a batch, or those of the batches of a step's shards, which lie in one slot.
FlatLayouts = FlatLayout | tuple[FlatLayout, ...]


def field_tensor(slot: Slot, field: Field) -> torch.Tensor:
    """Return a tensor over a field in the slot. It must not leave this package."""
    _, dtype, shape = field
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(slot.memory, dtype=dtype, count=count, offset=field.offset)
    return flat.view(shape)


def hold(storage: Any, memory: object) -> None:
    """Keep memory alive for as long as a storage that began with it lives.

    Sharing a tensor with other processes (``share_memory_()``, a queue of
    ``torch.multiprocessing``) copies its storage and replaces the storage's pointer, which drops
    the only reference to the old memory. NumPy arrays, memoryviews and DLPack capsules made before
    still point there. They keep the storage alive, so the storage has to keep the memory alive.
    torch preserves a storage's Python object and its attributes as long as the storage itself.

    Args:
        storage: The ``torch.UntypedStorage`` of a tensor that is handed to the user.
        memory: The lease, or the private memory that the batch was copied to.
    """
    storage._shmloader_memory = memory


class _Part(NamedTuple):
    """A field, with what the reader needs to build it.

    Attributes:
        offset: Its start in the slot.
        is_large: Whether it is large enough to be lent.
        shape: Its shape as an array.
        dtype: Its dtype as an array: bytes if NumPy does not have the dtype.
        exact: Its dtype, shape and strides in torch, if the array does not have them; else None.
    """

    offset: int
    is_large: bool
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    exact: tuple[Any, ...] | None


def _make_part(field: Field) -> _Part:
    offset, dtype, shape = field
    nbytes = math.prod(shape) * dtype.itemsize
    is_large = nbytes > COPY_OUT_BYTES
    try:
        numpy_dtype = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:  # such as bfloat16
        numpy_dtype = None
    # NumPy's strides differ from torch's where there are no elements.
    if numpy_dtype is not None and nbytes:
        return _Part(offset, is_large, shape, numpy_dtype, None)
    exact = dtype, shape, torch.empty(shape, device="meta").stride()
    return _Part(offset, is_large, (nbytes,), np.dtype(np.uint8), exact)


class FlatReader:
    """Builds batches of one layout from their slots. Each worker's current layout has one.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a field that is large enough to be lent.
    """

    def __init__(self, layout: FlatLayouts) -> None:
        self.layout = layout
        self._shards = (layout,) if isinstance(layout, FlatLayout) else layout
        self._parts = [_make_part(field) for shard in self._shards for field in shard.fields]
        self.lends = any(part.is_large for part in self._parts)

    def read(self, slot: Slot, lease: Any) -> object:
        """Build the batch.

        Args:
            slot: The slot that it lies in.
            lease: Large fields become views of it; None copies them out as well.
        """
        fields, memory = [], slot.memory
        for offset, is_large, shape, dtype, exact in self._parts:
            # NumPy makes and copies arrays in a third of the time that torch takes for tensors, on
            # one thread: torch's threads would spin on cores that the workers need. For large
            # arrays it asks the kernel for huge pages.
            if is_large and lease is not None:
                array = np.ndarray(shape, dtype, lease, offset)
            else:
                array = np.ndarray(shape, dtype, memory, offset).copy()
            tensor = torch.from_numpy(array)
            storage: Any = tensor.untyped_storage()
            storage._shmloader_memory = array  # see hold()
            if exact is not None:
                tensor = torch.empty(0, dtype=exact[0], device="cpu").set_(storage, 0, *exact[1:])
            fields.append(tensor)
        layout = self.layout
        if isinstance(layout, FlatLayout):
            return fields if layout.container == LIST else contain(layout, fields)
        rest = iter(fields)
        return [contain(shard, [next(rest) for _ in shard.fields]) for shard in layout]


def contain(layout: FlatLayout, fields: list[Any]) -> object:
    """Return the batch that these fields make up."""
    if layout.container == LIST:
        return fields
    if layout.container == BARE:
        return fields[0]
    return dict(zip(layout.keys, fields, strict=True))


# With SHMLOADER_DEBUG=1, a batch carries a checksum of its slot's used bytes from the worker to the
# main process, which detects writes to a slot after its batch was answered. That is too slow to be
# on by default.


@functools.cache
def is_debugging() -> bool:
    """Whether the check is on. Read once, in the main process, which passes it to its workers."""
    return os.environ.get("SHMLOADER_DEBUG", "") not in ("", "0")


def checksum(slot: Slot, used_bytes: int) -> int:
    """Return a checksum of a slot's first ``used_bytes``, which are mapped."""
    return zlib.crc32(slot.memory[:used_bytes])
