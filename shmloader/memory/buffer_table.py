"""Bulk that left a pickle's stream, in a segment instead of a slot.

The pickler is as for batches (:mod:`shmloader.memory.encoder`): it gives a body, and
:class:`Parts`. Here these are written behind each other, and opened again as views.
"""

import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.codec import Part, Span
from shmloader.memory.encoder import Parts
from shmloader.memory.segment import Segment, SegmentWriter

#: Smaller buffers are pickled with the rest: their place would cost as much.
BULK_BYTES = 512


def stays_inside(buffer: pickle.PickleBuffer, parts: Parts) -> bool:
    """Take a buffer out of a stream if it is of some size: pickle's ``buffer_callback``."""
    if not parts.is_mark(buffer) and buffer.raw().nbytes < BULK_BYTES:
        return True
    parts.out_of_band(buffer)
    return False


class BufferTable(NamedTuple):
    """Where the parts of a pickle lie in a segment.

    Attributes:
        spans: The parts, as (offset, nbytes, first_byte) of :class:`Span`.
        order: For each out-of-band buffer of the body, in turn, its span.
    """

    spans: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]


def write_parts(parts: Parts, writer: SegmentWriter) -> BufferTable:
    """Write what was taken out of a stream.

    Raises:
        SharedMemoryError: If there is no memory for it.
    """
    spans: dict[int, Span] = {}
    for storage in parts.storages.values():
        start, nbytes = storage.span()
        address = storage.keep.data_ptr() + start
        spans[storage.index] = Span(writer.append_memory(address, nbytes), nbytes, start)
    for index, buffer in parts.buffers:
        raw = buffer.raw()
        spans[index] = Span(writer.append(raw), raw.nbytes, -1)
    return BufferTable(tuple((*spans[n],) for n in range(len(spans))), tuple(parts.order))


def read_with_parts(body: Any, table: BufferTable, segment: Segment) -> Any:
    """Unpickle a body whose parts lie in a segment: its tensors and arrays are views of that.

    Raises:
        Exception: Whatever the user's objects raise when they are unpickled.
    """
    whole = memoryview(segment)
    parts: list[object] = []
    for offset, nbytes, first_byte in table.spans:
        if first_byte < 0:
            parts.append(whole[offset : offset + nbytes])
        else:
            parts.append(Part(storage_at(segment, offset, nbytes), first_byte))
    return pickle.loads(body, buffers=[parts[index] for index in table.order])


def storage_at(segment: Segment, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A storage over these bytes of a segment. It keeps the segment."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    flat = torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.untyped_storage()


def address_of(array: "np.ndarray[Any, Any]") -> tuple[int, int]:
    """Where the bytes of an array's elements begin, and how many they span."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low
