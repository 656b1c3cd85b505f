"""The queue of tasks: what the kernel does not take waits here, and is sent once.

A message is received in compiled code, or in Python: both do the same.
"""

import os
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from shmloader.memory import compiled
from shmloader.messages import RECEIVE_BYTES, TASK, TASK_HEAD
from shmloader.pools import task_queue
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


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender, receiver:
        yield sender, receiver


@pytest.fixture(params=["compiled", "in Python"])
def receive(request: pytest.FixtureRequest) -> Any:
    if request.param == "in Python":
        return task_queue._receive
    if compiled.receive_one is None:
        pytest.skip("the compiled part is not built")
    assert task_queue.receive is compiled.receive_one
    return compiled.receive_one


@pytest.mark.parametrize("looks", [1, 3])
def test_messages_are_received_whole_and_in_order(receive, ends, looks) -> None:
    sender, receiver = ends
    sent = [b"a", bytes(range(256)) * (RECEIVE_BYTES // 256), b"c"]
    for message in sent:
        sender.send(message)
    assert [receive(receiver, looks) for _ in sent] == sent
    assert receive(receiver, looks) is None


def test_other_threads_and_processes_run_while_it_looks(receive, ends) -> None:
    sender, receiver = ends
    is_ready = threading.Event()

    def send() -> None:
        is_ready.wait()
        sender.send(b"late")

    thread = threading.Thread(target=send)
    thread.start()
    is_ready.set()
    found = None
    while found is None:  # it looks only once for a while if others take long
        found = receive(receiver, 1000)
    assert found == b"late"
    thread.join()


def test_where_another_process_wants_the_core_it_soon_ends(receive, ends) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                assert receive(ends[1], 1 << 40) is None
            finally:
                busy.kill()
    finally:
        os.sched_setaffinity(0, cores)


def test_a_closed_end_is_told(receive, ends) -> None:
    sender, receiver = ends
    receiver.send(b"not received")
    sender.close()
    for _ in range(2):  # the kernel reports an error first
        assert receive(receiver, 2) == b""
    receiver.close()
    with pytest.raises((OSError, ValueError)):
        receive(receiver, 2)


def test_wrong_arguments_are_refused(receive, ends) -> None:
    for arguments in ((ends[1],), (ends[1], 1, 1), (ends[1], "often")):
        with pytest.raises(TypeError):
            receive(*arguments)


def test_a_message_is_received_from_whichever_socket_has_one(ends) -> None:
    if compiled.receive_each is None:
        pytest.skip("the compiled part is not built")
    closed, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    closed.close()
    sender, receiver = ends
    with other:
        descriptors = array("i", [other.fileno(), receiver.fileno(), sender.fileno()])
        assert compiled.receive_each(descriptors, 3) == []
        assert compiled.receive_each(descriptors[1:], 3) == []
        sent = [b"a", bytes(RECEIVE_BYTES)]
        for message in sent:
            sender.send(message)
        received = [compiled.receive_each(descriptors[1:], 1) for _ in sent]
        assert received == [[(receiver.fileno(), message)] for message in sent]
        assert compiled.receive_each(array("i"), 2) == []


def test_messages_come_from_all_sockets_unless_one_was_closed_by_the_other_side(ends) -> None:
    if compiled.receive_each is None:
        pytest.skip("the compiled part is not built")
    third, fourth = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with third, fourth:
        ends[0].send(b"a")
        third.send(b"b")
        descriptors = array("i", [ends[1].fileno(), fourth.fileno()])
        messages = [data for _, data in compiled.receive_each(descriptors, 1)]
        assert messages == [b"a", b"b"]
        ends[0].send(b"c")
        third.close()
        assert compiled.receive_each(descriptors, 1) == []
        assert compiled.receive_each(descriptors[:1], 1) == [(ends[1].fileno(), b"c")]
