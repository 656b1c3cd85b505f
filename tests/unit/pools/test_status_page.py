"""What a worker writes on the status page reaches the main process, whatever it is doing."""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shmloader.batch.sample_watch import NO_SAMPLE
from shmloader.pools.status_page import Phase, StatusPage
from tests.process.support import descriptor_count
from tests.unit.memory.support import exit_code_of_a_child


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
        stack = status_page.ask(0, pid).stack
    assert "STALE" not in stack
    assert re.match(r'  File ".*", line \d+ in sleeps_here\n', stack)
    assert status_page.ask(0, pid).stack == "", "it is gone"


def test_the_stack_is_that_of_the_thread_that_works(status_page):
    def work(tell: int) -> None:
        ready, told = os.pipe()
        threading.Thread(target=sleeps_here, args=[told], daemon=True).start()
        os.read(ready, 1)
        keeps_the_interpreter(tell)

    with child_at(work, status_page) as pid:
        stack = status_page.ask(0, pid).stack
    assert "in keeps_the_interpreter" in stack
    assert "sleeps_here" not in stack


def test_a_worker_that_has_not_begun_is_not_sent_the_signal(status_page):
    status_page.clear(3)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)  # the signal would end it: its handler is not there yet
        os._exit(7)
    at_work = status_page.ask(3, pid)
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
