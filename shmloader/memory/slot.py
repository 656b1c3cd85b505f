"""One piece of shared memory: an anonymous file, and this process's mapping of it.

Guarantees:
    * Nothing has a name: whatever dies, nothing is left behind in ``/dev/shm``, whose
      size does not matter either.
    * Views stay valid. Where a slot needs a longer mapping, its file is mapped once more: both
      mappings show the same bytes, and the old one goes with its last view.
    * No process can make the file shorter under another one's feet (it is sealed).

The file is made as long as the slot may ever become, and stays sparse: pages exist from
the moment they are first written. So a slot grows without a word between processes. Address
space is not as cheap: it may be limited (``ulimit -v``), and after ``mlockall(MCL_FUTURE)`` the
kernel gives every new mapping all its pages at once. So a process maps no more of a slot than its
batches need, and little to spare.

This module and :mod:`shmloader.memory.segment` name the operating system's calls for memory;
no other does.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import resource
import select
import signal
import socket
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

from shmloader.errors import SharedMemoryError
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.memory.limits import address_space, format_bytes, soft_limit

#: Every storage starts at a multiple of this many bytes: a cache line, and what the widest
#: vector instructions like.
ALIGNMENT = 64

#: Name of the anonymous files, as /proc/<pid>/maps shows it.
MEMFD_NAME = "shmloader"

# Older Pythons keep a duplicate of the descriptor with each mapping.
MAPPING_OPTIONS = {"trackfd": False} if sys.version_info >= (3, 13) else {}

#: Mapped of a slot at first; the rest, when a batch needs it.
FIRST_BYTES = mmap.PAGESIZE

# Longest file made where no cap was asked for.
_MOST_BYTES = 1 << 37

# What is mapped beyond what is needed, so that a slightly larger batch finds it mapped: this part
# of what is needed.
_SPARE_PART = 4

# Where address space is limited, all slots of a loader have this part of it in each process. The
# user's own memory needs the rest. Beyond it, nothing is spared, and slots that nobody looks at
# are unmapped.
_PART_OF_LIMIT = 4

# A slot has far more than it needs if it has this many times as much, and so many bytes besides.
_EXCESS_FACTOR = 2
_EXCESS_BYTES = 16 << 20

# fcntl's seals, <linux/fcntl.h>; the fcntl module names them on Linux only.
ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
SEALS = (
    getattr(fcntl, "F_SEAL_SEAL", 1) | getattr(fcntl, "F_SEAL_SHRINK", 2)
    | getattr(fcntl, "F_SEAL_GROW", 4)
)  # fmt: skip

# <linux/mman.h>; Linux 5.14.
_POPULATE_WRITE = 23

# What a lack of pages is told by.
_NO_PAGES = (errno.ENOMEM, errno.EFAULT)

# Something is used up, and nothing refused.
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)


def align(nbytes: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def has_excess(present_bytes: int, needed_bytes: int) -> bool:
    """Whether a slot holds, or maps, so much more than is needed that it should give some back."""
    return present_bytes > _EXCESS_FACTOR * needed_bytes + _EXCESS_BYTES


class _Missing(Exception):  # noqa: N818 - caught where it is raised
    """Says which system call cannot be had, and why."""


@contextlib.contextmanager
def _trying(call: str) -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        text = f"{call} is missing in this Python: it needs Linux 5.3 or newer"
        raise _Missing(text) from error
    except OSError as error:
        if error.errno in _USED_UP:
            return  # told when it hurts
        text = f"{call} is refused ({error.strerror})"
        if error.errno == errno.ENOSYS:
            text = (
                f"{call} is missing ({error.strerror}): it needs Linux 5.3 or newer, and a sandbox "
                "that lets it through"
            )
        raise _Missing(text) from error


@functools.cache
def why_unsupported() -> str | None:
    """Why slots, and workers to fill them, cannot be had here; None: they can.

    Each system call is tried, since a sandbox may refuse any of them, and with any error.
    """
    page = mmap.PAGESIZE
    with contextlib.ExitStack() as stack:
        try:
            with _trying("memfd_create"):
                fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                stack.callback(os.close, fd)
                with _trying("ftruncate"):
                    os.ftruncate(fd, page)
                with _trying("fcntl(F_ADD_SEALS)"):
                    fcntl.fcntl(fd, ADD_SEALS, SEALS)
                with _trying("mmap"):
                    mmap.mmap(fd, page, **MAPPING_OPTIONS).close()
            with _trying("pidfd_open"):
                pidfd = os.pidfd_open(os.getpid())
                stack.callback(os.close, pidfd)
                with _trying("pidfd_send_signal"):
                    signal.pidfd_send_signal(pidfd, 0)
            with _trying("eventfd"):
                stack.callback(os.close, os.eventfd(0))
            with _trying("poll"):
                select.poll().poll(0)
            with _trying("socketpair"):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                for end in (ours, theirs):
                    stack.enter_context(end).setblocking(False)
                with _trying("sendto"):
                    ours.send(b"-")
                with _trying("recvfrom"):
                    theirs.recv(1)
                with _trying("sendmsg"):
                    socket.send_fds(ours, [b"-"], [ours.fileno()])
                with _trying("recvmsg"):
                    for received in socket.recv_fds(theirs, 1, 1)[1]:
                        stack.callback(os.close, received)
        except _Missing as error:
            return str(error)
    return None


def is_supported() -> bool:
    """Whether this system has what slots and their workers need."""
    return why_unsupported() is None


def uncapped_slot_bytes() -> int:
    """Length of a slot's file where the user set no cap: all the memory that there is."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _MOST_BYTES)


