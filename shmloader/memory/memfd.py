"""Anonymous files in memory: what all of them have in common, and how a range of one is mapped."""

import ctypes
import errno
import fcntl
import io
import mmap
import os
import sys
from typing import Any

import numpy as np

#: Name of the anonymous files, as /proc/<pid>/maps shows it.
MEMFD_NAME = "shmloader"

# Before Python 3.13, each mapping of Python's own keeps a duplicate of the descriptor.
MAPPING_OPTIONS = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Seals of <linux/fcntl.h>. Python's fcntl module names them on Linux only.
ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
SEALS = (
    getattr(fcntl, "F_SEAL_SEAL", 1) | getattr(fcntl, "F_SEAL_SHRINK", 2)
    | getattr(fcntl, "F_SEAL_GROW", 4)
)  # fmt: skip

# <linux/mman.h>, <linux/falloc.h>. MADV_POPULATE_WRITE came with Linux 5.14.
_MAP_FIXED = 0x10
_POPULATE_WRITE = 23
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: A mapped range: a ctypes array of bytes. The range is unmapped with the last view of it.
Range = Any


def whole_pages(nbytes: int, *, up: bool = True) -> int:
    """Round up, or down, to a multiple of the page size."""
    return (nbytes + (mmap.PAGESIZE - 1) * up) // mmap.PAGESIZE * mmap.PAGESIZE


class MemoryFile(io.FileIO):
    """An anonymous file in memory.

    Args:
        fd: The descriptor, which this object takes over; None for a new file.
        name: What follows ``MEMFD_NAME`` in the name of a new file.

    Raises:
        OSError: If there is no descriptor left.
    """

    def __init__(self, fd: int | None = None, name: str = "") -> None:
        if fd is None:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            fd = os.memfd_create(f"{MEMFD_NAME}{name}", flags)
        super().__init__(fd, "r+")

    def __del__(self) -> None:
        """Close the file. Its own finalizer would warn."""
        self.close()


def map_range(fd: int, offset: int, nbytes: int) -> Range:
    """Map a range of a file, shared with all processes that map it.

    Python's own mmap would keep a duplicate of the descriptor with each mapping (before 3.13). So
    the range is mapped over addresses that Python's mmap has reserved, and unmaps in the end.

    Args:
        fd: Descriptor of the file, which may be closed afterwards.
        offset: First byte of the range in the file.
        nbytes: Length of the range.

    Raises:
        OSError: If there is no address space.
    """
    # Without access, the reserved range is charged to no limit on memory, and gets no pages.
    owner = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    address = np.frombuffer(owner, np.uint8).ctypes.data
    _map_at(address, nbytes, mmap.MAP_SHARED, fd, offset)
    # Otherwise a core dump of a worker would contain every slot. If this is refused, it does.
    _libc.madvise(address, nbytes, mmap.MADV_DONTDUMP)
    array = (ctypes.c_char * nbytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return array


def _map_at(address: int, nbytes: int, flag: int, fd: int, offset: int) -> None:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, nbytes, access, flag | _MAP_FIXED, fd, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def make_private(array: Range, used_bytes: int, fd: int, offset: int) -> None:
    """Give a mapped range pages of its own. What other processes write is not seen any more.

    Its bytes do not change, even if a thread writes to them meanwhile.

    Args:
        array: The range, or a view of all of it.
        used_bytes: How many bytes from its start are in use; the others are undefined afterwards.
        fd: Descriptor of the file.
        offset: First byte of the range in the file.

    Raises:
        OSError: If the system refuses it. The range is as it was.
    """
    _map_at(ctypes.addressof(array), len(array), mmap.MAP_PRIVATE, fd, offset)
    # The kernel copies each page when it is first written to.
    if not populate(array, 0, used_bytes):
        _write_to_pages(array, 0, used_bytes)


def populate(array: Range, start: int, end: int) -> bool:
    """Make the pages from ``start`` to ``end`` exist. Bytes before ``start`` are unchanged.

    One call for many pages takes a quarter of the time of writing to each page.

    Returns:
        Whether there is memory for them. If there is none, a write would end in SIGBUS.
    """
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    if _libc.madvise(ctypes.addressof(array) + first, end - first, _POPULATE_WRITE):
        if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
            return False
        # The kernel does not have the call, or a sandbox refuses it.
        _write_to_pages(array, whole_pages(start), end)
    return True


def _write_to_pages(array: Range, first: int, end: int) -> None:
    """Write to one byte of each page that begins in this range. Its value stays."""
    pages = memoryview(array).cast("B")[first : end : mmap.PAGESIZE]
    pages[:] = bytes(pages)


def punch_hole(fd: int, offset: int, nbytes: int) -> bool:
    """Give a range's pages back to the system, unless it refuses. They read as zeros after that."""
    where = ctypes.c_long(offset), ctypes.c_long(nbytes)
    return not _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *where)
