"""Workers end with the main process, however it ends and whatever they are doing.

The main process alone holds the writing end of a pipe, and never writes. When it is gone, for
whatever reason, the kernel closes that end, and sends every worker the signal that was asked for
there: SIGKILL, which also ends a worker that is stopped, or that is in a call which keeps the
interpreter. The main process asks on behalf of a worker that it starts afresh, since that imports
the user's program, and with it torch, before it comes to any line of ours. A thread of the worker's
watches the main process as well, for where a copy of the pipe's end has leaked into a process that
lives on.

``PR_SET_PDEATHSIG`` would not do: its signal comes when the *thread* that started the worker
ends, and from the fork server's end where the worker was started by one.
"""

import contextlib
import fcntl
import os
import select
import signal
import threading
import weakref
from multiprocessing import reduction
from typing import Any, ClassVar


class _Lifelines:
    """Those that this process holds."""

    live: ClassVar["weakref.WeakSet[Lifeline]"] = weakref.WeakSet()


class Lifeline:
    """The main process's end. The pool owns it; pickled on its way to a worker."""

    def __init__(self) -> None:
        self._main_pid = os.getpid()
        self._read, self._write = os.pipe()
        # The reading end of a worker that is being started afresh.
        self._next_read = -1
        _Lifelines.live.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the worker's end; multiprocessing calls this for each worker it starts."""
        self._close_next_read()
        try:
            self._next_read = _open_again(self._read)
        except FileNotFoundError:  # no /proc
            self._next_read = os.dup(self._read)
        return WorkerLifeline, (self._main_pid, reduction.DupFd(self._next_read))

    def tie(self, pid: int) -> None:
        """Have a worker that was started just now end with this process, before it holds on."""
        if self._next_read >= 0:
            with contextlib.suppress(OSError):  # it has ended already
                _ask_for_the_end(self._next_read, pid)
            self._close_next_read()

    def _close_next_read(self) -> None:
        fd, self._next_read = self._next_read, -1
        if fd >= 0:
            os.close(fd)

    def hold(self) -> None:
        """Hold on to it, in a forked worker."""
        read, self._read = self._read, -1
        WorkerLifeline(self._main_pid, read).hold()

    def close_read(self) -> None:
        """Close the end that workers start with; none will."""
        self._close_next_read()
        fd, self._read = self._read, -1
        if fd >= 0:
            os.close(fd)

    def close_write(self) -> None:
        """Close the writing end, in a process that is not the main one."""
        # Forgotten first: closed twice, after an interruption, it might be somebody else's.
        fd, self._write = self._write, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close both ends; may be called again. Ends every worker that still lives."""
        self.close_read()
        self.close_write()


class WorkerLifeline:
    """A worker's end, in one that was not forked from the main process."""

    def __init__(self, main_pid: int, duplicate: Any) -> None:
        self._main_pid = main_pid
        self._duplicate = duplicate

    def hold(self) -> None:
        """End with the main process from now on; at once if it has ended already."""
        read = self._duplicate if isinstance(self._duplicate, int) else self._duplicate.detach()
        with contextlib.suppress(OSError):  # no /proc: the thread alone
            _ask_for_the_end(_open_again(read), os.getpid())
        os.close(read)
        try:
            main = os.pidfd_open(self._main_pid)
        except ProcessLookupError:
            os._exit(1)
        threading.Thread(target=_watch, args=(main,), name="shmloader_watch", daemon=True).start()


def _open_again(read: int) -> int:
    """The same end, opened anew: the signal and its receiver belong to the open file."""
    return os.open(f"/proc/self/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _ask_for_the_end(read: int, pid: int) -> None:
    """Have a process killed when the writing end is closed."""
    fcntl.fcntl(read, fcntl.F_SETOWN, pid)
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(read, fcntl.F_GETFL)
    fcntl.fcntl(read, fcntl.F_SETFL, flags | os.O_ASYNC)


def _watch(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(1)


def _leave_to_parent() -> None:
    for lifeline in list(_Lifelines.live):
        lifeline.close_write()


# A forked child of the user's must not keep our workers alive.
os.register_at_fork(after_in_child=_leave_to_parent)
