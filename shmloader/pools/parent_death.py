"""Ends the workers when the main process ends, however it ends and whatever they are doing.

Only the main process holds the writing end of a pipe, and it never writes. When the main process
ends, the kernel closes that end and sends each worker the signal that the worker has registered at
its reading end. The signal is SIGKILL, which also ends a stopped worker and a worker inside a call
that holds the interpreter lock.

``PR_SET_PDEATHSIG`` would not do: its signal comes when the *thread* that started the worker ends,
or, for a worker that the nursery has forked, when the nursery ends.
"""

import fcntl
import os
import select
import signal
from multiprocessing import reduction
from typing import Any

from shmloader.process_state import PROCESS


class ParentDeathPipe:
    """The pipe, owned by the pool. In a process that gets it pickled, it has a reading end only.

    Attributes:
        main_pid: Process id of the main process.
    """

    def __init__(self) -> None:
        self.main_pid = os.getpid()
        self._read, self._write = os.pipe()
        PROCESS.parent_death_pipes.add(self)

    def __getstate__(self) -> tuple[int, Any]:
        """Pickle for a process that is being started."""
        return self.main_pid, reduction.DupFd(self._read)

    def __setstate__(self, state: tuple[int, Any]) -> None:
        self.main_pid, duplicate = state
        self._read, self._write = duplicate.detach(), -1

    def hold(self) -> None:
        """Make this process end with the main process: at once if that has ended already."""
        self.close_write()
        # Opened again, since the signal and its receiver belong to the open file, not to the pipe.
        # Where that cannot be, as without /proc, only the newest worker gets the signal: the others
        # end when they next look for a task.
        path, flags = f"/proc/self/fd/{self._read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            read = os.open(path, flags)
        except OSError:
            read = self._read
        else:
            self.close_read()
        fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
        poll = select.poll()
        poll.register(read, 0)  # hanging up is always reported
        if poll.poll(0):
            os._exit(1)

    def close_read(self) -> None:
        """Close the reading end. No worker may be started afterwards."""
        fd, self._read = self._read, -1
        if fd >= 0:
            os.close(fd)

    def close_write(self) -> None:
        """Close the writing end, in a process that is not the main one."""
        fd, self._write = self._write, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close both ends, which ends every running worker. May be called again."""
        self.close_read()
        self.close_write()
