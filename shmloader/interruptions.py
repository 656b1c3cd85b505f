"""Distinguishes interruptions, such as a signal handler's exception, from the user's own errors.

A signal handler runs between any two instructions of the main thread. Its exception comes out of
the code that runs at that moment, for instance the dataset's, although that code did not raise it.
"""

import functools
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

_Result = TypeVar("_Result")


def is_interruption(error: BaseException) -> bool:
    """Whether an exception was not raised by the code that it came out of.

    True for every exception that is not an ``Exception`` (``KeyboardInterrupt``, ``SystemExit``),
    and for every exception of a signal handler or a trace function. Python passes the interrupted
    frame to these functions. So the traceback contains a function that was called with its caller's
    frame, or, if the handler has deleted that argument, the code of an installed handler.

    An ``Exception`` that another thread sets (``PyThreadState_SetAsyncExc``), or that a handler
    written in C raises, is not recognised.

    Args:
        error: The exception, as it was caught.
    """
    if not isinstance(error, Exception):
        return True
    caller: FrameType | None = None
    traceback: TracebackType | None = error.__traceback__
    handlers: set[CodeType] | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        if caller is not None:
            # Not before the loop, since most exceptions that are checked have only one frame.
            handlers = _codes_of_handlers() if handlers is None else handlers
            if frame.f_code in handlers or _was_given(frame, caller):
                return True
        caller, traceback = frame, traceback.tb_next
    return False


def describe_interruption(error: BaseException, *, in_sampler: bool = False) -> str:
    """Say why an iterator is closed, to follow "the iterator is closed".

    Args:
        error: The exception from outside, such as one raised by a signal handler.
        in_sampler: Whether it left the sampler's own code.
    """
    name = type(error).__name__
    if in_sampler:
        return (
            f" since {name}, raised from outside, interrupted the sampler, and an interrupted "
            "generator cannot go on. The loader's state_dict() is that of the last batch that "
            "next() returned."
        )
    return (
        f" since {name}, raised from outside, interrupted it while a batch was in transit, which "
        "would be missing if it went on. The loader's state_dict() is that of the last batch that "
        "next() returned."
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Return whether an exception is suppressed."""
        return isinstance(error, self._kinds) and not is_interruption(error)


def _codes_of_handlers() -> set[CodeType]:
    """Return the code of the installed signal handlers and of the trace function."""
    installed = [signal.getsignal(number) for number in signal.valid_signals()]
    handlers = [handler for handler in (*installed, sys.gettrace()) if callable(handler)]
    return {code for handler in handlers for code in _codes_of(handler)}


def _codes_of(function: object) -> Iterator[CodeType]:
    """Yield the code that runs first when ``function`` is called, if it is written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = inspect.getattr_static(type(function), "__call__", None)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield code


def _was_given(frame: FrameType, caller: FrameType) -> bool:
    """Whether a function was called with its caller's frame as one of its positional arguments."""
    code = frame.f_code
    # A class's body has no arguments, and its f_locals may be any mapping.
    count = code.co_argcount
    has_varargs = bool(code.co_flags & inspect.CO_VARARGS)
    if not count and not has_varargs:
        return False
    values = frame.f_locals
    if any(values.get(name) is caller for name in code.co_varnames[:count]):
        return True
    if not has_varargs:
        return False
    varargs = values.get(code.co_varnames[count + code.co_kwonlyargcount], ())
    return isinstance(varargs, tuple) and any(value is caller for value in varargs)
