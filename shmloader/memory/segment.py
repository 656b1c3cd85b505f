"""Shared memory that is written once: what :func:`shmloader.share` and a pool's payload lie in.

A segment is an anonymous file in memory, filled from the front to the back, then sealed: from
then on no process can change, cut or lengthen it. Each process maps it whole, privately: what is
read is the one copy that all share, and a page that a process writes to becomes its own.

Guarantees:
    * Nothing has a name. The memory is gone with the last object that lies in it, in the last
      process that has one, whatever dies.
    * A process maps a segment once, however often it is handed one.
    * What is written to the mapping stays in the process that wrote it, and its forked children.

A segment is pickled as a handle. Where multiprocessing starts a process with it (spawn,
forkserver), its descriptor goes along. Elsewhere (a queue, a pool's task) the handle names the
process that pickled it, and whoever unpickles it opens the file there; so that process has to
hold it until then.
"""

import ctypes
import fcntl
import mmap
import multiprocessing.context
import os
import secrets
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any, ClassVar, Self

from shmloader.errors import SharedMemoryError
from shmloader.memory.limits import control_groups, format_bytes, free_memory
from shmloader.memory.slot import ADD_SEALS, MAPPING_OPTIONS, MEMFD_NAME, SEALS, align

# fcntl's, <linux/fcntl.h>.
_SEAL_WRITE = getattr(fcntl, "F_SEAL_WRITE", 8)

# <linux/mman.h>. Else a kernel that accounts for what might be written refuses a mapping that is
# larger than memory, though hardly any of it will be.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# A random number at a segment's start: tells it from another file under the same number.
_TOKEN_BYTES = 16

# What may be written before it is asked again whether there is memory: a look takes some 100 µs.
_ASK_BYTES = 32 << 20

# Linux writes no more by one call than 2 GiB less a page.
_WRITE_BYTES = 1 << 30


class _Segments:
    """The segments that this process has mapped, by their tokens."""

    live: ClassVar["weakref.WeakValueDictionary[bytes, Segment]"] = weakref.WeakValueDictionary()


class Segment(mmap.mmap):
    """A sealed segment, mapped. The views of it keep it, and it keeps its descriptor.

    Attributes:
        nbytes: Its length.
        address: Where it begins in this process.
    """

    _fd = -1
    _token: bytes
    nbytes: int
    address: int

    @classmethod
    def open(cls, fd: int, nbytes: int, token: bytes) -> Self:
        """Map it, and own the descriptor, unless this raises.

        Raises:
            SharedMemoryError: If the descriptor is that of something else.
            OSError: If there is no address space, or no descriptor left.
        """
        try:
            segment = cls(
                fd,
                nbytes,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                **MAPPING_OPTIONS,
            )
            is_right = segment[:_TOKEN_BYTES] == token
        except ValueError:  # it is shorter
            is_right = False
        if not is_right:
            raise SharedMemoryError(_GONE)
        segment.madvise(mmap.MADV_DONTDUMP)
        segment._token = token
        segment.nbytes = nbytes
        segment.address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        _Segments.live[token] = segment
        segment._fd = fd
        return segment

    def __del__(self) -> None:
        """Close the descriptor; the memory is unmapped after this."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a handle."""
        return _handle(self._fd, self.nbytes, self._token)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """The same; mmap's own, which comes first, refuses."""
        return self.__reduce__()


def _handle(fd: int, nbytes: int, token: bytes) -> tuple[Any, ...]:
    where: Any = (os.getpid(), fd)
    if multiprocessing.context.get_spawning_popen() is not None:
        where = reduction.DupFd(fd)
    return _attach, (token, nbytes, where)


_GONE = (
    "the shared memory of a pickled handle is gone: the process that pickled it has dropped it, or "
    "ended. It has to hold what it shared until the other side has unpickled it; a process that "
    "is started with it as an argument has it from the start."
)


