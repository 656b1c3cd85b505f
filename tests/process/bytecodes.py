"""Raises, as a signal handler does, at a chosen bytecode instruction of the package.

Or of further files of Python code, such as that of :mod:`threading`.

A trace function calls an installed handler just before the instruction. Python itself runs handlers
at fewer places, and on the main thread alone. Here the call has a thread of its own, which has no
``except`` around it: an exception that is raised just before one of these is left confuses the
thread.
"""

from __future__ import annotations

import concurrent.futures
import dis
import functools
import gc
import signal
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shmloader
from tests.process.support import in_thread

PACKAGE = str(Path(shmloader.__file__).parent)


_RETURN_VALUE = dis.opmap["RETURN_VALUE"]


class Preempted(TimeoutError, RuntimeError, LookupError):  # noqa: N818 - as users name theirs
    """What a signal handler raises: of kinds that our own code catches, too."""


#: What a signal handler raises in the tests: an Exception, which a dataset might have raised, and
#: one that is none.
KINDS = (Preempted, KeyboardInterrupt)


@dataclass
class Outcome:
    """What a call did.

    Attributes:
        result: What it returned; None if it raised.
        error: What it raised.
        where: The instruction at which the handler raised; None if the call had fewer.
        count: Instructions of the package that the call began, until then.
    """

    result: object
    error: BaseException | None
    where: str | None
    count: int

    def has_arrived(self, kind: type[BaseException]) -> bool:
        """Whether the handler's exception came out of the call."""
        return type(self.error) is kind


class _Tracer:
    def __init__(self, nth: int, kind: type[BaseException], files: tuple[str, ...]) -> None:
        self.files = files
        self.nth = nth
        self.kind = kind
        self.count = 0
        self.where: str | None = None

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        frame.f_trace_opcodes = True
        is_at_risk = event == "opcode" and frame.f_lasti not in _lock_steps(frame.f_code)
        if is_at_risk and not (self._returns(frame) or _is_spared(frame)):
            self.count += 1
            if self.count == self.nth:
                name = frame.f_code.co_filename.removeprefix(PACKAGE + "/")
                self.where = f"{name}:{frame.f_lineno} +{frame.f_lasti} {frame.f_code.co_qualname}"
                sys.settrace(None)
                _handle(self.kind)
        return self

    def _returns(self, frame: Any) -> bool:
        """Whether the call itself returns: no instruction after that could do anything about it.

        Python runs no handler there.
        """
        is_outermost = not frame.f_back.f_code.co_filename.startswith(self.files)
        return is_outermost and frame.f_code.co_code[frame.f_lasti] == _RETURN_VALUE


@functools.cache
def _lock_steps(code: types.CodeType) -> frozenset[int]:
    """Offsets just after a ``with`` has called ``__enter__``, and just before ``__exit__``.

    There a lock is held that nothing would let go of. Python runs no handler there: it looks for
    signals where a function is called or left, and where a loop goes back.
    """
    instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    steps = set()
    for place, one in enumerate(instructions):
        if one.opname == "BEFORE_WITH":
            steps.add(instructions[place + 1].offset)
        names = [following.opname for following in instructions[place : place + 5]]
        if names[:3] == ["LOAD_CONST"] * 3 and "CALL" in names[3:]:
            ending = instructions[place : place + 3 + names[3:].index("CALL") + 1]
            if all(step.argval is None for step in ending[:3]):
                steps.update(step.offset for step in ending)
                if place and instructions[place - 1].opname == "SWAP":  # with the value to return
                    steps.add(instructions[place - 1].offset)
    return frozenset(steps)


# These forget a descriptor, and then close it. Python runs no handler in between.
_CLOSERS = frozenset({"_close", "close_pidfd", "close_all"})


_FINALIZE = weakref.finalize.__call__.__code__
_ADD_DONE_CALLBACK = concurrent.futures.Future.add_done_callback.__code__


def _is_spared(frame: Any) -> bool:
    """Whether nothing is raised in a function.

    Not where a finaliser runs: Python prints what is raised there, and lets it go no further. Not
    in a callback itself that ``concurrent.futures`` calls: that logs an Exception, and goes on. In
    what the callback calls, it is raised.
    """
    if frame.f_code.co_name in _CLOSERS:
        return True
    if frame.f_back.f_code is _ADD_DONE_CALLBACK:
        return True
    while frame is not None:
        if frame.f_code.co_name == "__del__" or _is_of_garbage(frame):
            return True
        frame = frame.f_back
    return False


def _is_of_garbage(frame: Any) -> bool:
    """Whether a ``weakref.finalize`` runs since its object is garbage, not since it was called."""
    return frame.f_code is _FINALIZE and frame.f_locals["_"] is not None


def _handle(kind: type[BaseException], *_: object) -> None:
    raise kind("from a handler")


def interrupt(
    function: Callable[[], object],
    nth: int,
    kind: type[BaseException],
    files: tuple[str, ...] = (PACKAGE,),
) -> Outcome:
    """Call a function, in whose nth instruction in these files a handler raises."""
    tracer = _Tracer(nth, kind, files)
    results: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        # Python 3.12 reports instructions only if a frame asked for them before settrace.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(tracer)
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            sys.settrace(None)

    # What is raised in a finaliser that the collector runs is printed, and goes no further.
    gc.disable()
    before = signal.signal(signal.SIGUSR1, functools.partial(_handle, kind))
    try:
        with in_thread(run):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
        gc.enable()
    result, error = results[0] if results else None, errors[0] if errors else None
    return Outcome(result, error, tracer.where, tracer.count)
