"""What passes between the user's thread and the one that runs the engine.

Holds no lock of Python's own while it is used, since the garbage collector may end an iterator
anywhere: on either thread, even inside of these lines.
"""

import collections
import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.engine.base import Receipt
from shmloader.workers.bell import Bell


@dataclass(frozen=True, slots=True)
class Ready:
    """What the stage has made of a batch.

    Attributes:
        result: It.
        receipt: The batch's.
        staged: The stage's part in the statistics, and when it began and ended with the batch.
    """

    result: Any
    receipt: Receipt | None
    staged: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception for the user.

    Attributes:
        error: It.
        is_last: Whether nothing comes after it.
        receipt: Of the batch in whose place it is raised.
    """

    error: BaseException
    is_last: bool
    receipt: Receipt | None = None


class StageBrokenError(RuntimeError):
    """The stage can handle no further batch, so the iterator ends."""


class Wish(enum.Enum):
    """What the engine's thread asks for without waiting."""

    TICKET = enum.auto()


class Call:
    """Something that the user's thread does for the engine's, which waits."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self.over = Bell()

    def make(self) -> None:
        """Do it, on the user's thread."""
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 - handed on to the thread that asked
            self._error = error
        self.over.ring()

    def raise_error(self) -> None:
        """Raise what it raised; once, since the traceback holds us."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


Result = Ready | Raised | Wish | Call


class Results:
    """What the thread has for the user's, in order."""

    def __init__(self) -> None:
        self._items: collections.deque[Result] = collections.deque()
        self._bell = Bell()

    def put(self, item: Result) -> None:
        """From any thread."""
        self._items.append(item)
        self._bell.ring()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the bell, which rings for each item, and may ring for one taken before."""
        self._bell.wait(timeout_s)

    @property
    def first(self) -> Result | None:
        """The first one, which stays: an interruption takes nothing. None if there is none."""
        items = self._items
        try:
            return items[0] if items else None
        except IndexError:  # cleared, meanwhile
            return None

    def drop_first(self) -> None:
        """Take it away, unless all were cleared meanwhile."""
        with contextlib.suppress(IndexError):
            self._items.popleft()

    def ring(self) -> None:
        """Have the one that waits look about; from any thread."""
        self._bell.ring()

    def clear(self) -> None:
        """Take all away."""
        self._items.clear()

    def __bool__(self) -> bool:
        """Whether one is there."""
        return bool(self._items)


class Room:
    """Places for results that are ready and not taken."""

    def __init__(self, count: int) -> None:
        self._places = collections.deque([None] * count)
        self._bell = Bell()

    def is_there(self) -> bool:
        """Whether one is there."""
        return bool(self._places)

    def take_now(self) -> bool:
        """Take one, if one is there; whether it was."""
        if not self._places:
            return False
        self._places.pop()
        return True

    def take(self) -> None:
        """Take one; waits."""
        while not self.take_now():
            self._bell.wait()

    def give(self) -> None:
        """Give one back; from any thread."""
        self._places.append(None)
        self._bell.ring()