def _attach(token: bytes, nbytes: int, where: Any) -> Segment:
    """The segment of a handle. Called by pickle.

    Raises:
        SharedMemoryError: If it is gone.
    """
    known = _Segments.live.get(token)
    if not isinstance(where, tuple):
        fd = where.detach()  # ours to close, in any case
    elif known is not None:
        return known
    else:
        try:
            fd = os.open("/proc/{}/fd/{}".format(*where), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(_GONE) from error
    try:
        if known is None:
            os.set_inheritable(fd, False)  # spawn's comes so
            segment = Segment.open(fd, nbytes, token)
            fd = -1
            return segment
        return known
    finally:
        if fd >= 0:
            os.close(fd)


def find_segment(address: int, nbytes: int) -> Segment | None:
    """The segment in whose mapping so many bytes at an address lie, if they lie in one."""
    for segment in list(_Segments.live.values()):
        if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
            return segment
    return None


class SealedSegment:
    """A segment that this process does not map. Pickled, it becomes a :class:`Segment`.

    Attributes:
        fd: Its descriptor; -1: closed.
        nbytes: Its length.
    """

    def __init__(self, fd: int, nbytes: int, token: bytes) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._token = token

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a handle."""
        return _handle(self.fd, self.nbytes, self._token)

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close


class SegmentWriter:
    """Fills a segment, from the front to the back. Closed, or finished, by who made it."""

    def __init__(self) -> None:
        """Make an empty one.

        Raises:
            OSError: If there is no descriptor left.
        """
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._fd = os.memfd_create(f"{MEMFD_NAME}-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._used = 0
        self._granted = 0
        self._groups = control_groups(Path("/"))
        self.append(self._token)

    @property
    def used_bytes(self) -> int:
        """How long it is by now."""
        return self._used

    def append(self, data: Any, *, is_aligned: bool = True) -> int:
        """Write a buffer behind what is there.

        Args:
            data: Anything with a contiguous buffer.
            is_aligned: Whether it is to begin at a multiple of 64.

        Returns:
            Its offset, in bytes.

        Raises:
            SharedMemoryError: If there is no memory for it.
        """
        view = memoryview(data).cast("B")
        start = align(self._used) if is_aligned else self._used
        self._ask(start - self._used + view.nbytes)
        position = start
        for at in range(0, view.nbytes, _WRITE_BYTES):
            part = view[at : at + _WRITE_BYTES]
            while part.nbytes:
                written = os.pwrite(self._fd, part, position)
                position += written
                part = part[written:]
        self._used = start + view.nbytes
        return start

    def append_memory(self, address: int, nbytes: int) -> int:
        """The same of bytes that somebody else keeps at an address of this process."""
        if nbytes == 0:
            return self.append(b"")
        return self.append((ctypes.c_char * nbytes).from_address(address))

    def _ask(self, nbytes: int) -> None:
        """Look whether there is memory, before it is touched."""
        if nbytes <= self._granted:
            self._granted -= nbytes
            return
        wanted = max(nbytes, _ASK_BYTES)
        free = free_memory(Path("/"), self._groups)
        if free is not None and free.nbytes < nbytes:
            raise SharedMemoryError(
                f"{format_bytes(self._used + nbytes)} of shared memory or more are to be written "
                f"once for all processes, but after {format_bytes(self._used)} of them "
                f"{format_bytes(free.nbytes)} are free ({free.limit})."
            )
        self._granted = wanted - nbytes

    def finish(self) -> Segment:
        """Seal it and map it.

        Raises:
            OSError: If there is no address space, or no descriptor left.
        """
        sealed = self.seal()
        segment = Segment.open(sealed.fd, sealed.nbytes, self._token)
        sealed.fd = -1
        return segment

    def seal(self) -> "SealedSegment":
        """Seal it."""
        # A page of zeros at the end: what lies last may be empty, and has a place all the same.
        nbytes = align(self._used + 1)
        os.ftruncate(self._fd, nbytes)
        fcntl.fcntl(self._fd, ADD_SEALS, SEALS | _SEAL_WRITE)
        sealed = SealedSegment(self._fd, nbytes, self._token)
        self._fd = -1
        return sealed

    def close(self) -> None:
        """Throw it away, unless it is finished; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        """The writer; closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
