"""One worker process, as the main process holds it: the process, its socket and its pidfd."""

import collections
import errno
import multiprocessing.process
import os
import select
import socket
import time
from multiprocessing.process import BaseProcess

from shmloader.interruptions import Suppressed, is_interruption
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.channel import receive_soon

# Of a user without privileges Linux lets as many descriptors be on their way to any processes as
# one may have open (unix(7), ETOOMANYREFS). There is no event for "now there is room": after how
# long it is tried again, and for how long.
_ROOM_S = 0.001
_ROOM_WAIT_S = 10.0

# How long a worker may take to end after SIGTERM, and after SIGKILL.
_TERMINATE_S = 0.3
KILL_S = 5.0

_PEER_IS_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


class WorkerHandle:
    """A worker's process, socket and pidfd; owns the latter two.

    Attributes:
        process: The ``multiprocessing`` process.
        channel: Our end of the socket pair.
        pidfd: Readable when the process has ended; -1 once closed.
        outbox: Messages, each with its descriptors, that the socket did not take yet.
        is_lost: Whether it is dead, and reaped.
    """

    __slots__ = ("_refused_at", "channel", "is_lost", "outbox", "pidfd", "process")

    def __init__(self, process: BaseProcess, channel: socket.socket) -> None:
        self.process = process
        self.channel = channel
        self.pidfd = os.pidfd_open(process.pid or 0)
        self.outbox: collections.deque[tuple[bytes, tuple[int, ...]]] = collections.deque()
        self.is_lost = False
        # Since when there is no room for its descriptors on their way; None: there was.
        self._refused_at: float | None = None

    def try_send(self, data: bytes, descriptors: tuple[int, ...]) -> bool:
        """Send a message now; whether that could be done. To a dead worker it is, and is lost."""
        try:
            if descriptors:
                socket.send_fds(self.channel, [data], descriptors)
            else:
                self.channel.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                self._wait_for_room(error)
                return False
            if error.errno not in _PEER_IS_GONE:
                raise
            # It is dying, and its pidfd tells us so.
        self._refused_at = None
        return True

    def _wait_for_room(self, error: OSError) -> None:
        now = time.monotonic()
        if self._refused_at is None:
            self._refused_at = now
        if now - self._refused_at > _ROOM_WAIT_S:
            text = (
                "more file descriptors are on their way between this user's processes than one may "
                "have open, and nobody takes them; raise `ulimit -n`"
            )
            raise OSError(error.errno, text) from error
        time.sleep(_ROOM_S)

    def flush(self) -> bool:
        """Send what waits; whether nothing is left."""
        while self.outbox:
            data, descriptors = self.outbox[0]
            if not self.try_send(data, descriptors):
                return False
            self.outbox.popleft()
        return True

    def receive_soon(self) -> bytes | None:
        """The next message, if one is there or about to come. Does not sleep."""
        try:
            return receive_soon(self.channel.recv, RECEIVE_BYTES) or None
        except OSError as error:
            if is_interruption(error):  # a TimeoutError is an OSError
                raise
            return None  # the pidfd tells us more

    def receive(self) -> bytes | None:
        """The next message, if one is there."""
        try:
            return self.channel.recv(RECEIVE_BYTES) or None
        except OSError as error:  # BlockingIOError is one
            if is_interruption(error):
                raise
            return None

    def hang_up(self) -> None:
        """End its loop, once it has answered what it is at."""
        with Suppressed(OSError):  # it is gone, or this was done before
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()

    def close_pidfd(self) -> None:
        """Close it; may be called again."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def reap(self, deadline: float) -> bool:
        """Wait for its end until ``deadline`` of the monotonic clock; whether it has ended.

        Waits on the pidfd: multiprocessing's sentinel stays silent for as long as a child of the
        worker's own lives.
        """
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        if self.process.exitcode is None:
            # A forkserver reaps it and tells us, which takes a moment more.
            self.process.join(1.0)
        if self.process.exitcode is None:
            # Somebody else has reaped it (a SIGCHLD handler, or SIG_IGN). multiprocessing would
            # keep it, with its pipes, and send its number a signal at exit, whosever that is then.
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
        self.process.join(0)  # lets multiprocessing forget it
        return True


def end_all(workers: list[WorkerHandle], grace_s: float) -> None:
    """Wait for workers to end, reap them, and close their pidfds. May be called again.

    Args:
        workers: They have been told to end.
        grace_s: Seconds in which they may do so by themselves; then they get SIGTERM and SIGKILL.
    """
    for wait_s, then in (
        (grace_s, BaseProcess.terminate),
        (_TERMINATE_S, BaseProcess.kill),
        (KILL_S, None),
    ):
        deadline = time.monotonic() + wait_s
        workers = [worker for worker in workers if worker.pidfd >= 0]
        for worker in workers:
            if worker.reap(deadline):
                worker.close_pidfd()
        if then is not None:
            for worker in workers:
                if worker.pidfd >= 0:
                    then(worker.process)
