"""Finds out whether this system has what slots and worker processes need."""

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import select
import signal
import socket
from collections.abc import Iterator

from shmloader.memory.memfd import ADD_SEALS, MAPPING_OPTIONS, SEALS, MemoryFile

# Errors that mean that a resource is used up, not that the call is refused.
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)


@functools.cache
def why_unsupported() -> str | None:
    """Return why slots and worker processes do not work on this system; None if they do.

    Each system call is tried, since a sandbox may refuse any of them, with any error.
    """
    call, needs = "", "it needs Linux 5.3 or newer"
    with contextlib.ExitStack() as stack:
        try:
            for call in _tried(stack):  # noqa: B007 - it is read below
                pass
        except AttributeError:
            return f"{call} is missing in this Python: {needs}"
        except OSError as error:
            if error.errno == errno.ENOSYS:
                sandbox = "and a sandbox that allows it"
                return f"{call} is missing ({error.strerror}): {needs}, {sandbox}"
            # What is used up is reported when it is needed.
            return None if error.errno in _USED_UP else f"{call} is refused ({error.strerror})"
    return None


def _tried(stack: contextlib.ExitStack) -> Iterator[str]:
    """Yield the name of each system call, and then try it. The stack closes what was opened."""
    yield "memfd_create"
    file = stack.enter_context(MemoryFile())
    yield "ftruncate"
    os.ftruncate(file.fileno(), mmap.PAGESIZE)
    yield "fcntl(F_ADD_SEALS)"
    fcntl.fcntl(file.fileno(), ADD_SEALS, SEALS)
    yield "mmap"
    mmap.mmap(file.fileno(), mmap.PAGESIZE, **MAPPING_OPTIONS).close()
    yield "pidfd_open"
    pidfd = os.pidfd_open(os.getpid())
    stack.callback(os.close, pidfd)
    yield "pidfd_send_signal"
    signal.pidfd_send_signal(pidfd, 0)
    yield "eventfd"
    stack.callback(os.close, os.eventfd(0))
    yield "poll"
    select.poll().poll(0)
    yield "socketpair"
    ours, theirs = map(
        stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    yield "sendto"
    ours.send(b"-")
    yield "recvfrom"
    theirs.recv(1)
    yield "sendmsg"
    socket.send_fds(ours, [b"-"], [ours.fileno()])
    yield "recvmsg"
    for received in socket.recv_fds(theirs, 1, 1)[1]:
        stack.callback(os.close, received)


def is_supported() -> bool:
    """Whether this system has what slots and worker processes need."""
    return why_unsupported() is None
