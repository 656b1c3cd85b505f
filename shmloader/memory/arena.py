"""The arena: all slots of one engine, in one sparse file in memory.

Slots lie at a fixed distance. The file is as long as all slots may ever become, and stays sparse:
pages exist once they are first written. So a slot grows without any message between processes, and
a process needs one descriptor for all slots. A worker gets it when it starts.

Guarantees:
    * Nothing has a name, so nothing is left in ``/dev/shm``, and its size does not matter.
    * Views stay valid. Where a slot needs a longer mapping, it is mapped once more: both mappings
      show the same bytes, and the old one is unmapped with its last view.
    * No process can shorten the file while another one uses it (it is sealed).

Address space may be limited (``ulimit -v``), and after ``mlockall(MCL_FUTURE)`` the kernel gives
every new mapping all its pages at once. So a process maps only as much of a slot as its batches
need, and a little more.

The module is long because it documents what the kernel is asked for; half of it is code.
"""

import ctypes
import errno
import fcntl
import io
import mmap
import os
import resource
import sys
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, Self
from weakref import ref

import numpy as np

from shmloader.errors import SharedMemoryError
from shmloader.grammar import counted, size
from shmloader.process_state import PROCESS

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

#: Every storage starts at a multiple of this many bytes: a cache line, and the alignment of the
#: widest vector instructions.
ALIGNMENT = 64

# The most bytes of a slot where the user set no cap.
_MOST_BYTES = 1 << 37

# A quarter more is mapped than is needed, so that a slightly larger batch needs no new mapping.
_SPARE_DIVISOR = 4

#: A slot has excess if it has more than twice what it needs, plus this many bytes.
EXCESS_BYTES = 16 << 20

#: A mapped range: a ctypes array of bytes. The range is unmapped with the last view of it.
Range = Any

_UNMAPPED = memoryview(b"")