def _longest_file() -> int:
    """Length of the longest file that this process may make (``ulimit -f``)."""
    limit = soft_limit(resource.RLIMIT_FSIZE)
    return sys.maxsize if limit is None else limit


def describe_most(most_bytes: int) -> str:
    """What keeps a slot from having more than ``most_bytes``, and what helps."""
    if most_bytes == _whole_pages(_longest_file(), up=False):
        return "as long as a file may be here (`ulimit -f`): raise that limit"
    if most_bytes == _whole_pages(uncapped_slot_bytes()):
        return "all the memory of this machine"
    return (
        "raise shm_size, which is cut into equal shares for prefetch_factor * num_workers slots "
        "and those that may be lent"
    )


def _whole_pages(nbytes: int, *, up: bool = True) -> int:
    return (nbytes + (mmap.PAGESIZE - 1) * up) // mmap.PAGESIZE * mmap.PAGESIZE


class _Slots:
    """The slots of this process, for a forked worker to close what is not its own."""

    live: ClassVar["weakref.WeakSet[Slot]"] = weakref.WeakSet()


def close_inherited_slots() -> None:
    """Close, in a forked worker, all slots of the process that it was forked from."""
    for slot in list(_Slots.live):
        slot.close()


class Slot:
    """A slot, mapped as far as it was needed so far. Has one owner, who closes it.

    Attributes:
        most_bytes: Length of its file, fixed: all that it may come to hold.
        nbytes: Length of the mapping.
        mapping: The memory.
        address: Where the mapping starts in this process.
        views: What somebody has built over the mapping, to use again and again, and who; dropped
            with it. One user at a time: another one's views are replaced.
    """

    __slots__ = (
        "__weakref__", "_array_type", "_fd", "address", "mapping", "most_bytes", "nbytes", "views",
    )  # fmt: skip

    def __init__(self, fd: int, most_bytes: int, nbytes: int | None = None) -> None:
        """Map a slot, and own its descriptor, unless this raises.

        Args:
            fd: Its file.
            most_bytes: The file's length.
            nbytes: How much to map at first; None: all of it.
        """
        self._fd = -1
        self.most_bytes = most_bytes
        self._take(_map(fd, most_bytes if nbytes is None else nbytes))
        _Slots.live.add(self)
        self._fd = fd

    def _take(self, mapping: mmap.mmap) -> None:
        """Have this mapping from now on."""
        self.views: tuple[object, Any] = (None, None)
        self.mapping = mapping
        self._array_type = ctypes.c_char * len(mapping)
        self.address = ctypes.addressof(self._array_type.from_buffer(mapping))
        self.nbytes = len(mapping)

    def __del__(self) -> None:
        """Close the descriptor where a Ctrl-C came before anybody owned the slot."""
        if os is not None:  # when the interpreter ends, modules are gone before what they made
            self.forget_descriptor()

    @classmethod
    def create(cls, most_bytes: int, nbytes: int | None = None) -> Self:
        """Make a slot. Runs in the main process.

        Args:
            most_bytes: The most that it may come to hold, rounded up to a whole page. Less where
                files may not be as long.
            nbytes: How much of that to map at first; None: all.

        Raises:
            SharedMemoryError: If it cannot be mapped.
            OSError: If there is no descriptor left (EMFILE).
        """
        most_bytes = min(_whole_pages(most_bytes), _whole_pages(_longest_file(), up=False))
        nbytes = most_bytes if nbytes is None else min(most_bytes, _whole_pages(nbytes))
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, most_bytes)
            fcntl.fcntl(fd, ADD_SEALS, SEALS)
            return cls(fd, most_bytes, nbytes)
        except BaseException as error:
            os.close(fd)
            # The mapping has a descriptor of its own in older Pythons.
            if not isinstance(error, OSError) or error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise SharedMemoryError(_describe_refusal(nbytes, error)) from error

    def remade(self, nbytes: int) -> "Slot":
        """Another slot over the same file, mapped as far as ``nbytes``. This one stays as it is.

        Raises:
            SharedMemoryError: If it cannot be mapped.
            OSError: If there is no descriptor left (EMFILE).
        """
        fd = os.dup(self._fd)
        try:
            return Slot(fd, self.most_bytes, min(self.most_bytes, _whole_pages(nbytes)))
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise SharedMemoryError(_describe_refusal(nbytes, error)) from error

    def fileno(self) -> int:
        """Descriptor of the file, to be sent to a worker."""
        return self._fd

    def forget_descriptor(self) -> None:
        """Close the descriptor; the mapping stays as it is, for good."""
        # Forgotten first: closed twice, after an interruption, it might be somebody else's.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def reach(self, end: int, *, likely: int = 0, others: Iterable["Slot"] = ()) -> None:
        """Map the slot up to ``end``, and a little more, unless it is mapped so far.

        Args:
            end: Bytes from its start that are needed.
            likely: Bytes from its start that are likely to be needed soon.
            others: Slots of the same owner. Where address space is short, those that nobody looks
                at are unmapped for this one.

        Raises:
            SharedMemoryError: If it cannot be mapped. It is mapped as far as it was.
        """
        if end <= self.nbytes:
            return
        least = _whole_pages(end)
        wanted = min(self.most_bytes, _whole_pages(max(end + end // _SPARE_PART, likely)))
        others = [other for other in others if other is not self]
        limit = address_space().limit_bytes
        if limit is not None:
            left = limit // _PART_OF_LIMIT - sum(other.nbytes for other in others)
            for other in others:
                if left >= least:
                    break
                left += other.unmap()
            wanted = max(least, min(wanted, _whole_pages(left, up=False)))
        try:
            self._replace(_map(self._fd, wanted))
        except OSError as error:
            if is_interruption(error):
                raise
            for other in others:
                other.unmap()
            self._remap(least)

    def _remap(self, nbytes: int) -> None:
        """Map the slot anew, where there may be no address space, or descriptor, for two mappings.

        Raises:
            SharedMemoryError: If it cannot be mapped. It is mapped as far as it was.
        """
        before = self.nbytes
        self.views = (None, None)
        if self._fd >= 0:
            with Suppressed(BufferError):  # somebody holds a view: there have to be two
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
        """Unmap what is far beyond what is needed, if anything is."""
        if has_excess(self.nbytes, needed_bytes):
            with Suppressed(OSError):
                self._replace(_map(self._fd, max(FIRST_BYTES, _whole_pages(needed_bytes))))

    def _replace(self, mapping: mmap.mmap) -> None:
        before = self.mapping
        self._take(mapping)
        with Suppressed(BufferError):  # somebody holds a view, and the mapping with it
            before.close()

    def unmap(self) -> int:
        """Unmap all but a page, unless somebody holds a view; returns how many bytes that were."""
        before = self.nbytes
        if before > FIRST_BYTES:
            self.views = (None, None)
            with Suppressed(OSError, BufferError):
                page = _map(self._fd, FIRST_BYTES)
                self.mapping.close()
                self._take(page)
        return before - self.nbytes

    def array(self) -> "ctypes.Array[ctypes.c_char]":
        """A new object that exports the whole mapping and keeps it.

        It spans the whole mapping because ctypes makes a new type for each new length, which
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
            if is_interruption(error):
                raise
            if error.errno in _NO_PAGES:
                raise SharedMemoryError(f"no memory for a slot's pages: {error}") from error
            # A kernel that does not know it, or a sandbox that refuses it: one byte of each page
            # that begins here.
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if first < end:
                pages = memoryview(self.mapping)[first : end : mmap.PAGESIZE]
                pages[:] = bytes(len(pages))

    def give_back(self, from_byte: int) -> bool:
        """Return the pages from ``from_byte`` on to the system. They read as zeros from now on.

        Returns:
            Whether that was done. The kernel keeps locked pages.
        """
        start = _whole_pages(from_byte)
        if start < self.nbytes:
            try:
                self.mapping.madvise(mmap.MADV_REMOVE, start, self.nbytes - start)
            except OSError as error:
                if is_interruption(error):
                    raise
                return False
        return True

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


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if fd < 0:  # which would be memory of nobody's
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    mapping = mmap.mmap(fd, nbytes, **MAPPING_OPTIONS)
    # A core dump of a worker would otherwise hold every slot. Where that is refused, it does.
    with Suppressed(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def _describe_refusal(nbytes: int, error: OSError) -> str:
    """Why a slot cannot be mapped, and what helps."""
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
