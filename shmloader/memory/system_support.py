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

from shmloader.memory.memfd import ADD_SEALS, MAPPING_OPTIONS, MEMFD_NAME, SEALS

# Errors that mean that a resource is used up, not that the call is refused.
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)


class _Missing(Exception):  # noqa: N818 - caught where it is raised
    """Names a system call that is not available, and the reason."""


@contextlib.contextmanager
def _trying(call: str) -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        text = f"{call} is missing in this Python: it needs Linux 5.3 or newer"
        raise _Missing(text) from error
    except OSError as error:
        if error.errno in _USED_UP:
            return  # the error comes again when the resource is needed
        text = f"{call} is refused ({error.strerror})"
        if error.errno == errno.ENOSYS:
            text = (
                f"{call} is missing ({error.strerror}): it needs Linux 5.3 or newer, and a sandbox "
                "that allows it"
            )
        raise _Missing(text) from error


@functools.cache
def why_unsupported() -> str | None:
    """Return why slots and worker processes do not work on this system; None if they do.

    Each system call is tried, since a sandbox may refuse any of them, with any error.
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
    """Whether this system has what slots and worker processes need."""
    return why_unsupported() is None
