"""Keeps as many descriptors in flight (sent, not received) as an ordinary user may have."""

import contextlib
import ctypes
import errno
import os
import resource
import socket
import struct
from collections.abc import Iterator

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3, <linux/capability.h>
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_MESSAGE = 250
_LIMIT = 400


def drop_privileges() -> None:
    """Let the kernel limit this thread's sent descriptors, as it does for users but root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _VERSION, 0)
    # Two of (effective, permitted, inheritable), each for 32 capabilities.
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    effective, *others = struct.unpack("6I", data.raw)
    effective &= ~(1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE)
    if libc.capset(header, struct.pack("6I", effective, *others)):
        raise OSError(ctypes.get_errno(), "capset")


@contextlib.contextmanager
def crowded() -> Iterator[None]:
    """Let this thread send no more descriptors. Also lowers its limit of open ones."""
    drop_privileges()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, before[1]))
        try:
            read, write = os.pipe()
            try:
                while True:
                    socket.send_fds(ours, [b"."], [read] * _MESSAGE)
            except OSError as error:
                assert error.errno == errno.ETOOMANYREFS, error  # noqa: PT017
            finally:
                os.close(read)
                os.close(write)
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
