"""One piece of shared memory: an anonymous file, mapped once in each process.

Guarantees:
    * Nothing has a name: whatever dies, nothing is left behind in ``/dev/shm``, whose
      size does not matter either.
    * The mapping never moves and never changes its length, so views of it stay valid.
    * No process can make the file shorter under another one's feet (it is sealed).

The file is made as long as the slot may ever become, and stays sparse: pages exist from
the moment they are first written. So a slot grows without a word between processes.

This module and :mod:`shmloader.memory.segment` name the operating system's calls for memory;
no other does.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
import weakref
from typing import Any, ClassVar, Self

from shmloader.errors import SharedMemoryError

#: Every storage starts at a multiple of this many bytes: a cache line, and what the widest
#: vector instructions like.
ALIGNMENT = 64

#: Name of the anonymous files, as /proc/<pid>/maps shows it.
MEMFD_NAME = "shmloader"

# Older Pythons keep a duplicate of the descriptor with each mapping.
MAPPING_OPTIONS = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Longest file made where no cap was asked for. 47 bits of addresses have room for a
# thousand of them.
_MOST_BYTES = 1 << 37

# fcntl's seals, <linux/fcntl.h>; the fcntl module names them on Linux only.
ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
SEALS = (
    getattr(fcntl, "F_SEAL_SEAL", 1) | getattr(fcntl, "F_SEAL_SHRINK", 2)
    | getattr(fcntl, "F_SEAL_GROW", 4)
)  # fmt: skip

# <linux/mman.h>; Linux 5.14.
_POPULATE_WRITE = 23


def align(nbytes: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@functools.cache
def is_supported() -> bool:
    """Whether this system has what slots and their workers need: memfd and pidfd (Linux 5.3)."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.memfd_create(MEMFD_NAME))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        # An older kernel, or a sandbox; not so a lack of descriptors, which is told when it hurts.
        return error.errno not in (errno.ENOSYS, errno.EPERM)
    return True


def uncapped_slot_bytes() -> int:
    """Length of a slot where the user set no cap: all the memory that there is."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _MOST_BYTES)


class _Slots:
    """The slots of this process, for a forked worker to close what is not its own."""

    live: ClassVar["weakref.WeakSet[Slot]"] = weakref.WeakSet()


def close_inherited_slots() -> None:
    """Close, in a forked worker, all slots of the process that it was forked from."""
    for slot in list(_Slots.live):
        slot.close()


class Slot:
    """A mapped slot. Has one owner, who closes it.

    Attributes:
        nbytes: Length of the slot, fixed.
        mapping: The memory.
        address: Where the mapping starts in this process.
        views: What somebody has built over the mapping, to use again and again, and who; closed
            with it. One user at a time: another one's views are replaced.
    """

    __slots__ = ("__weakref__", "_array_type", "_fd", "address", "mapping", "nbytes", "views")

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map ``nbytes`` of ``fd``, and own the descriptor, unless this raises."""
        self._fd = -1
        self.nbytes = nbytes
        self.mapping = mmap.mmap(fd, nbytes, **MAPPING_OPTIONS)
        # A core dump of a worker would otherwise hold every slot.
        self.mapping.madvise(mmap.MADV_DONTDUMP)
        self._array_type = ctypes.c_char * nbytes
        self.views: tuple[object, Any] = (None, None)
        _Slots.live.add(self)
        self.address = ctypes.addressof(self._array_type.from_buffer(self.mapping))
        self._fd = fd

    def __del__(self) -> None:
        """Close the descriptor where a Ctrl-C came before anybody owned the slot."""
        self.forget_descriptor()

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Make a slot of ``nbytes``, rounded up to a whole page.

        Runs in the main process. Under a limit on address space (``ulimit -v``) the
        slot is made shorter until it fits.

        Raises:
            SharedMemoryError: If not even a small one can be mapped.
            OSError: If there is no descriptor left (EMFILE).
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        while True:
            fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, ADD_SEALS, SEALS)
                return cls(fd, nbytes)
            except BaseException as error:
                os.close(fd)
                if not isinstance(error, OSError):
                    raise
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise  # the mapping has a descriptor of its own in older Pythons
                if nbytes <= 1 << 20:
                    raise SharedMemoryError(
                        f"cannot map a slot of {nbytes} bytes of shared memory: {error}"
                    ) from error
                nbytes = max(1 << 20, nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE)

    def fileno(self) -> int:
        """Descriptor of the file, to be sent to a worker."""
        return self._fd

    def forget_descriptor(self) -> None:
        """Close the descriptor; the mapping stays. For the process that sends it to nobody."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def array(self) -> "ctypes.Array[ctypes.c_char]":
        """A new object that exports the whole slot and keeps its memory mapped.

        It spans the whole slot because ctypes makes a new type for each new length, which
        costs some fifty times as much as an array of a known type.
        """
        return self._array_type.from_buffer(self.mapping)

    def populate(self, start: int, end: int) -> None:
        """Make the pages from ``start`` to ``end`` exist. What is before ``start`` stays as it is.

        Many at a time: a quarter of what they cost one by one, as they are written.

        Raises:
            SharedMemoryError: If the system has none; a write would have ended in SIGBUS.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self.mapping.madvise(_POPULATE_WRITE, first, end - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise SharedMemoryError(f"no memory for a slot's pages: {error}") from error
            # A kernel that does not know it: one byte of each page that begins here.
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if first < end:
                pages = memoryview(self.mapping)[first : end : mmap.PAGESIZE]
                pages[:] = bytes(len(pages))

    def give_back(self, from_byte: int) -> None:
        """Return the pages from ``from_byte`` on to the system. They read as zeros from now on."""
        start = -(-from_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.nbytes:
            self.mapping.madvise(mmap.MADV_REMOVE, start, self.nbytes - start)

    def close(self) -> None:
        """Unmap. Where views are still alive, the last of them does; may be called again."""
        self.forget_descriptor()
        self.views = (None, None)
        try:
            self.mapping.close()
        except BufferError:
            # Somebody holds a view. The mapping object goes with it, since we drop ours.
            del self.mapping
        except AttributeError:
            pass
