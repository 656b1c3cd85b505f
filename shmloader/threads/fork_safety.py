"""Threads of ours stand still while this process forks, and when it ends.

A fork copies the forking thread alone, and all locks as they are. A thread that is inside torch
or the GPU's driver just then leaves their locks held for ever in the child. So each thread of
ours registers here, and waits at a point where it holds none for as long as a worker is forked.

At the interpreter's exit they stand still for good: a daemon thread that wants the GIL then is
ended wherever it is, inside torch's C++ as well, which aborts the process. Threads that run the
user's code (:mod:`shmloader.pools.thread`) are among those; only a fork does not wait for them.
"""

import contextlib
import math
import multiprocessing.util
import threading
import time
from collections.abc import Iterator

from shmloader.process_state import PROCESS

# Longest wait for one thread to come to such a point: it may be in the user's own transform.
_PARK_S = 5.0


class Parkable:
    """A thread's side. It calls :meth:`pause` where it holds no lock, and often.

    While it waits for what another thread of this process gives, it says so by
    :meth:`resting`: then it need not be waited for.

    Attributes:
        parks_for_forks: Whether it stands still while this process forks, too, and not at the
            interpreter's exit alone.
        exit_s: How long the interpreter's exit waits for it to stand still, at most.
    """

    parks_for_forks = True
    exit_s = math.inf

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests = 0
        self._is_still = True
        self._ident = 0

    def enter(self) -> None:
        """The thread begins."""
        self._ident = threading.get_ident()
        with PROCESS.threads.lock:
            PROCESS.threads.live.add(self)
            PROCESS.threads.unwilling.add(self._ident)
            if not PROCESS.threads.is_watching_exit:
                PROCESS.threads.is_watching_exit = True
                # Before the pools are closed.
                multiprocessing.util.Finalize(None, _stand_still_for_good, exitpriority=110)
        with self._changed:
            self._wait_for_go()

    def leave(self) -> None:
        """The thread ends."""
        with self._changed:
            self._is_still = True
            self._changed.notify_all()
        with PROCESS.threads.lock:
            PROCESS.threads.live.discard(self)
            PROCESS.threads.unwilling.discard(self._ident)

    def pause(self) -> None:
        """Stand still if somebody forks."""
        if self._requests:
            with self.resting():
                pass

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """For the time in which the thread only waits, and then until nobody forks."""
        with self._changed:
            self._is_still = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._wait_for_go()

    def _wait_for_go(self) -> None:
        while self._requests:
            self._changed.wait()
        self._is_still = False

    def request(self) -> None:
        """Have the thread stand still from its next pause on; called by the one that forks."""
        with self._changed:
            self._requests += 1
        self.wake()

    def wake(self) -> None:
        """Get the thread out of what it is at, or waits for; for subclasses."""

    def await_still(self, deadline: float) -> None:
        """Wait until the thread stands still, or until ``deadline``."""
        with self._changed:
            while not self._is_still and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def release(self) -> None:
        """Let the thread go on."""
        with self._changed:
            self._requests -= 1
            self._changed.notify_all()

    @property
    def stands_for_good(self) -> bool:
        """Whether the interpreter ends, and the thread will not go on."""
        return PROCESS.threads.is_exiting and self._is_still


@contextlib.contextmanager
def all_parked() -> Iterator[None]:
    """Fork inside: all threads of ours stand still, or have been waited for for five seconds."""
    ident = threading.get_ident()
    with PROCESS.threads.lock:
        was_unwilling = ident in PROCESS.threads.unwilling
        PROCESS.threads.unwilling.add(ident)
        parked = [
            thread
            for thread in PROCESS.threads.live
            if thread.parks_for_forks and thread._ident != ident
        ]
        try:
            _ask(parked)
            yield
        finally:
            for thread in parked:
                thread.release()
            if not was_unwilling:
                PROCESS.threads.unwilling.discard(ident)


def may_wait_here() -> bool:
    """Whether the calling thread may wait for one of ours to end.

    Not so if it is one of them, or forks just now: the other one may stand still for its sake.
    The garbage collector may have us called anywhere.
    """
    return threading.get_ident() not in PROCESS.threads.unwilling


def is_exiting() -> bool:
    """Whether the interpreter ends: threads of ours stand still for good."""
    return PROCESS.threads.is_exiting


def _ask(threads: list[Parkable], *, is_exit: bool = False) -> None:
    for thread in threads:
        thread.request()
    start = time.monotonic()
    for thread in threads:
        thread.await_still(start + (min(_PARK_S, thread.exit_s) if is_exit else _PARK_S))


def _stand_still_for_good() -> None:
    with PROCESS.threads.lock:
        _ask(list(PROCESS.threads.live), is_exit=True)
    PROCESS.threads.is_exiting = True
