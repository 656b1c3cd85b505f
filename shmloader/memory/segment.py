"""Shared memory that is written once: for :func:`shmloader.share` and the payload of a pool.

A segment is an anonymous file in memory. It is filled from the front to the back and then sealed:
from then on no process can write to it, or make it shorter or longer. Each process maps the whole
of it privately: all processes read the one copy, and a page that a process writes to becomes its
own.

Guarantees:
    * Nothing has a name. The memory is freed with the last object that lies in it, in the last
      process that has one, even if processes are killed.
    * A process maps a segment once, however often it receives it.
    * A write to the mapping is seen only by the process that wrote, and its later forked children.

A segment is pickled as a handle. Where multiprocessing starts a process with it (spawn,
forkserver), its descriptor is passed on. Elsewhere (a queue, a pool's task) the handle names the
process that pickled the segment, and the descriptor in that process. The process that unpickles
the handle opens the file through ``/proc``, so the other one has to keep the segment until then.
"""

import ctypes
import fcntl
import mmap
import multiprocessing.context
import os
import secrets
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Self

from shmloader.errors import SharedMemoryError
from shmloader.memory.arena import align
from shmloader.memory.limits import control_groups, format_bytes, free_memory
from shmloader.memory.memfd import ADD_SEALS, MAPPING_OPTIONS, MEMFD_NAME, SEALS
from shmloader.process_state import PROCESS

# A seal of <linux/fcntl.h>, as in memfd.
_SEAL_WRITE = getattr(fcntl, "F_SEAL_WRITE", 8)

# <linux/mman.h>. Without it, a kernel that accounts for what might be written refuses a mapping
# that is larger than memory, though hardly any of it will be written to.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

#: Length of the random number at a segment's start. It distinguishes the segment from any other
#: file to which the descriptor number of a handle may refer.
TOKEN_BYTES = 16

# Bytes that are written between two checks that there is memory. A check takes some 100 µs.
_CHECK_BYTES = 32 << 20

# Bytes per call: Linux writes at most 2 GiB less a page.
_WRITE_BYTES = 1 << 30


class Segment(mmap.mmap):
    """A sealed segment, mapped. Its views keep it alive, and it owns its descriptor.

    Attributes:
        nbytes: Length in bytes.
        address: Address of the first byte in this process.
        is_common: Whether the ranks of this host have it from ``share_on_host``.
    """

    is_common = False
    _fd = -1
    _token: bytes
    nbytes: int
    address: int

    @classmethod
    def open(cls, fd: int, nbytes: int, token: bytes) -> Self:
        """Map a segment and take over the descriptor, unless this raises.

        Raises:
            SharedMemoryError: If the descriptor is not that of the segment.
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
            is_right = segment[:TOKEN_BYTES] == token
        except ValueError:  # the file is shorter
            is_right = False
        if not is_right:
            raise SharedMemoryError(_GONE)
        segment.madvise(mmap.MADV_DONTDUMP)
        segment._token = token
        segment.nbytes = nbytes
        segment.address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        PROCESS.segments[token] = segment
        segment._fd = fd
        return segment

    @classmethod
    def of_contents(cls, contents: Any) -> "Segment":
        """Return a segment of this process with the contents of a segment of another machine.

        Args:
            contents: The whole segment, as a buffer of bytes.

        Raises:
            SharedMemoryError: If there is not enough memory.
            OSError: If there is no address space, or no descriptor left.
        """
        view = memoryview(contents).cast("B")
        known: Segment | None = PROCESS.segments.get(bytes(view[:TOKEN_BYTES]))
        if known is not None:
            return known
        with SegmentWriter(bytes(view[:TOKEN_BYTES])) as writer:
            writer.append(view[TOKEN_BYTES:], is_aligned=False)
            return writer.finish()

    # When the interpreter exits, this may be called after the module's names are gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the descriptor; the memory is unmapped after this."""
        # The number is forgotten first: in a child that another thread forks meanwhile, a second
        # close might close another file of this number.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a handle."""
        return _handle(self._fd, self.nbytes, self._token)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle a handle. Without this, pickle would call mmap's, which raises."""
        return self.__reduce__()


def _handle(fd: int, nbytes: int, token: bytes) -> tuple[Any, ...]:
    where: Any = (os.getpid(), fd)
    if multiprocessing.context.get_spawning_popen() is not None:
        where = reduction.DupFd(fd)
    return _attach, (token, nbytes, where)


