"""A worker ends with the main process, in whatever state both are."""

import ctypes
import os
import select
import signal
import threading
import time

import pytest

from shmloader.pools.parent_death import ParentDeathPipe


def sleep() -> None:
    time.sleep(60)


def keep_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def start(parent_death: ParentDeathPipe, work, told: int) -> int:
    """Fork a worker that writes its pid, then works."""
    pid = os.fork()
    if pid:
        return pid
    try:
        parent_death.hold()
        os.write(told, os.getpid().to_bytes(4, "little"))
        work()
    finally:
        os._exit(0)


def run_main(work, read: int, told: int, *, in_thread: bool, leaks: bool) -> None:
    """Run a main process with a worker until it is killed."""
    os.close(read)
    parent_death = ParentDeathPipe()
    if in_thread:
        thread = threading.Thread(target=start, args=(parent_death, work, told))
        thread.start()
        thread.join()
    else:
        start(parent_death, work, told)
    if leaks and os.fork() == 0:
        signal.alarm(20)
        os.write(told, os.getpid().to_bytes(4, "little"))
        os.close(told)
        signal.pause()
    os.close(told)
    signal.pause()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("work", [sleep, keep_the_interpreter, stop])
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("leaks", [False, True])
def test_a_worker_ends_when_its_main_process_is_killed(work, in_thread, leaks):
    read, told = os.pipe()
    main = os.fork()
    if main == 0:
        try:
            run_main(work, read, told, in_thread=in_thread, leaks=leaks)
        finally:
            os._exit(0)
    os.close(told)
    numbers = [int.from_bytes(os.read(read, 4), "little") for _ in range(1 + leaks)]
    os.close(read)
    # With `leaks`, the order in which they tell is anybody's.
    pidfds = {pid: os.pidfd_open(pid) for pid in numbers}
    os.kill(main, signal.SIGKILL)
    os.waitpid(main, 0)
    poll = select.poll()
    for pidfd in pidfds.values():
        poll.register(pidfd, select.POLLIN)
    ended = {fd for fd, _ in poll.poll(5000)}
    for pid, pidfd in pidfds.items():
        if pidfd not in ended:
            os.kill(pid, signal.SIGKILL)  # the user's own child lives on; so would a lost worker
        os.close(pidfd)
    assert len(ended) == 1


def test_a_worker_whose_main_process_is_gone_already_ends_at_once():
    reading, writing = os.pipe()
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    pid = os.fork()
    if pid == 0:
        parent_death = ParentDeathPipe()
        parent_death.main_pid = gone
        parent_death.hold()
        os.write(writing, b"x")
        os._exit(0)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_closing_twice_is_no_error():
    parent_death = ParentDeathPipe()
    parent_death.close_read()
    parent_death.close()
    parent_death.close()
