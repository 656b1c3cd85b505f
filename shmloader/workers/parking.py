"""Threads of ours stand still while this process forks.

A fork copies the forking thread alone, and all locks as they are. A thread that is inside torch
or the GPU's driver just then leaves their locks held for ever in the child. So each thread of
ours registers here, and waits at a point where it holds none for as long as a worker is forked.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import ClassVar

# Longest wait for one thread to come to such a point: it may be in the user's own transform.
_PARK_S = 5.0


class Parkable:
    """A thread's side. It calls :meth:`pause` where it holds no lock, and often.

    While it waits for what another thread of this process gives, it says so by
    :meth:`resting`: then it need not be waited for.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests = 0
        self._is_still = True

    def enter(self) -> None:
        """The thread begins."""
        _Parkables.live.add(self)
        with self._changed:
            self._wait_for_go()

    def leave(self) -> None:
        """The thread ends."""
        with self._changed:
            self._is_still = True
            self._changed.notify_all()
        _Parkables.live.discard(self)

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
        """Get the thread out of a wait for something else; for subclasses."""

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


class _Parkables:
    """The threads of this process."""

    live: ClassVar["weakref.WeakSet[Parkable]"] = weakref.WeakSet()


@contextlib.contextmanager
def all_parked() -> Iterator[None]:
    """Fork inside: all threads of ours stand still, or have been waited for for five seconds."""
    parked = list(_Parkables.live)
    for thread in parked:
        thread.request()
    try:
        deadline = time.monotonic() + _PARK_S
        for thread in parked:
            thread.await_still(deadline)
        yield
    finally:
        for thread in parked:
            thread.release()


# In a forked child none of them runs.
os.register_at_fork(after_in_child=_Parkables.live.clear)
