"""Tells what comes from outside, out of a signal handler, from what the user's code raises.

A handler runs between any two instructions of the main thread. What it raises comes out of whatever
was at work then: of a dataset, for instance, which did not raise it.
"""

import functools
import inspect
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType


def is_interruption(error: BaseException) -> bool:
    """Whether an exception came from outside, and not of the code that was at work.

    So does each that is no ``Exception`` (``KeyboardInterrupt``, ``SystemExit``), and each that a
    signal handler or a trace function raised. Python gives these the frame that they interrupt, so
    the traceback has a function that was called with its caller's frame; or, if it has let go of
    that, the code of a handler that is installed.

    An ``Exception`` that another thread sets (``PyThreadState_SetAsyncExc``), or that a handler
    written in C raises, has no such function, and is not found.

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
            # Not before: what our own code catches where it is raised is looked at often.
            handlers = _codes_of_handlers() if handlers is None else handlers
            if frame.f_code in handlers or _was_given(frame, caller):
                return True
        caller, traceback = frame, traceback.tb_next
    return False


class Suppressed:
    """As ``contextlib.suppress``, but not of what comes from outside."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Whether an exception is suppressed."""
        return isinstance(error, self._kinds) and not is_interruption(error)


def _codes_of_handlers() -> set[CodeType]:
    """The code of the signal handlers, and of the trace function, that are installed."""
    installed = [signal.getsignal(number) for number in signal.valid_signals()]
    wanted = [handler for handler in (*installed, sys.gettrace()) if callable(handler)]
    return {code for handler in wanted for code in _codes_of(handler)}


def _codes_of(function: object) -> Iterator[CodeType]:
    """The code that runs first when this is called, if it is written in Python."""
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
    has_rest = bool(code.co_flags & inspect.CO_VARARGS)
    if not count and not has_rest:
        return False
    values = frame.f_locals
    if any(values.get(name) is caller for name in code.co_varnames[:count]):
        return True
    if not has_rest:
        return False
    rest = values.get(code.co_varnames[count + code.co_kwonlyargcount], ())
    return isinstance(rest, tuple) and any(value is caller for value in rest)
