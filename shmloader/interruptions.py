"""Distinguishes interruptions, such as a signal handler's exception, from the user's own errors.

A signal handler runs between any two instructions of the main thread. Its exception comes out of
the code that runs at that moment, for instance the dataset's, although that code did not raise it.

Also completes closing steps in spite of interruptions, reads attributes of users' objects, and has
events that no interruption breaks.

**Events.** The ``Event`` and ``Condition`` of :mod:`threading` take a lock in Python code, and two
things may happen while it is held. The garbage collector may run a finalizer on that thread, which
waits for its own thread for ever if it sets the event. And a signal handler may raise just after
the lock was acquired, so that it stays locked. :class:`Wakeup` and :class:`Latch` take no lock.
"""

import contextlib
import functools
import math
import queue
import signal
import time
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar

_Result = TypeVar("_Result")

#: Longest sleep in seconds before signal handlers can run. Python runs handlers between two of its
#: instructions. A Ctrl-C that arrives after the last instruction and before the system call does
#: not interrupt the call, so its handler would run only after the wait.
SIGNAL_S = 0.5


def is_interruption(error: BaseException) -> bool:
    """Whether an exception was not raised by the code that it came out of.

    True for every exception that is not an ``Exception`` (``KeyboardInterrupt``, ``SystemExit``),
    and for every exception of a signal handler: its traceback contains the handler's code. A
    handler counts while it is installed, so what a user's own timer raises inside a block that sets
    and restores the handler is the user's error.

    An ``Exception`` that another thread sets (``PyThreadState_SetAsyncExc``), or that a handler
    written in C raises, is not recognised.

    Args:
        error: The exception, as it was caught.
    """
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    # The first entry is the function that has caught it.
    frames = list(traceback.walk_tb(error.__traceback__))[1:]
    return any(frame.f_code in handlers for frame, _ in frames)


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that runs first when a function, method or object is called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    return getattr(handler, "__code__", None)


def describe_interruption(error: BaseException) -> str:
    """Say why an iterator is closed, to follow "the iterator is closed"."""
    return (
        f" since {type(error).__name__}, raised from outside, interrupted it while a batch was in "
        "transit. If it went on, that batch would be missing. The loader's state_dict() is that of "
        "the last batch that next() returned."
    )


class Caught(NamedTuple):
    """The exception that a function raised, as a value."""

    error: Exception


def attempt(function: Callable[..., _Result], *args: Any, **named: Any) -> _Result | Caught:
    """Call a function that may raise anything, and return its result or its exception.

    An interruption propagates.
    """
    try:
        return function(*args, **named)
    except Exception as error:
        if is_interruption(error):
            raise
        return Caught(error)


class Suppressed:
    """Suppresses exceptions as ``contextlib.suppress`` does, but not interruptions."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Return whether an exception is suppressed."""
        return isinstance(error, self._kinds) and not is_interruption(error)


def uninterruptible(step: Callable[[], object], tries: int = 5) -> None:
    """Run a closing step, and run it again, up to ``tries`` times, if an exception interrupts it.

    Closing waits for processes and threads, and users who wait press Ctrl-C. What an interruption
    left open would stay open, because a second ``close()`` does nothing. The step can be run again
    after an exception at any point.

    Raises:
        BaseException: The first exception, after the step was completed or given up.
    """
    try:
        step()
    except BaseException:
        if tries > 1:
            with contextlib.suppress(BaseException):
                uninterruptible(step, tries - 1)
        raise


def probe(value: object, name: str, default: object = None) -> Any:
    """Return an attribute that a user's object may have, or a default.

    This is for names that torch never asks for. A class's own ``__getattr__`` may raise anything
    for an unknown name, which never shows with torch's loader.
    """
    found = attempt(getattr, value, name, default)
    # Whatever was raised, the object has no such attribute.
    return default if isinstance(found, Caught) else found


class Wakeup:
    """An event for one waiting thread. :meth:`wait` clears it."""

    def __init__(self) -> None:
        # Its methods are written in C, and take no lock that a finalizer could wait for.
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Make the present or the next :meth:`wait` return. Called from any thread."""
        if self._tokens.empty():
            self._tokens.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the event is set, at most ``timeout_s`` seconds, and clear it.

        If two threads set it at the same moment, the next call may return at once as well.
        """
        left_s = math.inf if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        while left_s >= 0:
            try:
                self._tokens.get(timeout=min(left_s, SIGNAL_S))
            except queue.Empty:
                left_s = deadline - time.monotonic()
            else:
                return


class Latch:
    """An event that stays set. Any number of threads may wait for it.

    Attributes:
        is_set: Whether it was set.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._wakeup = Wakeup()

    def set(self) -> None:
        """Set the event for good."""
        self.is_set = True
        self._wakeup.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the event is set, at most ``timeout_s`` seconds. Returns whether it is set."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # The flag is read again from time to time: of several waiting threads, one is woken.
        while not self.is_set and (left_s := deadline - time.monotonic()) > 0:
            self._wakeup.wait(min(left_s, SIGNAL_S))
        return self.is_set
