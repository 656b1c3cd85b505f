"""What is refused or missing on a system is named."""

import errno
import fcntl
import mmap
import os
import resource
import select
import signal
import socket

import pytest

from shmloader.memory.system_support import is_supported, why_unsupported
from tests.unit.memory.support import in_a_child, names_in


def test_linux_has_what_slots_need():
    assert is_supported()


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.fixture
def _asked_anew():
    why_unsupported.cache_clear()
    yield
    why_unsupported.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (os, "memfd_create", "memfd_create"),
        (os, "ftruncate", "ftruncate"),
        (fcntl, "fcntl", "fcntl(F_ADD_SEALS)"),
        (mmap, "mmap", "mmap"),
        (os, "pidfd_open", "pidfd_open"),
        (signal, "pidfd_send_signal", "pidfd_send_signal"),
        (os, "eventfd", "eventfd"),
        (select, "poll", "poll"),
        (socket, "socketpair", "socketpair"),
        (socket.socket, "send", "sendto"),
        (socket.socket, "recv", "recvfrom"),
        (socket, "send_fds", "sendmsg"),
        (socket, "recv_fds", "recvmsg"),
    ],
)
def test_what_is_refused_is_named_and_leaves_no_descriptor(module, name, call, monkeypatch):
    before = names_in("/proc/self/fd")
    monkeypatch.setattr(module, name, refuse)
    assert why_unsupported() == f"{call} is refused (Permission denied)"
    assert not is_supported()
    monkeypatch.undo()
    assert names_in("/proc/self/fd") == before


@pytest.mark.usefixtures("_asked_anew")
def test_what_is_missing_is_told_apart_from_what_is_refused(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert why_unsupported() == "pidfd_open is missing in this Python: it needs Linux 5.3 or newer"
    why_unsupported.cache_clear()

    def is_unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "memfd_create", is_unknown)
    text = "memfd_create is missing (Function not implemented): it needs Linux 5.3 or newer, and"
    assert why_unsupported().startswith(text)


@pytest.mark.usefixtures("_asked_anew")
def test_a_lack_of_descriptors_is_no_lack_of_support():
    def work() -> str:
        told = set()
        for count in range(3, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, 40))
            told.add(why_unsupported())
            why_unsupported.cache_clear()
        return str(told)

    assert in_a_child(work) == "{None}"
