"""Gets a thread out of its ``poll``, at once or in a moment.

At once is too soon where the user's thread is about to come back from ``next()``: the system call
that wakes lets go of the GIL, the thread that was woken takes it, and ``next()`` ends when that
thread has done its work, 0.5 ms later where a training step of 20 ms has let caches and cores go
cold. Were the GIL kept there, it would go at what the user does next, which is to drop the batch
before: torch lets go of it, too. So the thread is woken in a moment, by a timer of the kernel's.

What it is worth, without the delay to with it, in five rounds in turns on two cores: a training
loop with a seed (row I of the benchmark) waits 2.4 times as long (1.6–2.9), and the longest wait is
8 times as long (1.5–14); photographs (row D) take 1.2 times the main process's CPU (1.16–1.26).
"""

import contextlib
import ctypes
import functools
import os
import select
import time

# What is left of ``next()``, and to drop a batch, take 0.1 ms where caches are cold.
_SOON_NS = 200_000

_NS_PER_S = 1_000_000_000


class _Setting(ctypes.Structure):
    """``struct itimerspec`` of <sys/timerfd.h>: the interval, and the time to the first ring."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


@functools.cache
def _libc() -> ctypes.PyDLL:
    """Its functions keep the GIL. Python's own, of which it has these since 3.13, let go of it."""
    return ctypes.PyDLL(None, use_errno=True)


def _make_timer() -> int:
    fd: int = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


class Waker:
    """Two descriptors to poll. Closed with the last reference: not while they are used.

    Attributes:
        is_due: Whether :meth:`soon` has been called since the last :meth:`begin`, and its ring has
            not been taken.

    Raises:
        OSError: If there are no descriptors left.
    """

    _event = _timer = -1

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._timer = _make_timer()
        self._set_timer = _libc().timerfd_settime
        self._setting = ctypes.byref(_Setting(0, 0, *divmod(_SOON_NS, _NS_PER_S)))
        self.is_due = False

    def __del__(self) -> None:
        for fd in (self._event, self._timer):
            if fd >= 0:
                os.close(fd)

    def register(self, poll: "select.poll") -> None:
        """Have a poll look at both."""
        poll.register(self._event, select.POLLIN)
        poll.register(self._timer, select.POLLIN)

    def now(self) -> None:
        """Wake at once. From any thread."""
        with contextlib.suppress(BlockingIOError):  # it is full: nobody has looked for long
            os.eventfd_write(self._event, 1)

    def soon(self) -> None:
        """Wake in a moment. From one thread."""
        if not self.is_due:
            self.is_due = True
            self._set_timer(self._timer, 0, self._setting, None)

    def begin(self) -> None:
        """Whoever polls is awake, and will look about. On its thread."""
        self.is_due = False

    def take(self, fd: int) -> bool:
        """Whether a descriptor that can be read is one of these; it is silent then. As above."""
        if fd not in (self._event, self._timer):
            return False
        with contextlib.suppress(BlockingIOError):  # the timer has been set anew
            os.read(fd, 8)
        if fd == self._timer:
            self.is_due = False  # it may have rung since `begin`
        return True