def align(nbytes: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def whole_pages(nbytes: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def soft_limit(kind: int) -> int | None:
    """Return a limit of :mod:`resource`; None if there is none, or it cannot be read."""
    try:
        soft, _ = resource.getrlimit(kind)
    except OSError as error:  # a sandbox refuses the call
        if error.errno is None:  # a signal handler's
            raise
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def has_excess(present_bytes: int, needed_bytes: int) -> bool:
    """Whether a slot holds or maps so much more than it needs that it should give some back."""
    return present_bytes > 2 * needed_bytes + EXCESS_BYTES


class MemoryFile(io.FileIO):
    """A file in memory, or one of the host. It is closed once nothing refers to it."""

    def __del__(self) -> None:
        """Close the file. Its own finalizer would warn."""
        self.close()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle for a process that is being started; any other pickle raises."""
        return _received, (reduction.DupFd(self.fileno()),)


def _received(handle: Any) -> MemoryFile:
    """Return the file of a handle. Called by pickle."""
    fd = handle.detach()
    os.set_inheritable(fd, False)  # spawn passes it on as inheritable
    return MemoryFile(fd, "r+")


def memory_file(name: str = "") -> MemoryFile:
    """Return a new anonymous file in memory. ``name`` follows ``MEMFD_NAME`` in its name.

    Raises:
        OSError: If there is no descriptor left.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    # In one call, between whose parts no signal handler runs: it would lose the descriptor.
    return next(map(MemoryFile, map(os.memfd_create, [MEMFD_NAME + name], [flags]), ["r+"]))


def map_range(fd: int, offset: int, nbytes: int) -> Range:
    """Map a range of a file, which may be closed then, shared with all processes that map it.

    Python's own mmap would keep a duplicate of the descriptor with each mapping (before 3.13). So
    the range is mapped over addresses that Python's mmap has reserved, and unmaps in the end.

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


def populate(array: Range, start: int, end: int) -> bool:
    """Make the pages from ``start`` to ``end`` exist. Bytes before ``start`` are unchanged.

    One call for many pages takes a quarter of the time of writing to each page.

    Returns False if there is no memory for them: a write would end in SIGBUS.
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


class Lease(ref[Any]):
    """Refers to the array over a slot that the user's views keep alive.

    torch and numpy keep that array alive for as long as any storage or array made from it lives:
    slices, ``.numpy()``, ``.detach()``, DLPack capsules and autograd's saved tensors included. It
    must not be an ndarray subclass: numpy replaces the base of a view by the base's base.
    """

    __slots__ = ("slot_id",)

    slot_id: int


class Slot:
    """A slot, of which this process maps as much as was needed so far.

    Attributes:
        slot_id: Its number.
        nbytes: How many bytes from its start are mapped.
        memory: The mapped bytes.
        mapping: The mapped range; None if nothing is mapped.
        address: Address of the mapping in this process.
        touched_bytes: How many bytes from its start have pages, as far as this process knows.
        views: A layout, or its reader, and views of the mapping that were built for it. Dropped
            with the mapping, and when others are put here.
        lease: The lease, if the slot was ever lent.
        kept: A lease that a forked child may read for ever, so that the slot's pages must stay;
            None for none.
    """

    def __init__(self, slot_id: int) -> None:
        self.slot_id = slot_id
        self.touched_bytes = 0
        self.lease: Lease | None = None
        self.kept: object = None
        self.unmap()

    def unmap(self) -> None:
        """Drop the mapping, which stays under live views."""
        self.nbytes = 0
        self.views: tuple[object, Any] = (None, None)
        self.memory = _UNMAPPED
        self.mapping: Range = None
        self.address = 0

    def use(self, array: Range) -> None:
        """Use this mapping from now on."""
        self.views = (None, None)
        self.mapping = array
        self.memory = memoryview(array).cast("B")
        self.address = ctypes.addressof(array)
        self.nbytes = len(array)

    def array(self) -> "ctypes.Array[ctypes.c_char]":
        """Return a new ctypes array over the whole mapping, which keeps the mapping alive."""
        array: ctypes.Array[ctypes.c_char] = type(self.mapping).from_buffer(self.mapping)
        return array

    def lend(self, ended: Callable[[Lease], object]) -> "ctypes.Array[ctypes.c_char]":
        """Return an array over the slot, to which the caller must keep no reference.

        When the array has died, ``ended`` is called with the lease, on any thread, even inside a
        lock or the garbage collector.
        """
        array: ctypes.Array[ctypes.c_char] = type(self.mapping).from_buffer(self.mapping)
        self.lease = Lease(array, ended)
        self.lease.slot_id = self.slot_id
        return array

    @property
    def is_lent(self) -> bool:
        """Whether the lease is alive, and the mapping with it."""
        return self.lease is not None and self.lease() is not None


class Arena:
    """The slots of an engine, and one process's mappings of them. Its one owner closes it.

    Pickled for a process that is being started, it arrives there as an arena over the same file.

    Args:
        file: The file, which the arena takes over.
        slot_bytes: The most bytes that a slot may hold: the distance of two slots in the file.
        slot_count: The number of slots.

    Attributes:
        slots: The slots, by number.
        slot_bytes: The most bytes that a slot may hold.
        is_read_by_device: Whether only devices and our own copies read the slots. The user then
            gets no view of them, and their mappings must not be changed without need.
    """

    def __init__(self, file: MemoryFile, slot_bytes: int, slot_count: int) -> None:
        self._file, self.slot_bytes = file, slot_bytes
        self.slots = [Slot(slot_id) for slot_id in range(slot_count)]
        self.is_read_by_device = False
        PROCESS.arenas[id(self)] = self

    @classmethod
    def create(cls, slot_bytes: int | None, slot_count: int) -> Self:
        """Make the file, in the process that owns the slots; for the arguments, see the class.

        A slot may hold less than ``slot_bytes`` if files may not be that long. None stands for as
        much as any batch needs.

        Raises:
            OSError: If there is no descriptor left (EMFILE).
        """
        limit = soft_limit(resource.RLIMIT_FSIZE)
        most_bytes = (sys.maxsize if limit is None else limit) // slot_count
        wanted = _MOST_BYTES if slot_bytes is None else whole_pages(slot_bytes)
        slot_bytes = min(wanted, most_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
        file = memory_file()
        os.ftruncate(file.fileno(), slot_bytes * slot_count)
        fcntl.fcntl(file.fileno(), ADD_SEALS, SEALS)
        return cls(file, slot_bytes, slot_count)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a process that is being started."""
        return Arena, (self._file, self.slot_bytes, len(self.slots))

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return -1 if self._file.closed else self._file.fileno()

    def describe_limit(self, needed_bytes: int) -> str:
        """Return how much a slot may have, why, and the remedy."""
        count = len(self.slots)
        mebibytes = -(-count * whole_pages(needed_bytes) // (1 << 20))
        return (
            f"shm_size (or `ulimit -f`) leaves only {size(self.slot_bytes)} for each of "
            f"{counted(count, 'slot')}. Raise it: shm_size='{mebibytes}MiB' suffices for this"
        )

    def reach(self, slot: Slot, end: int, *, likely: int = 0) -> None:
        """Map a slot up to ``end``, and a little more, unless it is mapped that far already.

        Where address space is short, slots that are not in use are unmapped for this one.

        Args:
            slot: The slot.
            end: Bytes from its start that are needed.
            likely: Bytes from its start that are likely to be needed soon.

        Raises:
            SharedMemoryError: If it cannot be mapped. What was mapped of it may be unmapped.
        """
        if end <= slot.nbytes:
            return
        wanted = whole_pages(max(end + end // _SPARE_DIVISOR, likely))
        if self._map(slot, min(self.slot_bytes, wanted)) is None:
            return
        for other in (*self.slots, slot):  # there may be no address space for two mappings
            if other is slot or not (self.is_read_by_device or other.is_lent):
                other.unmap()
        refusal = self._map(slot, whole_pages(end))
        if refusal is not None:
            raise SharedMemoryError(
                f"cannot map {size(end)} of a slot of shared memory: {refusal.strerror}. Lower "
                "batch_size, prefetch_factor or num_workers, or raise the limit on address space "
                "(`ulimit -v`) or on locked memory (`ulimit -l`)."
            ) from refusal

    def _map(self, slot: Slot, nbytes: int) -> OSError | None:
        """Map the first bytes of a slot. Returns the error if there is no address space."""
        try:
            slot.use(map_range(self.fileno(), slot.slot_id * self.slot_bytes, nbytes))
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EPERM, errno.EACCES):
                raise
            return error
        return None

    def give_back(self, slot: Slot, from_byte: int) -> bool:
        """Give back a slot's pages from ``from_byte`` on. Returns False if that is refused."""
        start = whole_pages(from_byte)
        where = slot.slot_id * self.slot_bytes + start, self.slot_bytes - start
        mode, fd = _KEEP_SIZE | _PUNCH_HOLE, self.fileno()
        if where[1] > 0 and _libc.fallocate(fd, mode, *map(ctypes.c_long, where)):
            return False
        slot.touched_bytes = min(slot.touched_bytes, from_byte)
        return True

    def part(self, slot: Slot, array: Any, used_bytes: int) -> None:
        """Leave the slot's bytes to the views of it that others hold, and map it anew when needed.

        The bytes under the views become private to this process, and its later children. So the
        slot may be filled again. They do not change, even if a thread writes to them meanwhile.

        Args:
            slot: The slot.
            array: A view of a whole mapping of it.
            used_bytes: Bytes from its start that are in use; the others are undefined then.

        Raises:
            OSError: If the system refuses it. The views still show the slot.
        """
        offset = slot.slot_id * self.slot_bytes
        _map_at(ctypes.addressof(array), len(array), mmap.MAP_PRIVATE, self.fileno(), offset)
        # The kernel copies each page when it is first written to.
        if not populate(array, 0, used_bytes):
            _write_to_pages(array, 0, used_bytes)
        if ctypes.addressof(array) == slot.address:
            slot.unmap()

    def part_lent(self) -> None:
        """Part the user's batches from their slots. Called before this process forks (I9).

        A child sees the user's batches for as long as it lives, while the slots are filled again.
        """
        if self._file.closed or self.is_read_by_device:
            return
        for slot in self.slots:
            array = None if slot.lease is None else slot.lease()
            if array is None or not slot.nbytes:
                continue
            slot.kept = array  # unless all of this succeeds, the slot is lent for good
            try:
                self.part(slot, array, slot.touched_bytes)
                slot.kept = None
            except OSError as error:
                if error.errno is None:  # a signal handler's
                    raise

    def leave_to_parent(self) -> None:
        """Drop the parent's mappings in a forked worker, which uses the same slots."""
        for slot in self.slots:
            slot.unmap()
            slot.lease = slot.kept = None

    def close(self) -> None:
        """Unmap all slots, except for memory under live views. May be called again."""
        self._file.close()  # at once, so that no interruption comes between
        for slot in self.slots:
            slot.unmap()
            slot.kept = None
