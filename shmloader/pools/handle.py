"""One worker in the main process: its socket, and a descriptor of its process."""

import multiprocessing.process
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from shmloader.interruptions import Suppressed
from shmloader.pools.forking import Descriptors, ForkedProcess, is_readable
from shmloader.pools.task_queue import Outbox, receive

# How long a worker may take to end after SIGTERM, and after SIGKILL.
_TERMINATE_S = 0.3
KILL_S = 5.0


class WorkerHandle(Outbox):
    """The main process's end of a worker's socket pair, and its process. Owns both descriptors.

    Attributes:
        channel: The socket.
        is_lost: Whether this process no longer uses the worker: it is dead or detached.
        pid: The worker's process id.
        pidfd: Readable when the process has ended; -1 once closed.
        process: The process of multiprocessing's; None if other ranks share the worker. Then its
            id, its descriptor and what returns its exit code are given.
        reader: The reader of its last layout, or why there is none. It sends a layout only if that
            differs from its last one.
        pieces: What has come of a long message.
    """

    process: Any = None
    reader: Any = None

    def __init__(
        self,
        channel: socket.socket,
        process: Any = None,
        shared: tuple[int, Descriptors, Callable[[int], int | None]] | None = None,
    ) -> None:
        super().__init__(channel)
        self.pieces = bytearray()
        if shared is not None:
            self.pid, self._owned, self._exit_code = shared
        else:
            self.process, self.pid, popen = process, process.pid, process._popen
            is_ours = isinstance(popen, ForkedProcess)
            self._owned = popen.owned if is_ours else Descriptors(map(os.pidfd_open, [self.pid]))
            self._exit_code = lambda _: process.exitcode
        (self.pidfd,) = self._owned.numbers()

    def receive(self) -> bytes | None:
        """Return the next message, if one is there. Does not sleep."""
        return receive(self.channel, 1) or None  # of a closed end, the process will show why

    def hang_up(self) -> None:
        """Close the socket. The worker ends when it has answered its present task."""
        with Suppressed(OSError):  # the worker is gone, or the socket is shut down already
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()

    @property
    def exit_code(self) -> int | None:
        """The exit code of a worker that has ended, negative for a signal; None if not known."""
        return self._exit_code(self.pid)

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        with Suppressed(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close_pidfd(self) -> None:
        """Close the descriptor of the process. May be called again."""
        self.pidfd = -1
        self._owned.close_all()

    def reap(self, deadline: float) -> bool:
        """Wait for the worker's end, and reap it unless ranks share it. Returns whether it came."""
        if not is_readable(self.pidfd, deadline - time.monotonic()):
            return False
        if self.process is not None:
            # A fork server reaps the worker and tells this process, which takes a moment more.
            self.process.join(1.0)
            if self.process.exitcode is None:
                # Other code has reaped it. At exit, multiprocessing would send a signal to its
                # pid, which may be another process's by then.
                children = multiprocessing.process._children  # type: ignore[attr-defined]
                children.discard(self.process)
        return True


def end_all(workers: list[WorkerHandle], grace_s: float) -> None:
    """Wait for workers to end, reap them, and close their descriptors. May be called again.

    Those that ranks share go on: only the descriptors are closed.

    Args:
        workers: Workers that have been told to end.
        grace_s: Seconds in which they may end by themselves. Then they get SIGTERM, and SIGKILL.
    """
    for worker in workers:
        if worker.process is None:
            worker.close_pidfd()
    steps = ((grace_s, signal.SIGTERM), (_TERMINATE_S, signal.SIGKILL), (KILL_S, None))
    for wait_s, then in steps:
        deadline = time.monotonic() + wait_s
        for worker in workers:
            if worker.pidfd >= 0 and worker.reap(deadline):
                worker.close_pidfd()
        for worker in workers:
            if worker.pidfd >= 0 and then is not None:
                worker.send_signal(then)


def end_unused(worker: WorkerHandle) -> None:
    """Kill a worker that was sent no task, and reap it, unless ranks share it."""
    if worker.process is not None:
        worker.send_signal(signal.SIGKILL)
    worker.hang_up()
    end_all([worker], 0.0)
