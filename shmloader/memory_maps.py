"""Memory maps of files: how they are pickled, as their file if possible."""

from pathlib import Path
from typing import Any

import numpy as np


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
    if array.mode == "r" and array._mmap is not None and name is not None and array.size:  # type: ignore[attr-defined]
        low, nbytes = address_of(array)
        offset, inode = _find_mapping(low, low + nbytes)
        if Path(name).exists() and Path(name).stat().st_ino == inode:
            first = array.__array_interface__["data"][0] - low
            fields = (array.dtype, array.shape, array.strides)
            return open_memory_map, (str(Path(name).resolve()), offset, nbytes, first, *fields)
    if array.dtype.hasobject:
        return NotImplemented
    kept = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    data = np.array(array, order=kept, subok=False)  # type: ignore[call-overload]
    return np.ndarray.view, (data, np.memmap)


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
    """
    part = np.memmap(name, np.uint8, "c", offset, (nbytes,))
    return np.ndarray.__new__(np.memmap, shape, dtype, part, first, strides)


def _find_mapping(low: int, high: int) -> tuple[int, int]:
    """Return a mapped range's offset in its file, and the file's inode; zeros if unknown."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, _, offset, _, inode, *_ = line.split(maxsplit=5)
        start, _, stop = span.partition("-")
        if int(start, 16) <= low and high <= int(stop, 16):
            return int(offset, 16) + low - int(start, 16), int(inode)
    return 0, 0
