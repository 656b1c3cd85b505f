"""Avoids and delays wake-ups, which cost more than the work between them.

**Before sleeping.** To put a process to sleep and to wake it takes some ten microseconds of two
processors, more in a virtual machine, and the next message often arrives sooner than that. So both
ends of a socket look for a message a few times, and let other processes run in between, before they
sleep (:func:`receive_soon`). With two workers on two cores, this gives 1.15 to 1.2 times as many
batches a second if a batch is 256 samples of 3×32×32 floats, and 1.04 to 1.07 times as many if it
is 114 small tensors.

A rank that shares workers looks less often. torchrun starts each rank in a separate session, the
kernel divides the cores among sessions (sched(7), autogroup), and yielding gives the core only to
processes of the same session. With 5 looks instead of 50, in four rounds in turns (AMD EPYC,
2026-11-25), two such ranks on two cores take 78 µs of CPU for a small batch instead of 129, and
four take 122 instead of 183. A process that does not share its workers would lose by fewer looks: a
`TensorDataset` of a million rows (row K) gives 0.89 of the batches with 5 looks (0.85–0.94, four
rounds, 2026-11-26).

**Before waking.** A thread that is woken at once gets in the way of the user's thread, which is
about to return from ``next()``: the system call that wakes releases the GIL, the woken thread takes
it, and ``next()`` returns only when that thread has done its work, 0.5 ms later where a training
step of 20 ms has let caches and cores go cold. Keeping the GIL in that call would not help: the
user's thread then drops the previous batch, and torch releases the GIL there, too. So
:class:`Waker` can wake the thread a moment later, by a kernel timer.

Without that delay, in three rounds in turns on two cores (AMD EPYC, 2026-11-26), a training loop
with a seed (row I of the benchmark) waits 2.2 times as long (1.9–2.5), and the longest wait is 9
times as long (1.8–16). Photographs (row D) take the same time and CPU, since their engine needs its
thread less often.
"""

import contextlib
import ctypes
import functools
import os
import select
import time
from collections.abc import Callable
from typing import Any

from shmloader.interruptions import is_interruption

# How often to look for a message, which takes about 70 µs in all.
LOOKS = 50
# The same in a rank that shares workers.
SHARED_LOOKS = 5

# The delay. The rest of ``next()``, and dropping a batch, take 0.1 ms with cold caches.
_SOON_NS = 200_000

_NS_PER_S = 1_000_000_000


def receive_soon(receive: Callable[..., Any], *arguments: object, looks: int = LOOKS) -> Any:
    """Receive a message that is there or about to arrive, without sleeping.

    Args:
        receive: A socket's method, which raises BlockingIOError while nothing is there.
        arguments: The method's arguments.
        looks: How often to look.

    Returns:
        What the method returns; None if nothing has arrived.
    """
    for _ in range(looks):
        try:
            return receive(*arguments)
        except BlockingIOError:
            let_others_run()
    return None


def poll_soon(poll: "select.poll") -> list[tuple[int, int]]:
    """Return the events of a poll, now or in a moment, without sleeping.

    Returns:
        Pairs of a descriptor and its events; empty if nothing has happened.
    """
    for _ in range(LOOKS):
        if happened := poll.poll(0):
            return happened
        let_others_run()
    return []


def let_others_run() -> None:
    """Let another process have this core, if one is ready to run."""
    try:
        os.sched_yield()
    except OSError as error:  # a sandbox refuses it, or a signal handler raised a TimeoutError
        if is_interruption(error):
            raise


class _Setting(ctypes.Structure):
    """``struct itimerspec`` of <sys/timerfd.h>: the interval, and the time to the first expiry."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    )


@functools.cache
def _libc() -> ctypes.PyDLL:
    """Return libc. Calls keep the GIL, which Python 3.13's own timer functions release."""
    return ctypes.PyDLL(None, use_errno=True)


def _make_timer() -> int:
    fd: int = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


class Waker:
    """Two descriptors that get a thread out of its ``poll``, at once or a moment later.

    They are closed when the last reference to this object is gone, so never while they are in use.

    Attributes:
        is_due: Whether the timer of :meth:`soon` is set, and neither :meth:`begin` nor
            :meth:`take` has reset it.

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

    # When the interpreter exits, this may be called after the module's names are gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in (self._event, self._timer):
            if fd >= 0:
                close(fd)

    def register(self, poll: "select.poll") -> None:
        """Add both descriptors to a poll."""
        poll.register(self._event, select.POLLIN)
        poll.register(self._timer, select.POLLIN)

    def now(self) -> None:
        """Wake the thread at once. Called from any thread."""
        with contextlib.suppress(BlockingIOError):  # the counter is full, so it can be read
            os.eventfd_write(self._event, 1)

    def soon(self) -> None:
        """Wake the thread a moment later. Called from one thread."""
        if not self.is_due:
            self.is_due = True
            self._set_timer(self._timer, 0, self._setting, None)

    def begin(self) -> None:
        """Note that the polling thread is awake. Called on that thread."""
        self.is_due = False

    def take(self, fd: int) -> bool:
        """Reset a readable descriptor if it is one of these. Called on the polling thread.

        Returns:
            Whether it is one of these.
        """
        if fd not in (self._event, self._timer):
            return False
        with contextlib.suppress(BlockingIOError):  # the timer has been set anew
            os.read(fd, 8)
        if fd == self._timer:
            self.is_due = False  # the timer may have been set again since `begin`
        return True
