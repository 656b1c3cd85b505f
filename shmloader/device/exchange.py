"""What passes between the user's thread and the one that runs the engine.

Holds no lock of Python's own while it is used, since the garbage collector may end an iterator
anywhere: on either thread, even inside of these lines.
"""

import collections
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.engine.base import Delivery
from shmloader.interruptions import Suppressed
from shmloader.threads.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class Ready:
    """What the stage has made of a batch.

    Attributes:
        result: It.
        delivery: The batch's.
        staged: The stage's part in the statistics, and when it began and ended with the batch.
    """

    result: Any
    delivery: Delivery | None
    staged: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception for the user.

    Attributes:
        error: It.
        is_last: Whether nothing comes after it.
        delivery: Of the batch in whose place it is raised.
    """

    error: BaseException
    is_last: bool
    delivery: Delivery | None = None


class StageBrokenError(RuntimeError):
    """The stage can handle no further batch, so the iterator ends."""


class Request(enum.Enum):
    """A request of the engine's thread that it does not wait for."""

    TICKET = enum.auto()


class Call:
    """Something that the user's thread does for the engine's, which waits."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self.over = Wakeup()

    def make(self) -> None:
        """Do it, on the user's thread."""
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - handed on to the thread that asked
            self._error = error
        self.over.set()

    def raise_error(self) -> None:
        """Raise what it raised; once, since the traceback holds us."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


Result = Ready | Raised | Request | Call


class Results:
    """A queue of results, in order, from the engine's thread to the user's."""

    def __init__(self) -> None:
        self._items: collections.deque[Result] = collections.deque()
        self._wakeup = Wakeup()

    def put(self, item: Result) -> None:
        """Append an item. Called from any thread."""
        self._items.append(item)
        self._wakeup.set()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for an item. May return early, for an item that was taken before."""
        self._wakeup.wait(timeout_s)

    @property
    def first(self) -> Result | None:
        """The first item, or None. It stays in the queue, so an interruption loses nothing."""
        items = self._items
        try:
            return items[0] if items else None
        except IndexError:  # cleared, meanwhile
            return None

    def drop_first(self) -> None:
        """Remove the first item, unless the queue was cleared meanwhile."""
        with Suppressed(IndexError):
            self._items.popleft()

    def set(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        self._wakeup.set()

    def clear(self) -> None:
        """Remove all items."""
        self._items.clear()

    def __bool__(self) -> bool:
        """Whether there is an item."""
        return bool(self._items)


class Semaphore:
    """Counts the results that may be ready and not taken.

    ``threading.Semaphore`` takes a lock, which a release by the garbage collector may find held by
    the very thread that it interrupts.
    """

    def __init__(self, count: int) -> None:
        self._places = collections.deque([None] * count)
        self._wakeup = Wakeup()

    def is_available(self) -> bool:
        """Whether :meth:`acquire` would return at once."""
        return bool(self._places)

    def try_acquire(self) -> bool:
        """Acquire without waiting. Returns whether that was possible."""
        if not self._places:
            return False
        self._places.pop()
        return True

    def acquire(self) -> None:
        """Wait until it can be acquired."""
        while not self.try_acquire():
            self._wakeup.wait()

    def release(self) -> None:
        """Release it once. Called from any thread."""
        self._places.append(None)
        self._wakeup.set()
