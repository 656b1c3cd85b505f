"""When a background thread is parked, and when it has ended."""

import os
import threading
import time

import pytest

from shmloader import interruptions, threads
from shmloader.process_state import PROCESS
from shmloader.threads import BackgroundThread, all_parked, may_wait
from tests.process.bytecodes import interrupt
from tests.process.support import WatchedLock, stack_of, wait_until


class Counter(BackgroundThread):
    """A thread that counts, and pauses between two counts."""

    def __init__(self, *, pauses: bool = True) -> None:
        super().__init__("counter")
        self.pauses = pauses
        self.count = 0
        self.is_over = False
        self.is_woken = False
        self.start()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def work(self) -> None:
        while not self.is_over:
            self.count += 1
            if self.pauses:
                self.pause()
            time.sleep(0)

    def wake(self) -> None:
        self.is_woken = True

    def end(self) -> None:
        self.is_over = True
        assert self.join(10)


class Once(BackgroundThread):
    """A thread that calls a function with itself, once."""

    def __init__(self, function) -> None:
        super().__init__("once")
        self.function = function

    def work(self) -> None:
        self.function(self)


def stands_still(thread: BackgroundThread) -> bool:
    """Whether a thread waits until it may go on, and nothing but that."""
    return stack_of(thread._thread.ident)[:2] == ["wait", "_wait_for_go"]


@pytest.fixture
def counters():
    made = [Counter() for _ in range(3)]
    wait_until(lambda: all(counter.count for counter in made))
    yield made
    for counter in made:
        counter.end()
    assert PROCESS.threads.live == set()
    assert PROCESS.threads.unwilling == set()


def test_no_thread_runs_while_all_are_parked(counters) -> None:
    for _ in range(20):
        with all_parked():
            before = [counter.count for counter in counters]
            wait_until(lambda: all(map(stands_still, counters)))
            assert [counter.count for counter in counters] == before
            assert all(counter.is_woken for counter in counters)
        pairs = list(zip(counters, before, strict=True))
        wait_until(lambda pairs=pairs: all(one.count > then for one, then in pairs))


def test_a_thread_that_begins_while_all_are_parked_waits(counters, monkeypatch) -> None:
    lock = WatchedLock(PROCESS.threads.lock)
    monkeypatch.setattr(PROCESS.threads, "lock", lock)
    with all_parked():
        late = Counter()
        assert lock.is_waited_for.wait(10)
        assert late.count == 0
    wait_until(lambda: late.count)
    late.end()


def test_a_resting_thread_counts_as_parked(monkeypatch) -> None:
    monkeypatch.setattr(threads, "_PARK_S", 60)
    go, came, over = threading.Event(), threading.Event(), []

    def rest(thread):
        with thread.resting():
            came.set()
            go.wait(10)
        over.append(1)

    thread = Once(rest)
    thread.start()
    assert came.wait(10)
    began = time.monotonic()
    with all_parked():
        assert time.monotonic() - began < 20
        go.set()
        wait_until(lambda: over or stands_still(thread))
        assert over == []  # it got what it waited for, and stands still all the same
    assert thread.join(10)
    assert over == [1]


def test_the_wait_for_a_thread_that_does_not_pause_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(threads, "_PARK_S", 0.1)
    stubborn = Counter(pauses=False)
    wait_until(lambda: stubborn.count)
    began = time.monotonic()
    with all_parked():
        assert 0.1 <= time.monotonic() - began < 20  # it would never end
    stubborn.end()


def test_a_thread_that_is_parked_only_at_the_exit_runs_during_a_fork(monkeypatch) -> None:
    class Loader(Counter):
        parks_for_forks = False

    loader = Loader()
    wait_until(lambda: loader.count)
    with all_parked():
        before = loader.count
        wait_until(lambda: loader.count > before)
    monkeypatch.setattr(PROCESS.threads, "is_exiting", False)
    threads._park_for_good()
    assert PROCESS.threads.is_exiting
    wait_until(lambda: stands_still(loader))
    assert loader.join(0), "nobody waits for it"
    monkeypatch.undo()
    PROCESS.threads.to_park = set()
    loader.end()


def test_a_thread_of_ours_that_forks_waits_neither_for_itself_nor_for_others() -> None:
    took = []

    def fork(_):
        began = time.monotonic()
        with all_parked():
            pass
        took.append(time.monotonic() - began)
        assert not may_wait()
        took.append(took[0])

    thread = Once(fork)
    thread.start()
    assert thread.join(10)
    assert len(took) == 2
    assert took[0] < 2


def test_several_may_fork_at_once_while_threads_come_and_go() -> None:
    errors = []

    def fork_often():
        try:
            for _ in range(150):
                with all_parked():
                    assert not may_wait()
                assert may_wait()
        except BaseException as error:
            errors.append(error)

    def come_and_go():
        try:
            for _ in range(60):
                Counter().end()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (fork_often, fork_often, come_and_go)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []
    assert PROCESS.threads.live == set()


def test_what_a_handler_raises_in_a_wait_or_wake_up_of_a_fork_leaves_no_thread_parked(
    counters,
) -> None:
    def fork():
        with all_parked():
            pass

    files = (threading.__file__, interruptions.__file__)
    nth = 0
    while True:
        nth += 3
        outcome = interrupt(fork, nth, KeyboardInterrupt, files)
        for counter in counters:
            then = counter.count
            wait_until(lambda counter=counter, then=then: counter.count > then, 5)
        assert len(PROCESS.threads.unwilling) == len(counters), outcome.where
        if outcome.where is None:
            break
    assert nth > 30


def test_a_child_forgets_its_parent_s_threads(counters) -> None:
    with all_parked():
        pid = os.fork()
        if pid == 0:
            # The lock was held, and a request is out: neither is the child's.
            with all_parked():
                is_right = PROCESS.threads.live == set() and len(PROCESS.threads.unwilling)
            os._exit(0 if is_right == 1 else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_thread_has_not_ended_before_what_it_uses_has() -> None:
    departs, may_go = threading.Event(), threading.Event()

    class Departing(Once):
        def depart(self) -> None:
            departs.set()
            assert may_go.wait(20)

    thread = Departing(lambda _: None)
    assert thread.join(0), "it was never started"
    thread.start()
    assert departs.wait(20)
    assert thread.system_id is not None
    assert not thread.join(0)
    may_go.set()
    assert thread.join(20)
    assert thread.system_id is None
