"""Descriptors that no interruption leaves open, and one that wakes a thread."""

import contextlib
import itertools
import os
import select
from collections.abc import Callable
from typing import Any


class Descriptors(list[Any]):
    """Descriptors that this object owns. It closes them when it is garbage, if not before.

    A signal handler may raise between any two instructions, such as a call that opens a descriptor
    and the one that stores its number. So a single call opens and stores it, such as
    ``Descriptors(map(os.pidfd_open, [pid]))``.

    The items are numbers, or messages of ``recvmsg`` with numbers in them.
    """

    def numbers(self) -> list[int]:
        """Return the numbers of the descriptors that are open."""
        found: list[int] = []
        for item in self:
            if isinstance(item, int):
                found.append(item)
            else:
                for _, _, data in item[1]:
                    found.extend(memoryview(data).cast("i"))
        return found

    # When the interpreter exits, this may be called after the module's names are gone.
    def close_all(self, close: Callable[[int], None] = os.close) -> None:
        """Close them. May be called again."""
        numbers = self.numbers()
        # Forgotten first: after an interruption, a second close might close another file.
        self.clear()
        any(map(close, numbers))

    def __del__(self) -> None:
        self.close_all()


class Waker:
    """A descriptor that gets a thread out of its ``poll``.

    It is closed when the last reference to this object is gone, so never while it is in use.

    Attributes:
        fd: The descriptor, to be polled for reading.

    Raises:
        OSError: If there are no descriptors left.
    """

    def __init__(self) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._owned = Descriptors(itertools.starmap(os.eventfd, [(0, flags)]))
        (self.fd,) = self._owned

    def wake(self) -> None:
        """Wake the thread. Called from any thread."""
        with contextlib.suppress(BlockingIOError):  # the counter is full, so it can be read
            os.eventfd_write(self.fd, 1)

    def reset(self) -> None:
        """Reset the descriptor, which is readable. Called on the polling thread."""
        os.eventfd_read(self.fd)


def is_readable(fd: int, wait_s: float | None = 0.0) -> bool:
    """Wait until a descriptor can be read. Of a process's descriptor: until the process has ended.

    Args:
        fd: The descriptor.
        wait_s: Longest wait in seconds; None waits without a limit.
    """
    poll = select.poll()  # select.select() takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000))
