"""A slot: a piece of shared memory, as an anonymous file and this process's mapping of it.

Guarantees:
    * Nothing has a name, so nothing is left behind in ``/dev/shm``, even if processes are killed.
      The size of ``/dev/shm`` does not matter either.
    * Views stay valid. Where a slot needs a longer mapping, its file is mapped once more: both
      mappings show the same bytes, and the old one is unmapped with its last view.
    * No process can shorten the file while another one uses it (it is sealed).

The file is made as long as the slot may ever become, and stays sparse: pages exist once they are
first written. So a slot grows without any message between processes. Address space is not as cheap:
it may be limited (``ulimit -v``), and after ``mlockall(MCL_FUTURE)`` the kernel gives every new
mapping all its pages at once. So a process maps only as much of a slot as its batches need, and a
little more.

Only this module makes the operating system's calls for slots.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Any, Self

from shmloader.errors import SharedMemoryError
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.memory.limits import address_space, format_bytes
from shmloader.memory.memfd import ADD_SEALS, MAPPING_OPTIONS, MEMFD_NAME, SEALS
from shmloader.memory.slot_size import longest_file, whole_pages
from shmloader.process_state import PROCESS

#: Every storage starts at a multiple of this many bytes: a cache line, and the alignment of the
#: widest vector instructions.
ALIGNMENT = 64

#: Bytes of a slot that are mapped at first. More is mapped when a batch needs it.
FIRST_BYTES = mmap.PAGESIZE

# A quarter more is mapped than is needed, so that a slightly larger batch needs no new mapping.
_SPARE_DIVISOR = 4

# Where address space is limited, all slots of a loader together have a quarter of it in each
# process, since the user's own memory needs the remainder. Above that, no more is mapped than is
# needed, and slots that are not in use are unmapped.
_LIMIT_DIVISOR = 4

# A slot has excess if it has more than this many times what it needs, plus this many bytes.
_EXCESS_FACTOR = 2
_EXCESS_BYTES = 16 << 20

# <linux/mman.h>; Linux 5.14.
_POPULATE_WRITE = 23

# Errors of madvise if there is no memory for pages.
_NO_PAGES = (errno.ENOMEM, errno.EFAULT)


def align(nbytes: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def has_excess(present_bytes: int, needed_bytes: int) -> bool:
    """Whether a slot holds or maps so much more than it needs that it should give some back."""
    return present_bytes > _EXCESS_FACTOR * needed_bytes + _EXCESS_BYTES


def close_inherited_slots() -> None:
    """Close all slots that a forked worker has inherited."""
    for slot in list(PROCESS.slots):
        slot.close()


class Slot:
    """A slot, of which this process maps as much as was needed so far. Its one owner closes it.

    Args:
        fd: Descriptor of the file, which the slot takes over, unless this raises.
        most_bytes: Length of the file.
        nbytes: Number of bytes to map at first; None for all of them.

    Attributes:
        most_bytes: Length of the file, fixed: the most that the slot may hold.
        nbytes: Length of the mapping.
        mapping: The mapped memory.
        address: Address of the mapping in this process.
        views: A reader or writer, and what it has built over the mapping for repeated use. Dropped
            with the mapping, and when another reader or writer puts its own views here.
    """

    __slots__ = (
        "__weakref__", "_array_type", "_fd", "address", "mapping", "most_bytes", "nbytes", "views",
    )  # fmt: skip

    def __init__(self, fd: int, most_bytes: int, nbytes: int | None = None) -> None:
        self._fd = -1
        self.most_bytes = most_bytes
        self._take(_map(fd, most_bytes if nbytes is None else nbytes))
        PROCESS.slots.add(self)
        self._fd = fd

    def _take(self, mapping: mmap.mmap) -> None:
        """Use this mapping from now on."""
        self.views: tuple[object, Any] = (None, None)
        self.mapping = mapping
        self._array_type = ctypes.c_char * len(mapping)
        self.address = ctypes.addressof(self._array_type.from_buffer(mapping))
        self.nbytes = len(mapping)

    def __del__(self) -> None:
        """Close the descriptor if a Ctrl-C came before the slot had an owner."""
        if os is not None:  # at the interpreter's end, modules are gone before their objects
            self.forget_descriptor()

    @classmethod
    def create(cls, most_bytes: int, nbytes: int | None = None) -> Self:
        """Make a slot. Runs in the main process.

        Args:
            most_bytes: The most that it may hold; rounded up to a whole page, and cut to the
                longest file allowed.
            nbytes: Number of bytes to map at first; None for all of them.

        Raises:
            SharedMemoryError: If it cannot be mapped.
            OSError: If there is no descriptor left (EMFILE).
        """
        most_bytes = min(whole_pages(most_bytes), whole_pages(longest_file(), up=False))
        nbytes = most_bytes if nbytes is None else min(most_bytes, whole_pages(nbytes))
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, most_bytes)
            fcntl.fcntl(fd, ADD_SEALS, SEALS)
            return cls(fd, most_bytes, nbytes)
        except BaseException as error:
            os.close(fd)
            # In older Pythons, the mapping needs a descriptor of its own.
            if not isinstance(error, OSError) or error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise SharedMemoryError(_describe_refusal(nbytes, error)) from error

    def remade(self, nbytes: int) -> "Slot":
        """Return another slot over the same file, mapped up to ``nbytes``; this one is unchanged.

        Raises:
            SharedMemoryError: If it cannot be mapped.
            OSError: If there is no descriptor left (EMFILE).
        """
        fd = os.dup(self._fd)
        try:
            return Slot(fd, self.most_bytes, min(self.most_bytes, whole_pages(nbytes)))
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise SharedMemoryError(_describe_refusal(nbytes, error)) from error

    def fileno(self) -> int:
        """Return the descriptor of the file, to be sent to a worker."""
        return self._fd

    def forget_descriptor(self) -> None:
        """Close the descriptor. The mapping stays, and cannot be changed any more."""
        # The number is forgotten first: if an interruption led to a second close, it might belong
        # to another file by then.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def reach(self, end: int, *, likely: int = 0, others: Iterable["Slot"] = ()) -> None:
        """Map the slot up to ``end``, and a little more, unless it is mapped that far already.

        Args:
            end: Bytes from its start that are needed.
            likely: Bytes from its start that are likely to be needed soon.
            others: Slots of the same owner. Where address space is short, those without views are
                unmapped for this one.

        Raises:
            SharedMemoryError: If it cannot be mapped. It stays mapped as far as it was.
        """
        if end <= self.nbytes:
            return
        least = whole_pages(end)
        wanted = min(self.most_bytes, whole_pages(max(end + end // _SPARE_DIVISOR, likely)))
        others = [other for other in others if other is not self]
        limit = address_space().limit_bytes
        if limit is not None:
            left = limit // _LIMIT_DIVISOR - sum(other.nbytes for other in others)
            for other in others:
                if left >= least:
                    break
                left += other.unmap()
            wanted = max(least, min(wanted, whole_pages(left, up=False)))
        try:
            self._replace(_map(self._fd, wanted))
        except OSError as error:
            if is_interruption(error):
                raise
            for other in others:
                other.unmap()
            self._remap(least)

    def _remap(self, nbytes: int) -> None:
        """Unmap the slot first, then map it: there may be no address space for two mappings.

        Raises:
            SharedMemoryError: If it cannot be mapped. It stays mapped as far as it was.
        """
        before = self.nbytes
        self.views = (None, None)
        if self._fd >= 0:
            with Suppressed(BufferError):  # a view is alive, so there have to be two mappings
                self.mapping.close()
        try:
            self._replace(_map(self._fd, nbytes))
        except OSError as error:
            if self.mapping.closed:
                self.nbytes = 0
                with Suppressed(OSError):
                    self._take(_map(self._fd, before))
            if is_interruption(error):
                raise
            raise SharedMemoryError(_describe_refusal(nbytes, error)) from error

    def shorten(self, needed_bytes: int) -> None:
        """Unmap what the slot has in excess of ``needed_bytes``, if it has excess."""
        if has_excess(self.nbytes, needed_bytes):
            with Suppressed(OSError):
                self._replace(_map(self._fd, max(FIRST_BYTES, whole_pages(needed_bytes))))

    def _replace(self, mapping: mmap.mmap) -> None:
        before = self.mapping
        self._take(mapping)
        with Suppressed(BufferError):  # a view is alive, and keeps the mapping
            before.close()

    def unmap(self) -> int:
        """Unmap all but one page, unless a view is alive. Return the number of unmapped bytes."""
        before = self.nbytes
        if before > FIRST_BYTES:
            self.views = (None, None)
            with Suppressed(OSError, BufferError):
                page = _map(self._fd, FIRST_BYTES)
                self.mapping.close()
                self._take(page)
        return before - self.nbytes

    def array(self) -> "ctypes.Array[ctypes.c_char]":
        """Return a new ctypes array over the whole mapping, which keeps the mapping alive.

        It spans the whole mapping because for each new length, ctypes has to make a new type, which
        takes some fifty times as long as an array of a known type.
        """
        return self._array_type.from_buffer(self.mapping)

    def populate(self, start: int, end: int) -> None:
        """Make the pages from ``start`` to ``end`` exist. Bytes before ``start`` are unchanged.

        One call for many pages takes a quarter of the time of writing to each page.

        Raises:
            SharedMemoryError: If there is no memory for them; a write would have ended in SIGBUS.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self.mapping.madvise(_POPULATE_WRITE, first, end - first)
        except OSError as error:
            if is_interruption(error):
                raise
            if error.errno in _NO_PAGES:
                raise SharedMemoryError(f"no memory for a slot's pages: {error}") from error
            # The kernel does not have the call, or a sandbox refuses it: write one byte of each
            # page that begins in this range.
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if first < end:
                pages = memoryview(self.mapping)[first : end : mmap.PAGESIZE]
                pages[:] = bytes(len(pages))

    def give_back(self, from_byte: int) -> bool:
        """Give the pages from ``from_byte`` on back to the system. They read as zeros after that.

        Returns:
            Whether that was done. False if the system refuses it, as for locked pages.
        """
        start = whole_pages(from_byte)
        if start < self.nbytes:
            try:
                self.mapping.madvise(mmap.MADV_REMOVE, start, self.nbytes - start)
            except OSError as error:
                if is_interruption(error):
                    raise
                return False
        return True

    def close(self) -> None:
        """Unmap the slot. Views that are alive keep their mapping. May be called again."""
        self.forget_descriptor()
        self.views = (None, None)
        try:
            self.mapping.close()
        except BufferError:
            # A view is alive. This drops our reference, so the mapping ends with its last view.
            del self.mapping
        except AttributeError:
            pass


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if fd < 0:  # mmap would take this for anonymous memory
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    mapping = mmap.mmap(fd, nbytes, **MAPPING_OPTIONS)
    # Otherwise a core dump of a worker would contain every slot. If this is refused, it does.
    with Suppressed(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def _describe_refusal(nbytes: int, error: OSError) -> str:
    """Return why a slot cannot be mapped, and the remedy."""
    text = f"cannot map {format_bytes(nbytes)} of a slot of shared memory: {error.strerror}. "
    space = address_space()
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{text}Raise `ulimit -n`, or lower num_workers or prefetch_factor."
    if error.errno == errno.ENOMEM and space.limit_bytes is not None:
        return (
            f"{text}The address space of this process is limited to {space.describe()}: raise "
            "that limit, or lower batch_size, prefetch_factor or num_workers."
        )
    if error.errno == errno.EAGAIN:
        return f"{text}This process locks its memory (mlockall): raise `ulimit -l`."
    return f"{text}Lower batch_size, prefetch_factor or num_workers."
