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

The large buffers of a pickle (:mod:`shmloader.memory.pickled`) become views of the segment where
the pickle is loaded. A read-only memory map, which may be larger than memory, is not copied: the
other process maps the same file, copy-on-write, so that the array may be written to there.
"""

import ctypes
import fcntl
import mmap
import multiprocessing.context
import os
import secrets
from pathlib import Path
from typing import Any, Self

from shmloader.errors import SharedMemoryError
from shmloader.grammar import size
from shmloader.memory.arena import ADD_SEALS, MAPPING_OPTIONS, SEALS, MemoryFile, align, memory_file
from shmloader.memory.limits import control_groups, free_memory
from shmloader.memory.pickled import OutOfBand, Span, load, open_span
from shmloader.process_state import PROCESS

# A seal of <linux/fcntl.h>, as in the arena.
_SEAL_WRITE = getattr(fcntl, "F_SEAL_WRITE", 8)

# <linux/mman.h>. Without it, a kernel that accounts for what might be written refuses a mapping
# that is larger than memory, though hardly any of it will be written to.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

#: Length of the random number at a segment's start. It distinguishes the segment from any other
#: file to which the descriptor number of a handle may refer.
TOKEN_BYTES = 16

#: Smaller buffers stay in the pickle: their entry in the table would cost as much.
BULK_BYTES = 512

# Bytes that are written between two checks that there is memory. A check takes some 100 µs.
_CHECK_BYTES = 32 << 20

# Bytes per call: Linux writes at most 2 GiB less a page.
_WRITE_BYTES = 1 << 30

_GONE = (
    "the shared memory of a pickled handle is gone: the process that pickled it has dropped it, or "
    "has ended. It has to keep the shared object until the other process has unpickled it. (A "
    "process that is started with the object as an argument has it from the start.)"
)


class SealedSegment:
    """A segment that this process does not map. It is unpickled as a :class:`Segment`.

    Attributes:
        file: The file.
        nbytes: Length in bytes.
        token: The random number at its start.
    """

    def __init__(self, file: MemoryFile, nbytes: int, token: bytes) -> None:
        self.file, self.nbytes, self.token = file, nbytes, token

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a handle."""
        is_starting = multiprocessing.context.get_spawning_popen() is not None
        where = self.file if is_starting else (os.getpid(), self.file.fileno())
        return _attach, (self.token, self.nbytes, where)

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        self.file.close()


class Segment(mmap.mmap):
    """A sealed segment, mapped. Its views keep it alive, and it owns its descriptor.

    Attributes:
        nbytes: Length in bytes.
        address: Address of the first byte in this process.
        token: The random number at its start.
        sealed: What it maps, with its file.
    """

    nbytes: int
    address: int
    token: bytes
    sealed: SealedSegment

    @classmethod
    def open(cls, sealed: SealedSegment) -> Self:
        """Map a segment and take over the file.

        Raises:
            SharedMemoryError: If the file is not that of the segment.
            OSError: If there is no address space, or no descriptor left.
        """
        try:
            segment = cls(
                sealed.file.fileno(),
                sealed.nbytes,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                **MAPPING_OPTIONS,
            )
        except ValueError:  # the file is shorter
            raise SharedMemoryError(_GONE) from None
        if segment[:TOKEN_BYTES] != sealed.token:
            raise SharedMemoryError(_GONE)
        segment.madvise(mmap.MADV_DONTDUMP)
        segment.nbytes, segment.token, segment.sealed = sealed.nbytes, sealed.token, sealed
        segment.address = ctypes.addressof(ctypes.c_char.from_buffer(segment))
        PROCESS.segments[sealed.token] = segment
        return segment

    @classmethod
    def of_contents(cls, contents: Any) -> "Segment":
        """Return a segment of this process with the contents of a segment of another machine.

        Raises:
            SharedMemoryError: If there is not enough memory.
            OSError: If there is no address space, or no descriptor left.
        """
        view = memoryview(contents).cast("B")
        token = bytes(view[:TOKEN_BYTES])
        known: Segment | None = PROCESS.segments.get(token)
        if known is not None:
            return known
        with SegmentWriter(token) as writer:
            writer.append(view[TOKEN_BYTES:], is_aligned=False)
            return writer.finish()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle a handle. Without this, pickle would call mmap's, which raises."""
        return self.sealed.__reduce__()


