"""The worker numbers of an executor's processes, whose starts and ends are not reported."""

import collections
import functools
import heapq

from shmloader.pools.executor_kinds import Future


class ProcessNumbers:
    """Gives the executor's processes their worker numbers. All iterators of a loader share it.

    Each task offers a number. The process that runs it takes the number unless it has one already.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()
        # A heap of numbers below ``_next`` that no task in flight offers. A process may have taken
        # some of them since.
        self._free: list[int] = []
        self._next = 0
        # What became of tasks that were given up: the number that each offered, and the number of
        # its process, or -1. Any thread appends to it.
        self._late: collections.deque[tuple[int, int]] = collections.deque()

    def offer(self) -> int:
        """Return the smallest number that no process has, and that no task in flight offers."""
        while self._late:
            number, taken = self._late.popleft()
            if taken >= 0:
                self.note(taken)
            self.take_back(number)
        while self._free:
            number = heapq.heappop(self._free)
            if number not in self._taken:
                return number
        while self._next in self._taken:
            self._next += 1
        self._next += 1
        return self._next - 1

    def note(self, number: int) -> None:
        """Note that a process has a number."""
        self._taken.add(number)

    def take_back(self, number: int) -> None:
        """Note that the task that offered a number is over."""
        if number not in self._taken:
            heapq.heappush(self._free, number)

    def leave(self, number: int, future: Future) -> None:
        """Note that the task that offered a number was given up: it may run, and take the number.

        The number is offered again once the task has ended without taking it. It is never offered
        again if the task was cancelled: Dask and Ray do not say whether it runs nevertheless.
        """
        if future.done():  # a callback would swallow what a signal handler raises in it
            _note_late(self._late, number, future)
        else:
            future.add_done_callback(functools.partial(_note_late, self._late, number))


def _note_late(late: collections.deque[tuple[int, int]], number: int, future: Future) -> None:
    """Note what became of the number that a task has offered. The task's future is done."""
    if future.cancelled():
        return
    if future.exception() is not None:
        late.append((number, -1))
        return
    _, refusal, *others = future.result()
    late.append((number, -1 if refusal else others[0]))