_GONE = (
    "the shared memory of a pickled handle is gone: the process that pickled it has dropped it, or "
    "has ended. It has to keep the shared object until the other process has unpickled it. (A "
    "process that is started with the object as an argument has it from the start.)"
)


def _attach(token: bytes, nbytes: int, where: Any) -> Segment:
    """Return the segment of a handle. Called by pickle.

    Raises:
        SharedMemoryError: If it is gone.
    """
    known: Segment | None = PROCESS.segments.get(token)
    if not isinstance(where, tuple):
        fd = where.detach()  # a duplicate, which is closed below unless the segment takes it
    elif known is not None:
        return known
    else:
        try:
            fd = os.open("/proc/{}/fd/{}".format(*where), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(_GONE) from error
    try:
        if known is None:
            os.set_inheritable(fd, False)  # spawn passes it on as inheritable
            segment = Segment.open(fd, nbytes, token)
            fd = -1
            return segment
        return known
    finally:
        if fd >= 0:
            os.close(fd)


def find_segment(address: int, nbytes: int) -> Segment | None:
    """Return the segment whose mapping contains these bytes; None if they lie elsewhere."""
    segments: list[Segment] = list(PROCESS.segments.values())
    for segment in segments:
        if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
            return segment
    return None


class SealedSegment:
    """A segment that this process does not map. It is unpickled as a :class:`Segment`.

    Attributes:
        fd: The descriptor; -1 once closed.
        nbytes: Length in bytes.
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
        self._close()

    def _close(self, close: Callable[[int], None] = os.close) -> None:
        fd, self.fd = self.fd, -1  # the number is forgotten first, as in a Segment
        if fd >= 0:
            close(fd)

    def __del__(self) -> None:
        """Close the descriptor."""
        self.close()


class SegmentWriter:
    """Fills a segment from the front to the back. Its creator closes or finishes it.

    Args:
        token: The segment's token; None for a new one.

    Raises:
        OSError: If there is no descriptor left.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._fd = -1
        self._token = secrets.token_bytes(TOKEN_BYTES) if token is None else token
        self._used = 0
        self._granted = 0
        self._groups = control_groups(Path("/"))
        self._fd = os.memfd_create(f"{MEMFD_NAME}-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.append(self._token)

    @property
    def used_bytes(self) -> int:
        """Bytes written so far."""
        return self._used

    def append(self, data: Any, *, is_aligned: bool = True) -> int:
        """Append a buffer.

        Args:
            data: Anything with a contiguous buffer.
            is_aligned: Whether its offset must be a multiple of 64.

        Returns:
            Its offset, in bytes.

        Raises:
            SharedMemoryError: If there is not enough memory.
        """
        view = memoryview(data).cast("B")
        start = align(self._used) if is_aligned else self._used
        self._check_memory(start - self._used + view.nbytes)
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
        """Append the bytes at an address of this process; the caller keeps them alive."""
        if nbytes == 0:
            return self.append(b"")
        return self.append((ctypes.c_char * nbytes).from_address(address))

    def _check_memory(self, nbytes: int) -> None:
        """Check that there is memory before it is touched."""
        if nbytes <= self._granted:
            self._granted -= nbytes
            return
        free = free_memory(Path("/"), self._groups)
        if free is not None and free.nbytes < nbytes:
            raise SharedMemoryError(
                f"not enough memory to share: at least {format_bytes(self._used + nbytes)} are "
                f"needed, once for all processes, but after {format_bytes(self._used)} of them "
                f"only {format_bytes(free.nbytes)} are free ({free.limit})."
            )
        self._granted = max(nbytes, _CHECK_BYTES) - nbytes

    def finish(self) -> Segment:
        """Seal the segment and map it.

        Raises:
            OSError: If there is no address space, or no descriptor left.
        """
        sealed = self.seal()
        segment = Segment.open(sealed.fd, sealed.nbytes, self._token)
        sealed.fd = -1
        return segment

    def seal(self) -> "SealedSegment":
        """Seal the segment."""
        # At least one byte more than was written, so that an empty last buffer has an address too.
        nbytes = align(self._used + 1)
        os.ftruncate(self._fd, nbytes)
        fcntl.fcntl(self._fd, ADD_SEALS, SEALS | _SEAL_WRITE)
        fd, self._fd = self._fd, -1  # only one object may own it, or it would be closed twice
        return SealedSegment(fd, nbytes, self._token)

    def close(self) -> None:
        """Discard the segment unless it is sealed. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Discard the segment, if an interruption came before the creator could close it."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
