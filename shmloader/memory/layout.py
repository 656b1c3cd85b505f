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

from shmloader.memory.arena import Slot, align

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


class _Run(NamedTuple):
    """Small fields of one kind that lie one after the other, or a single field.

    Attributes:
        offset: Start of the first field in the slot.
        is_large: Whether it is a field that is large enough to be lent.
        field_count: Number of fields.
        step: Distance of two fields, in bytes.
        array: An array like a field: of bytes if NumPy does not have the dtype.
        exact: Dtype, shape and strides of a field in torch, if those of an array differ; else None.
    """

    offset: int
    is_large: bool
    field_count: int
    step: int
    array: "np.ndarray[Any, Any]"
    exact: tuple[Any, ...] | None


def _runs_of(fields: list[Field]) -> list[_Run]:
    """Return how fields are read. One copy for many of them takes less time than each alone."""
    runs: list[_Run] = []
    last: Any = (None,)
    for field in fields:
        offset, dtype, shape = field
        nbytes = math.prod(shape) * dtype.itemsize
        is_large = nbytes > COPY_OUT_BYTES
        if last[1:] == field[1:] and not is_large:
            run = runs[-1]
            if offset == run.offset + run.field_count * run.step:
                runs[-1] = run._replace(field_count=run.field_count + 1)
                continue
        last, exact = field, None
        try:
            array = torch.empty(shape, dtype=dtype, device="cpu").numpy()
        except TypeError:  # such as bfloat16
            array = np.empty(nbytes, np.uint8)
        # NumPy's strides differ from torch's where there are no elements.
        if array.shape != shape or not nbytes:
            exact = dtype, shape, torch.empty(shape, device="meta").stride()
        runs.append(_Run(offset, is_large, 1, align(nbytes), array, exact))
    return runs


class FlatReader:
    """Builds batches of one layout from their slots. Each worker's current layout has one.

    Attributes:
        layout: The layout.
        lends: Whether the batch has a field that is large enough to be lent.
    """

    def __init__(self, layout: FlatLayouts) -> None:
        self.layout = layout
        shards = (layout,) if isinstance(layout, FlatLayout) else layout
        runs = _runs_of([field for shard in shards for field in shard.fields])
        self.lends = any(run.is_large for run in runs)
        # What makes an array over the fields of each run: shape, dtype, offset and strides.
        self._runs: list[tuple[bool, bool, tuple[Any, ...], tuple[Any, ...] | None]] = []
        for offset, is_large, count, step, array, exact in runs:
            many = (count, *array.shape), array.dtype, offset, (step, *array.strides)
            where = many if count > 1 else (array.shape, array.dtype, offset, array.strides)
            self._runs.append((is_large, count > 1, where, exact))

    def read(self, slot: Slot, lease: Any) -> object:
        """Build the batch.

        Args:
            slot: The slot that it lies in.
            lease: Large fields become views of it; None copies them out as well.
        """
        fields, memory = [], slot.memory
        for is_large, is_many, (shape, dtype, offset, strides), exact in self._runs:
            # NumPy makes and copies arrays in a third of the time that torch takes for tensors, on
            # one thread: torch's threads would spin on cores that the workers need. For large
            # arrays it asks the kernel for huge pages.
            if is_large and lease is not None:
                array = np.ndarray(shape, dtype, lease, offset)
            elif is_many:
                nbytes = shape[0] * strides[0]
                block = np.ndarray(nbytes, np.uint8, memory, offset).copy()
                array = np.ndarray(shape, dtype, block, 0, strides)
            else:
                array = np.ndarray(shape, dtype, memory, offset).copy()
            for one in array if is_many else (array,):
                tensor = torch.from_numpy(one)
                storage: Any = tensor.untyped_storage()
                storage._shmloader_memory = one  # see hold()
                if exact is not None:
                    tensor = torch.empty(0, dtype=exact[0], device="cpu")
                    tensor.set_(storage, 0, *exact[1:])
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
