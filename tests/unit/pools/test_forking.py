"""How workers start and end with the main process, messages to one, and its status page."""

import collections
import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.pools.forking import Descriptors, ParentDeathPipe, sigint_blocked
from shmloader.pools.handle import WorkerHandle, end_unused
from shmloader.pools.status_page import Phase, StatusPage
from tests.process.support import descriptor_count
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


@contextlib.contextmanager
def child_at(work: Callable[[int], None], status_page: StatusPage) -> Iterator[int]:
    """A forked process with the first line of the page, which does this until it is killed."""
    ready, tell = os.pipe()
    status_page.clear(0)
    pid = os.fork()
    if pid == 0:
        try:
            line = status_page.open_line(0)
            line.set(Phase.LOADING, 2, 41)
            work(tell)
        finally:
            os._exit(0)
    try:
        os.close(tell)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def status_page():
    made = StatusPage(70)  # more lines than a page has
    yield made
    made.close()
    made.close()


def test_a_page_that_is_garbage_has_no_descriptors_open() -> None:
    before = descriptor_count()
    page = StatusPage(1)
    assert descriptor_count() == before + 3
    del page
    assert descriptor_count() == before


def sleeps_here(tell: int) -> None:
    os.write(tell, b"x")
    time.sleep(60)


def keeps_the_interpreter(tell: int) -> None:
    os.write(tell, b"x")
    sum(range(10**12))  # one call, which lets no other thread in; a sleep would end with a signal


def test_a_stack_is_not_a_late_one_of_another_worker_nor_one_of_a_worker_that_is_gone(status_page):
    with child_at(sleeps_here, status_page) as pid:
        os.write(status_page._write[0], b"Stack (most recent call first):\n  STALE\n")
        stack = status_page.read(0, pid).stack
    assert "STALE" not in stack
    assert re.match(r'  File ".*", line \d+ in sleeps_here\n', stack)
    assert status_page.read(0, pid).stack == "", "it is gone"


def test_the_stack_is_that_of_the_thread_that_works(status_page):
    def work(tell: int) -> None:
        ready, told = os.pipe()
        threading.Thread(target=sleeps_here, args=[told], daemon=True).start()
        os.read(ready, 1)
        keeps_the_interpreter(tell)

    with child_at(work, status_page) as pid:
        stack = status_page.read(0, pid).stack
    assert "in keeps_the_interpreter" in stack
    assert "sleeps_here" not in stack


def test_a_worker_that_has_not_begun_is_not_sent_the_signal(status_page):
    status_page.clear(3)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)  # the signal would end it: its handler is not there yet
        os._exit(7)
    at_work = status_page.read(3, pid)
    assert (at_work.phase, at_work.stack) == (Phase.STARTING, "")
    os.write(writing, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(("deadline_ns", "sample"), [(0, NO_SAMPLE), (1, 5)])
def test_a_sample_whose_deadline_is_still_to_be_written_is_not_late(
    status_page, deadline_ns, sample
):
    def work() -> None:
        line = status_page.open_line(3)
        line.set(Phase.LOADING, 2, 41)
        line.set_sample(5, deadline_ns)  # the number is written first

    assert exit_code_of_a_child(work) == 0
    assert status_page.read(3).sample == sample
