"""Workers end with the main process, however it ends and whatever they are doing.

The main process alone holds the writing end of a pipe, and never writes. When it is gone, for
whatever reason, the kernel closes that end, and sends every worker the signal that it asked for
there: SIGKILL, which also ends a worker that is stopped, or that is in a call which keeps the
interpreter. A thread of the worker's watches the main process as well, for where a copy of the
pipe's end has leaked into a process that lives on.

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
        _Lifelines.live.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the worker's end; multiprocessing calls this for each worker it starts."""
        return WorkerLifeline, (self._main_pid, reduction.DupFd(self._read))

    def hold(self) -> None:
        """Hold on to it, in a forked worker."""
        read, self._read = self._read, -1
        WorkerLifeline(self._main_pid, read).hold()

    def close_read(self) -> None:
        """Close the end that workers start with; none will."""
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def close_write(self) -> None:
        """Close the writing end, in a process that is not the main one."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1

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
        # The signal and its receiver belong to the open file, of which each worker needs its own.
        with contextlib.suppress(OSError):  # no /proc: the thread alone
            own = os.open(f"/proc/self/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
            flags = fcntl.fcntl(own, fcntl.F_GETFL)
            fcntl.fcntl(own, fcntl.F_SETFL, flags | os.O_ASYNC)
        os.close(read)
        try:
            main = os.pidfd_open(self._main_pid)
        except ProcessLookupError:
            os._exit(1)
        threading.Thread(target=_watch, args=(main,), name="shmloader_watch", daemon=True).start()


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
