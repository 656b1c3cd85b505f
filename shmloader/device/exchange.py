"""The objects that the user's thread and the engine's thread pass to each other.

Adding a result and releasing the semaphore take no lock, because the garbage collector may end an
iterator at any point, on either thread, even while that thread runs the code below.
"""

import collections
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.engine.delivery import Delivery
from shmloader.interruptions import Suppressed
from shmloader.threads.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch that the stage has processed.

    Attributes:
        result: What the stage's ``run`` returned.
        delivery: The batch's delivery.
        staged: The stage's name in the statistics, and when the stage began and finished the batch,
            in nanoseconds on the clock of ``time.monotonic_ns()``.
    """

    result: Any
    delivery: Delivery | None
    staged: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception for the user.

    Attributes:
        error: The exception.
        is_last: Whether no further result follows.
        delivery: The delivery of the batch in whose place it is raised, if there is one.
    """

    error: BaseException
    is_last: bool
    delivery: Delivery | None = None


class Request(enum.Enum):
    """A request for one more ticket, from the engine's thread, which does not wait for the ticket.

    Attributes:
        REPLACEMENT: The ticket replaces one that was answered but yields no batch.
        ADDITION: The ticket is one more than before, because there are more workers now.
    """

    REPLACEMENT = enum.auto()
    ADDITION = enum.auto()


class UserThreadCall:
    """A function that the user's thread calls, while the engine's thread waits for that.

    Attributes:
        over: Set when the call has returned, or when the engine's thread is to end.
        is_made: Whether the call has returned.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self.over = Wakeup()
        self.is_made = False

    def make(self) -> None:
        """Call the function, on the user's thread."""
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - handed on to the thread that asked
            self._error = error
        self.is_made = True
        self.over.set()

    def raise_error(self) -> None:
        """Raise the function's exception, and forget it: its traceback pins this object."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


Result = Ready | Raised | Request | UserThreadCall


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
        """Wait for an item. May return without one, if an item was put and taken before."""
        self._wakeup.wait(timeout_s)

    @property
    def first(self) -> Result | None:
        """The first item, or None. It stays in the queue, so that an interruption loses nothing."""
        items = self._items
        try:
            return items[0] if items else None
        except IndexError:  # the queue was cleared meanwhile
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
    """Counts how many further results may be ready and not yet taken.

    Releasing it takes no lock. ``threading.Semaphore.release`` takes one, and the garbage collector
    might call it on the very thread that holds that lock.
    """

    def __init__(self, count: int) -> None:
        self._free = collections.deque([None] * count)
        self._wakeup = Wakeup()

    def try_acquire(self) -> bool:
        """Acquire the semaphore if that needs no wait. Returns whether it was acquired."""
        if not self._free:
            return False
        self._free.pop()
        return True

    def acquire(self) -> None:
        """Acquire the semaphore, and wait until that is possible."""
        while not self.try_acquire():
            self._wakeup.wait()

    def release(self) -> None:
        """Release the semaphore. Called from any thread."""
        self._free.append(None)
        self._wakeup.set()
