"""The order of messages to a worker, without one."""

import collections
import contextlib
import os
import socket
from types import SimpleNamespace

from shmloader.pools.forking import Descriptors
from shmloader.pools.handle import WorkerHandle


def test_no_message_overtakes_those_that_the_socket_did_not_take() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    owned = Descriptors(map(os.pidfd_open, [os.getpid()]))
    worker = WorkerHandle(ours, shared=(0, owned, SimpleNamespace))
    received: collections.deque[int] = collections.deque()

    def receive() -> None:
        with contextlib.suppress(BlockingIOError):
            received.append(int.from_bytes(theirs.recv(10_000)[:4]))

    with theirs, ours:
        count = 0
        while len(worker.outbox) < 2:
            assert worker.send(count.to_bytes(4) + bytes(5_000)) is not bool(worker.outbox)
            count += 1
        for _ in range(count // 2):
            receive()  # so that the socket takes some again
        assert not worker.send(count.to_bytes(4))
        while not worker.flush():
            receive()
        for _ in range(count):
            receive()
        assert list(received) == list(range(count + 1))