def _attach(token: bytes, nbytes: int, where: Any) -> Segment:
    """Return the segment of a handle. Called by pickle.

    Raises:
        SharedMemoryError: If it is gone.
    """
    known: Segment | None = PROCESS.segments.get(token)
    if known is not None:
        return known
    if not isinstance(where, MemoryFile):
        try:
            where = MemoryFile("/proc/{}/fd/{}".format(*where))
        except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
            raise SharedMemoryError(_GONE) from error
    return Segment.open(SealedSegment(where, nbytes, token))


def find_segment(address: int, nbytes: int) -> Segment | None:
    """Return the segment whose mapping contains these bytes; None if they lie elsewhere."""
    segments: list[Segment] = list(PROCESS.segments.values())
    for segment in segments:
        if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
            return segment
    return None


class SegmentWriter:
    """Fills a segment from the front to the back. Its creator closes or finishes it.

    Attributes:
        used_bytes: Bytes written so far.

    Args:
        token: The segment's token; None for a new one.

    Raises:
        OSError: If there is no descriptor left.
    """

    def __init__(self, token: bytes | None = None) -> None:
        token = secrets.token_bytes(TOKEN_BYTES) if token is None else token
        self._sealed = SealedSegment(memory_file("-segment"), 0, token)
        self._groups = control_groups(Path("/"))
        self.used_bytes = self._granted = 0
        self.append(token)

    def append(self, data: Any, *, is_aligned: bool = True) -> int:
        """Append a contiguous buffer, and return its offset in bytes, a multiple of 64 if aligned.

        Raises:
            SharedMemoryError: If there is not enough memory.
        """
        view = memoryview(data).cast("B")
        start = align(self.used_bytes) if is_aligned else self.used_bytes
        self._check_memory(start - self.used_bytes + view.nbytes)
        self.used_bytes = start + view.nbytes
        position, fd = start, self._sealed.file.fileno()
        while view.nbytes:
            written = os.pwrite(fd, view[:_WRITE_BYTES], position)
            position, view = position + written, view[written:]
        return start

    def _check_memory(self, nbytes: int) -> None:
        """Check that there is memory before it is touched."""
        self._granted -= nbytes
        if self._granted >= 0:
            return
        free, used = free_memory(Path("/"), self._groups), self.used_bytes
        if free is not None and free.nbytes < nbytes:
            raise SharedMemoryError(
                f"not enough memory to share: at least {size(used + nbytes)} are "
                f"needed, once for all processes, but after {size(used)} of them "
                f"only {size(free.nbytes)} are free ({free.limit})."
            )
        self._granted = max(0, _CHECK_BYTES - nbytes)

    def finish(self) -> Segment:
        """Seal the segment and map it.

        Raises:
            OSError: If there is no address space, or no descriptor left.
        """
        return Segment.open(self.seal())

    def seal(self) -> SealedSegment:
        """Seal the segment."""
        sealed = self._sealed
        # At least one byte more than was written, so that an empty last buffer has an address too.
        sealed.nbytes = align(self.used_bytes + 1)
        os.ftruncate(sealed.file.fileno(), sealed.nbytes)
        fcntl.fcntl(sealed.file.fileno(), ADD_SEALS, SEALS | _SEAL_WRITE)
        return sealed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._sealed.close()


#: Where the out-of-band buffers of a pickle lie in a segment; and for each of its buffers, in turn,
#: the index of its span.
BufferTable = tuple[tuple[Span, ...], list[int]]


def write_buffers(parts: OutOfBand, writer: SegmentWriter) -> BufferTable:
    """Write the buffers and storages that were taken out of a pickle."""

    def put(address: int, nbytes: int) -> int:
        return writer.append((ctypes.c_char * nbytes).from_address(address))

    return parts.write(put), parts.order


def load_with_buffers(body: Any, table: BufferTable, segment: Segment) -> Any:
    """Unpickle a body; its tensors and arrays become views of the segment."""
    spans, order = table
    return load(body, [open_span(segment, *span) for span in spans], order)
