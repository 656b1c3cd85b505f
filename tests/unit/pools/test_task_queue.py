"""The queue of tasks: what the kernel does not take waits here, and is sent once."""

import socket
from typing import Any

import pytest

from shmloader.messages import TASK, TASK_HEAD
from shmloader.pools.task_queue import TaskQueue


class Interrupted:
    """A socket during whose next call of ``send`` a signal handler raises, after the kernel's."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def send(self, data: bytes) -> None:
        self._channel.send(data)
        raise KeyboardInterrupt


def test_no_task_is_sent_twice_though_a_signal_handler_raises() -> None:
    queue, count = TaskQueue(), 0
    while queue.send(TASK_HEAD.pack(TASK, count, 0, 0, 0, 0) + bytes(10_000)):
        count += 1
    assert not queue.flush()
    receiver = queue._receiver.dup()
    first = [receiver.recv(1 << 15) for _ in range(2)]
    sender = queue.channel
    queue.channel = Interrupted(sender)
    with pytest.raises(KeyboardInterrupt):
        queue.flush()
    queue.channel = sender
    assert queue.flush()
    assert [len(first), *queue.recall()] == [2, *range(2, count + 1)]
    receiver.close()
    queue.close()


def test_what_the_kernel_did_not_take_is_recalled_once_as_well() -> None:
    queue, count = TaskQueue(), 1
    while queue.send(TASK_HEAD.pack(TASK, count - 1, 0, 0, 0, 0) + bytes(10_000)):
        count += 1
    assert queue.recall() == [*range(count)]
    assert queue.recall() == []
    queue.close()


def test_after_an_interrupted_close_nothing_is_recalled_for_ever(monkeypatch) -> None:
    queue, close = TaskQueue(), socket.socket.close

    def close_and_raise(end: socket.socket) -> None:
        close(end)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "close", close_and_raise)
        with pytest.raises(KeyboardInterrupt):
            queue.close()
    assert queue.recall() == []
    queue.close()
