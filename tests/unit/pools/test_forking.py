"""How workers start and end with the main process, and the order of messages to one."""

import collections
import contextlib
import errno
import fcntl
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from shmloader.pools.forking import Descriptors, ParentDeathPipe, sigint_blocked
from shmloader.pools.handle import WorkerHandle, end_unused
from shmloader.pools.status_page import StatusPage
from tests.unit.memory.support import exit_code_of_a_child


@pytest.mark.parametrize("was_blocked", [False, True])
def test_ctrl_c_is_blocked_after_a_start_only_if_it_was_before(was_blocked: bool) -> None:
    how = signal.SIG_BLOCK if was_blocked else signal.SIG_UNBLOCK
    before = signal.pthread_sigmask(how, [signal.SIGINT])
    try:
        with sigint_blocked(is_fresh=False):
            assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert is_blocked == was_blocked


def test_a_worker_whose_main_process_is_gone_already_ends_at_once():
    parent_death = ParentDeathPipe()
    parent_death.write.close_all()
    assert exit_code_of_a_child(parent_death.hold) == 1
    parent_death.close()


@pytest.mark.parametrize("is_denied", [False, True])
def test_a_worker_ends_with_its_main_process_also_where_a_sandbox_keeps_its_signal(
    is_denied, monkeypatch
):
    def deny(fd: int, command: int, value: int = 0) -> int:
        if is_denied and command == fcntl.F_SETSIG:
            raise PermissionError(errno.EPERM, "no signal of your own")
        return control(fd, command, value)

    control = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", deny)
    parent_death = ParentDeathPipe()
    held, holds = os.pipe()
    pid = os.fork()
    if pid == 0:
        parent_death.hold()
        os.write(holds, b"x")
        signal.pause()
    os.read(held, 1)
    parent_death.write.close_all()  # as the end of this process would
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -(signal.SIGIO if is_denied else signal.SIGKILL)
    parent_death.close()
    os.close(held)
    os.close(holds)


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


@pytest.mark.parametrize(
    "make", [lambda: StatusPage(1), ParentDeathPipe], ids=["status_page", "parent_death"]
)
def test_a_child_forked_within_close_closes_nothing_twice(make, monkeypatch):
    owner, codes = make(), []

    def close_and_fork(fd):
        # os.close lets other threads run, and one of them forks a worker.
        os.close(fd)
        monkeypatch.undo()
        codes.append(exit_code_of_a_child(owner.close))

    monkeypatch.setattr(Descriptors.close_all, "__defaults__", (close_and_fork,))
    owner.close()
    assert codes == [0]


def test_a_worker_that_ranks_share_goes_on_when_one_of_them_leaves_it_as_it_starts():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        theirs.recv(1)  # until the rank hangs up
        os._exit(7)
    theirs.close()
    owned = Descriptors([os.pidfd_open(pid)])
    end_unused(WorkerHandle(ours, shared=(pid, owned, lambda _: None)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not owned
