"""A worker's start, where it is not multiprocessing's own affair: descriptors, and Ctrl-C.

Guarantees:
    * Ctrl-C while a worker starts does not reach the worker, nor the middle of the start in the
      main process: there it is heard right afterwards, as often as it came.
    * A start that would run out of descriptors fails before it has opened any.
"""

import contextlib
import errno
import inspect
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

from shmloader.threads.uninterruptible import uninterruptible

# multiprocessing takes up to six for a moment: two pipes, and a pipe or a socket to whoever forks.
# One is for the worker's pidfd.
_START_DESCRIPTORS = 7


def check_descriptors(any_socket: socket.socket) -> None:
    """See to it that a start need not fail in the middle.

    multiprocessing leaves its first pipe open when there is no descriptor for the second.

    Args:
        any_socket: What is copied to find out.

    Raises:
        OSError: EMFILE or ENFILE, if there are too few descriptors left.
    """
    spare: list[int] = []
    try:
        while len(spare) < _START_DESCRIPTORS:
            spare.append(os.dup(any_socket.fileno()))
    finally:
        for descriptor in spare:
            os.close(descriptor)


def raise_what_lacks(error: OSError) -> None:
    """Say which limit a worker's start has met; does nothing if it was none.

    Raises:
        OSError: With the same number, a text that names the remedy, and ``error`` as its cause.
    """
    remedy = {
        errno.EMFILE: "increase the limit using `ulimit -n` in the shell",
        errno.ENFILE: "close files of other programs (the limit is the whole machine's)",
        errno.EAGAIN: "increase the limit on processes (`ulimit -u`, or pids.max of the container)",
        errno.ENOMEM: "give it more memory",
    }.get(error.errno or 0)
    if remedy is not None:
        text = f"{error.strerror}: no worker process could be started. Please {remedy}, or lower "
        raise OSError(error.errno, f"{text}num_workers.") from error


@contextlib.contextmanager
def sigint_held_back(*, is_fresh: bool) -> Iterator[None]:
    """Keep Ctrl-C from a process that is started inside of this, until it ignores it.

    This one hears it afterwards. From any thread; where it is not the main one, the handler of
    SIGINT, which is the main one's, stays as it is.

    Args:
        is_fresh: Whether multiprocessing starts an interpreter for it, and a resource tracker.
    """
    if is_fresh:
        # Else multiprocessing would inside of this, and let Ctrl-C through from there on.
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
    """What SIGINT does in the main thread, it does afterwards.

    What this thread blocks, any other may take, as one of OpenBLAS does; Python's handler runs in
    the main thread all the same. Handlers of other signals may raise at any time.
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
        with contextlib.suppress(ValueError):  # not the main thread, which alone has handlers
            signal.signal(signal.SIGINT, hear)
        yield
    finally:
        try:
            uninterruptible(restore)
        finally:
            # Not as a signal again: whoever has a wakeup descriptor was told of the first.
            for number in heard:
                handler(number, inspect.currentframe())
