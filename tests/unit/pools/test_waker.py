from __future__ import annotations

import os
import resource
import select
import signal
from typing import Any

import psutil
import pytest

from shmloader.pools import waker
from shmloader.pools.waker import Waker, poll_soon, receive_soon


def polled() -> tuple[Waker, select.poll]:
    one, poll = Waker(), select.poll()
    one.register(poll)
    return one, poll


def ready(poll, timeout_ms: int) -> list[int]:
    return [fd for fd, _ in poll.poll(timeout_ms)]


def test_it_is_readable_from_a_wake_until_that_is_taken() -> None:
    one, poll = polled()
    assert ready(poll, 0) == []
    one.now()
    one.now()
    (fd,) = ready(poll, 0)
    assert one.take(fd)
    assert ready(poll, 0) == []


def test_soon_wakes_a_moment_later() -> None:
    one, poll = polled()
    one.soon()
    assert one.is_due
    (fd,) = ready(poll, 10_000)
    assert one.take(fd)
    one.begin()
    assert not one.is_due
    assert ready(poll, 0) == []


def test_a_second_soon_does_not_delay_the_wake() -> None:
    one, poll = polled()
    one.soon()
    ready(poll, 10_000)
    one.soon()  # `begin` was not called since
    assert len(ready(poll, 0)) == 1


def test_a_wake_that_was_taken_is_no_longer_due() -> None:
    """Otherwise a later `soon` would not set the timer."""
    one, poll = polled()
    one.begin()
    one.soon()
    (fd,) = ready(poll, 10_000)
    one.take(fd)
    one.soon()
    assert len(ready(poll, 10_000)) == 1


def test_now_wakes_before_a_pending_soon(monkeypatch) -> None:
    monkeypatch.setattr(waker, "_SOON_NS", 10**15)
    one, poll = polled()
    one.soon()
    assert ready(poll, 0) == []
    one.now()
    assert len(ready(poll, 0)) == 1


def test_another_descriptor_is_not_taken() -> None:
    one, _ = polled()
    theirs, other = os.pipe()
    os.write(other, b"x")
    assert not one.take(theirs)
    assert os.read(theirs, 1) == b"x"
    os.close(theirs)
    os.close(other)


@pytest.mark.parametrize("left", [0, 1])
def test_without_descriptors_it_raises_and_keeps_none(left) -> None:
    process = psutil.Process()
    before = process.num_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)  # the lowest number that is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Waker()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.num_fds() == before


def test_a_message_that_arrives_soon_is_received() -> None:
    arrivals = [BlockingIOError(), BlockingIOError(), b"message"]

    def receive(nbytes: int) -> bytes:
        assert nbytes == 7
        result = arrivals.pop(0)
        if isinstance(result, bytes):
            return result
        raise result

    assert receive_soon(receive, 7) == b"message"


def test_a_message_that_does_not_arrive_is_not_waited_for() -> None:
    looks = []

    def receive() -> bytes:
        looks.append(1)
        raise BlockingIOError

    assert receive_soon(receive) is None
    assert 1 < len(looks) < 1000


class Looks:
    """A poll to which something happens after some looks."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.count = 0

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        assert timeout_ms == 0
        self.count += 1
        return [(3, select.POLLIN)] if self.count > self.after else []


def test_what_happens_soon_is_polled_without_sleeping() -> None:
    looks: Any = Looks(2)
    assert poll_soon(looks) == [(3, select.POLLIN)]
    assert looks.count == 3


def test_what_does_not_happen_soon_is_not_waited_for() -> None:
    looks: Any = Looks(1 << 30)
    assert poll_soon(looks) == []
    assert 1 < looks.count < 1000


@pytest.mark.parametrize("look", [lambda: receive_soon(nothing), lambda: poll_soon(Nothing())])
def test_what_a_signal_handler_raises_between_two_looks_is_heard(look, monkeypatch) -> None:
    def alarm(signum: int, frame: object) -> None:
        raise TimeoutError("the watchdog")

    monkeypatch.setattr(waker.os, "sched_yield", lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(TimeoutError, match="the watchdog"):
            look()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_where_the_processor_may_not_be_yielded_it_is_looked_nevertheless(monkeypatch) -> None:
    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr(waker.os, "sched_yield", refuse)
    assert receive_soon(nothing) is None
    assert poll_soon(Nothing()) == []


def nothing() -> Any:
    raise BlockingIOError


class Nothing:
    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        return []
