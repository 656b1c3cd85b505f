"""The order of messages to a worker, without one."""

from __future__ import annotations

import contextlib
import select
import socket

from shmloader.pools.handle import WorkerChannel
from shmloader.pools.worker_channels import WorkerChannels


class Channels(WorkerChannels[WorkerChannel]):
    """One worker, of which there is only the socket."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(None)
        self.worker = WorkerChannel(channel)
        self._workers.append(self.worker)
        self._by_fd[channel.fileno()] = 0
        self._poll.register(channel, select.POLLIN)

    def _end_all(self) -> None:
        self._is_closed = True
        self._at_exit.cancel()
        self.worker.hang_up()


def test_no_message_overtakes_those_that_the_socket_did_not_take() -> None:
    """A slot's descriptor has to arrive before the task that is to fill the slot."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    channels = Channels(ours)
    received: list[int] = []

    def receive() -> None:
        with contextlib.suppress(BlockingIOError):
            received.append(int.from_bytes(theirs.recv(10_000)[:4]))

    with theirs, contextlib.closing(channels):
        count = 0
        while len(channels.worker.outbox) < 2:
            channels.send(0, count.to_bytes(4) + bytes(5_000))
            count += 1
        for _ in range(count // 2):
            receive()  # so that the socket takes some again
        channels.send(0, count.to_bytes(4))
        for _ in range(2 * count):
            assert channels.wait(0) == []
            receive()
        assert received == list(range(count + 1))
        assert not channels.worker.outbox
