"""The large buffers of a pickle that is sent to other processes, kept out of the pickle.

As for batches (:mod:`shmloader.memory.pickler`), pickling yields a body and an :class:`OutOfBand`.
The buffers are written to a segment one after the other, and become views of the segment where the
pickle is loaded.

A read-only memory map is not copied: the other process maps the same file, copy-on-write, so that
the array may be written to there, like the copy that torch's loader makes. (Pickle would copy the
map's data, which may be larger than memory.)
"""

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory.codec import PartialStorage
from shmloader.memory.pickler import OutOfBand
from shmloader.memory.segment import Segment, SegmentWriter

#: Smaller buffers stay in the pickle: their entry in the table would cost as much.
BULK_BYTES = 512


class BufferTable(NamedTuple):
    """Where the out-of-band buffers of a pickle lie in a segment.

    Attributes:
        spans: The buffers, as (offset, nbytes, first_byte) of :class:`Span`.
        order: For each out-of-band buffer of the body, in turn, the index of its span.
    """

    spans: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]


def write_buffers(out_of_band: OutOfBand, writer: SegmentWriter) -> BufferTable:
    """Write the buffers and storages that were taken out of a pickle.

    Raises:
        SharedMemoryError: If there is not enough memory.
    """
    spans = out_of_band.place(writer.append_memory)
    return BufferTable(tuple((*span,) for span in spans), tuple(out_of_band.order))


def load_with_buffers(body: Any, table: BufferTable, segment: Segment) -> Any:
    """Unpickle a body; its tensors and arrays become views of the segment.

    Raises:
        Exception: Whatever the user's objects raise when they are unpickled.
    """
    whole = memoryview(segment)
    buffers: list[object] = []
    for offset, nbytes, first_byte in table.spans:
        if first_byte < 0:
            buffers.append(whole[offset : offset + nbytes])
        else:
            buffers.append(PartialStorage(storage_at(segment, offset, nbytes), first_byte))
    return pickle.loads(body, buffers=[buffers[index] for index in table.order])


def storage_at(segment: Segment, offset: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over these bytes of a segment. It keeps the segment alive."""
    if nbytes == 0:
        return torch.UntypedStorage(0)
    flat = torch.frombuffer(segment, dtype=torch.uint8, count=nbytes, offset=offset)
    return flat.untyped_storage()


def address_of(array: "np.ndarray[Any, Any]") -> tuple[int, int]:
    """Return the address of the first byte of an array's elements, and how many bytes they span."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def reduce_memory_map(array: "np.memmap[Any, Any]") -> Any:
    """Return the reduction of a memory map: its file if it is read-only, otherwise its data.

    A read-only map is also reduced to its data if its file has been removed, or replaced by another
    file of the same name. Returns NotImplemented if the map holds Python objects.
    """
    name = getattr(array, "filename", None)
    if array.mode != "r" or array._mmap is None or name is None or not array.size:  # type: ignore[attr-defined]
        return _as_array(array)
    low, nbytes = address_of(array)
    mapping = _find_mapping(low, low + nbytes)
    try:
        if mapping is None or Path(name).stat().st_ino != mapping[1]:
            return _as_array(array)
    except OSError:
        return _as_array(array)
    first = array.__array_interface__["data"][0] - low
    fields = (array.dtype, array.shape, array.strides)
    return open_memory_map, (str(Path(name).resolve()), mapping[0], nbytes, first, *fields)


def _as_array(array: "np.memmap[Any, Any]") -> Any:
    """Reduce a memory map to its data; it is loaded as a memory map without a file."""
    if array.dtype.hasobject:
        return NotImplemented
    kept = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return as_memory_map, (np.array(array, order=kept, subok=False),)  # type: ignore[call-overload]


def as_memory_map(array: "np.ndarray[Any, Any]") -> "np.memmap[Any, Any]":
    """Return the array as a memory map. Called by pickle, in the worker."""
    return array.view(np.memmap)


def open_memory_map(
    name: str,
    offset: int,
    nbytes: int,
    first: int,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> "np.memmap[Any, Any]":
    """Map a part of a file, copy-on-write. Called by pickle, in the worker.

    Args:
        name: Path of the file.
        offset: First byte of the part in the file.
        nbytes: Length of the part.
        first: Offset of the array's first element from the start of the part, in bytes.
        dtype: Dtype of the array.
        shape: Shape of the array.
        strides: Strides of the array, in bytes.

    Raises:
        OSError: If the file cannot be opened.
    """
    part = np.memmap(name, np.uint8, "c", offset, (nbytes,))
    return np.ndarray.__new__(np.memmap, shape, dtype, part, first, strides)


def _find_mapping(low: int, high: int) -> tuple[int, int] | None:
    """Return a mapped range's offset in its file, and the file's inode; None if unknown."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        span, _, offset, _, inode, *_ = line.split(maxsplit=5)
        start, _, stop = span.partition("-")
        if int(start, 16) <= low and high <= int(stop, 16):
            return int(offset, 16) + low - int(start, 16), int(inode)
    return None
