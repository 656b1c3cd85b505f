"""Memory maps of files on their way to a started worker: by the file's name, not by its data.

Pickle takes a memory map for an array and copies what is in it, which may be larger than memory.
Where a map cannot be written to, the worker maps the same file: copy-on-write, so that the array
may be written to in the worker, as the copy that torch's loader makes may.
"""

from pathlib import Path
from typing import Any

import numpy as np

from shmloader.memory.buffer_table import address_of


def reduce_memory_map(array: "np.memmap[Any, Any]") -> Any:
    """The reduction of a memory map that is read-only; NotImplemented of another.

    NotImplemented, too, where the file has been removed, or replaced by another under its name.
    """
    name = getattr(array, "filename", None)
    if array.mode != "r" or array._mmap is None or name is None or not array.size:  # type: ignore[attr-defined]
        return _as_array(array)
    low, nbytes = address_of(array)
    found = _find_mapping(low, low + nbytes)
    try:
        if found is None or Path(name).stat().st_ino != found[1]:
            return _as_array(array)
    except OSError:
        return _as_array(array)
    first = array.__array_interface__["data"][0] - low
    fields = (array.dtype, array.shape, array.strides)
    return open_memory_map, (str(Path(name).resolve()), found[0], nbytes, first, *fields)


def _as_array(array: "np.memmap[Any, Any]") -> Any:
    """As an array whose data leave the stream; it comes out a memory map without a file."""
    if array.dtype.hasobject:
        return NotImplemented
    kept = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    return as_memory_map, (np.array(array, order=kept, subok=False),)  # type: ignore[call-overload]


def as_memory_map(array: "np.ndarray[Any, Any]") -> "np.memmap[Any, Any]":
    """Called by pickle, in the worker."""
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
        name: The file's.
        offset: Where in it the part begins, in bytes.
        nbytes: Length of the part.
        first: Where in the part the array's first element is, in bytes.
        dtype: The array's.
        shape: The array's.
        strides: The array's, in bytes.

    Raises:
        OSError: If the file cannot be opened.
    """
    part = np.memmap(name, np.uint8, "c", offset, (nbytes,))
    return np.ndarray.__new__(np.memmap, shape, dtype, part, first, strides)


def _find_mapping(low: int, high: int) -> tuple[int, int] | None:
    """For bytes of a mapped file: their offset in it, and its inode; None if it is not known."""
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
