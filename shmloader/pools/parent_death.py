"""Ends the workers when the main process ends, however it ends and whatever they are doing.

Only the main process holds the writing end of a pipe, and it never writes. When the main process
ends, the kernel closes that end and sends each worker the signal that was registered at its reading
end. The signal is SIGKILL, which also ends a stopped worker and a worker inside a call that holds
the interpreter lock. For a fresh interpreter the main process registers the signal, because the
worker first imports the user's program, and torch with it. A thread of the worker also watches the
main process, in case a copy of the writing end has leaked into a process that keeps running.

``PR_SET_PDEATHSIG`` would not do: its signal comes when the *thread* that started the worker ends,
or, for a worker of a fork server, when the fork server ends.
"""

import contextlib
import fcntl
import os
import select
import signal
import threading
from multiprocessing import reduction
from typing import Any

from shmloader.process_state import PROCESS


class ParentDeathPipe:
    """The main process's end, owned by the pool. It pickles as the worker's end.

    Attributes:
        main_pid: Process id of the main process.
    """

    def __init__(self) -> None:
        self.main_pid = os.getpid()
        self._read, self._write = os.pipe()
        # The reading end for the fresh interpreter that is being started.
        self._next_read = -1
        PROCESS.parent_death_pipes.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the worker's end; multiprocessing calls this for each worker it starts."""
        self._close_next_read()
        try:
            self._next_read = _open_again(self._read)
        except FileNotFoundError:  # no /proc
            self._next_read = os.dup(self._read)
        return WorkerParentDeathPipe, (self.main_pid, reduction.DupFd(self._next_read))

    def tie(self, pid: int) -> None:
        """Make a new worker end with this process even before the worker calls ``hold``."""
        if self._next_read >= 0:
            with contextlib.suppress(OSError):  # the worker has ended already
                _request_signal(self._next_read, pid)
            self._close_next_read()

    def _close_next_read(self) -> None:
        fd, self._next_read = self._next_read, -1
        if fd >= 0:
            os.close(fd)

    def hold(self) -> None:
        """Make this process end with the main process from now on. Called in a forked worker."""
        read, self._read = self._read, -1
        WorkerParentDeathPipe(self.main_pid, read).hold()

    def close_read(self) -> None:
        """Close the reading end. No worker may be started afterwards."""
        self._close_next_read()
        fd, self._read = self._read, -1
        if fd >= 0:
            os.close(fd)

    def close_write(self) -> None:
        """Close the writing end, in a process that is not the main one."""
        # Reset first: after an interruption, a second close might close another file.
        fd, self._write = self._write, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close both ends, which ends every running worker. May be called again."""
        self.close_read()
        self.close_write()


class WorkerParentDeathPipe:
    """The worker's end.

    Args:
        main_pid: Process id of the main process.
        duplicate: The reading end: a descriptor, or what ``DupFd`` became in this process.
    """

    def __init__(self, main_pid: int, duplicate: Any) -> None:
        self.main_pid = main_pid
        self._duplicate = duplicate

    def hold(self) -> None:
        """Make this process end with the main process: at once if the main process has ended."""
        read = self._duplicate if isinstance(self._duplicate, int) else self._duplicate.detach()
        with contextlib.suppress(OSError):  # without /proc, only the thread watches
            _request_signal(_open_again(read), os.getpid())
        os.close(read)
        try:
            main = os.pidfd_open(self.main_pid)
        except ProcessLookupError:
            os._exit(1)
        threading.Thread(target=_watch, args=(main,), name="shmloader_watch", daemon=True).start()


def _open_again(read: int) -> int:
    """Open the reading end again: a signal and its receiver are registered for an open file."""
    return os.open(f"/proc/self/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _request_signal(read: int, pid: int) -> None:
    """Have the kernel kill a process when the writing end is closed."""
    fcntl.fcntl(read, fcntl.F_SETOWN, pid)
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(read, fcntl.F_GETFL)
    fcntl.fcntl(read, fcntl.F_SETFL, flags | os.O_ASYNC)


def _watch(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(1)
