"""Messages to one worker."""

import multiprocessing
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmloader.workers.handle import WorkerHandle
from tests.crowd import crowded


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def test_a_message_waits_while_there_are_too_many_descriptors_on_their_way(ends):
    """In a thread of its own, for its privileges are gone then."""
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
