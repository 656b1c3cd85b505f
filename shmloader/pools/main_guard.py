"""Guards the start of fresh interpreters, which import the program's main file.

If that file iterates a loader without a main guard, each of them would start further ones. Python
refuses that with a long traceback in each, and the main process does not learn why they have ended.
Here they end silently, with an exit code that tells the main process the reason.

Ctrl-C is for the main process. It does not reach a process that is being started, and does not
interrupt the start in the main process: the handler runs right afterwards, once for each Ctrl-C.
"""

import contextlib
import inspect
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

from shmloader.threads.uninterruptible import uninterruptible

#: Exit code of a worker that would have started workers while it imported the main file.
NO_GUARD_EXIT = 73

#: What happened, in Python's words, and what to do.
NO_GUARD_TEXT = """\
An attempt has been made to start a new process before the current process has finished its \
bootstrapping phase. A process that is started by 'spawn' or 'forkserver' imports the program's \
main file, and this file starts workers as soon as it is imported. Put that part of it under a \
main guard:

if __name__ == "__main__":
    for batch in loader:
        ...
"""

_NAME = "shmloader worker "


def name_of(worker_id: int | str) -> str:
    """Return the process name of a worker, or of another process that the pool starts."""
    return f"{_NAME}{worker_id}"


def refuse_during_import() -> None:
    """Refuse to start workers in a process that is importing the main file.

    Does not return in a process that shmloader has started: it ends with :data:`NO_GUARD_EXIT`.

    Raises:
        RuntimeError: In a process that other code has started.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(_NAME):
        os._exit(NO_GUARD_EXIT)
    raise RuntimeError(NO_GUARD_TEXT)


@contextlib.contextmanager
def sigint_held_back(*, is_fresh: bool) -> Iterator[None]:
    """Keep Ctrl-C from a process that is started in this block, until that process ignores it.

    This process handles it when the block ends. May be used on any thread. On another thread than
    the main one, the handler of SIGINT stays installed, since only the main thread can change it.

    Args:
        is_fresh: Whether multiprocessing starts an interpreter, and so a resource tracker.
    """
    if is_fresh:
        # Otherwise multiprocessing starts it within the block, and unblocks SIGINT afterwards.
        resource_tracker.ensure_running()
    with _handler_deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            yield
        finally:
            uninterruptible(lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before))


@contextlib.contextmanager
def _handler_deferred() -> Iterator[None]:
    """Run the handler of SIGINT when the block ends, rather than within it.

    A signal that this thread blocks may be delivered to any other thread, such as one of
    OpenBLAS; Python's handler then still runs in the main thread. Handlers of other signals may
    raise at any time.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    pid = os.getpid()
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            heard.append(number)
        else:  # a process that another thread has forked meanwhile
            handler(number, frame)

    def restore() -> None:
        if signal.getsignal(signal.SIGINT) is hear:
            signal.signal(signal.SIGINT, handler)

    try:
        with contextlib.suppress(ValueError):  # only the main thread can set handlers
            signal.signal(signal.SIGINT, hear)
        yield
    finally:
        try:
            uninterruptible(restore)
        finally:
            # Not sent as a signal again: a wakeup descriptor has been written to already.
            for number in heard:
                handler(number, inspect.currentframe())
