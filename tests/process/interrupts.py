"""A Ctrl-C at a chosen line, and functions that run on another thread meanwhile."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any


@contextlib.contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run a function on another thread meanwhile."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(20)
        assert not thread.is_alive()


class Interrupter:
    """Raises KeyboardInterrupt at the nth line that this thread runs in some files."""

    def __init__(self, files: Collection[str | None], nth: int) -> None:
        self.files = files
        self.left = nth

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(
    function: Callable[[], object], files: Collection[str | None], nth: int
) -> list[object]:
    """What a function gives; nothing if it was interrupted at its nth line in some files."""
    found: list[object] = []
    interrupter = Interrupter(files, nth)

    def run() -> None:
        # An interruption of a finaliser that the collector runs is printed and goes no further.
        gc.disable()
        sys.settrace(interrupter)
        try:
            result = function()
        except KeyboardInterrupt:
            return
        finally:
            sys.settrace(None)
            gc.enable()
        found.append(result)

    # On a thread of its own, which has no handlers around it for the interruption to confuse.
    with in_thread(run):
        pass
    assert not found or interrupter.left > 0, "it was interrupted, and went on"
    return found
