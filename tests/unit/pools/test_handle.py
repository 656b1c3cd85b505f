"""Messages to one worker."""

import multiprocessing
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmloader.pools import handle as handle_module
from shmloader.pools.handle import WorkerHandle
from tests.crowd import crowded


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def test_a_message_waits_while_there_are_too_many_descriptors_on_their_way(ends):
    """Runs the check in a thread of its own, which drops its privileges."""
    ours, theirs = ends

    def check() -> None:
        handle = WorkerHandle(multiprocessing.current_process(), ours)
        with Path(os.devnull).open() as file:
            with crowded():
                assert not handle.try_send(b"slot", (file.fileno(),))
                assert handle.try_send(b"task", ())
            assert handle.try_send(b"slot", (file.fileno(),))
        handle.close_pidfd()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result()
    assert theirs.recv(100) == b"task"
    data, descriptors, *_ = socket.recv_fds(theirs, 100, 1)
    assert data == b"slot"
    os.close(*descriptors)


def test_after_a_long_refusal_of_descriptors_the_limit_is_named(ends, monkeypatch):
    monkeypatch.setattr(handle_module, "_RETRY_LIMIT_S", 0.0)
    ours, _ = ends

    def check() -> None:
        handle = WorkerHandle(multiprocessing.current_process(), ours)
        with Path(os.devnull).open() as file, crowded():
            assert not handle.try_send(b"slot", (file.fileno(),))
            with pytest.raises(OSError, match="ulimit -n"):
                handle.try_send(b"slot", (file.fileno(),))
        handle.close_pidfd()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result()
