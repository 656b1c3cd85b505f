"""Threads that do what is asked of them, and end when nothing is left to do.

They start when something is asked, in the process that asks: a forked child begins without any.
"""

import collections
import contextlib
import os
from collections.abc import Callable

from shmloader.threads import BackgroundThread

# So many requests may wait. What is read next is asked for soon enough.
_LONGEST_QUEUE = 64


class Prefetcher:
    """Calls a function for URLs, on up to so many threads of the process.

    Args:
        count: The most threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self.requests: collections.deque[tuple[str, Callable[[str], None]]] = collections.deque()
        self.threads: set[_Thread] = set()

    def __reduce__(self) -> tuple[type["Prefetcher"], tuple[int]]:
        return Prefetcher, (self._count,)

    def add(self, url: str, function: Callable[[str], None]) -> None:
        """Ask for a call, unless many are waiting. What it raises is dropped."""
        if self._pid != os.getpid():
            self._forget()
        if len(self.requests) >= _LONGEST_QUEUE:
            return
        self.requests.append((url, function))
        if len(self.threads) < self._count:
            thread = _Thread(self)
            self.threads.add(thread)
            thread.start()


class _Thread(BackgroundThread):
    def __init__(self, owner: Prefetcher) -> None:
        super().__init__("shmloader-fetch")
        self._owner = owner

    def work(self) -> None:
        """Make the calls until none is left."""
        owner = self._owner
        while True:
            try:
                url, function = owner.requests.popleft()
            except IndexError:
                owner.threads.discard(self)
                if not owner.requests:
                    return
                owner.threads.add(self)  # another call was asked for in between
                continue
            # A fork does not wait for the network.
            with self.resting(), contextlib.suppress(Exception):
                function(url)
