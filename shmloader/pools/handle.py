"""One worker in the main process: its socket and, if this process started it, its process."""

import collections
import errno
import multiprocessing.process
import os
import select
import socket
import time
from multiprocessing.process import BaseProcess

from shmloader.interruptions import Suppressed
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.nursery import Forked

# For a user without privileges, Linux limits the descriptors that are on their way between all
# processes to the number that one process may have open (unix(7), ETOOMANYREFS). No event reports
# when a further one may be sent, so sending is tried again after this time, up to this limit.
_RETRY_S = 0.001
_RETRY_LIMIT_S = 10.0

# How long a worker may take to end after SIGTERM, and after SIGKILL.
_TERMINATE_S = 0.3
KILL_S = 5.0

_PEER_IS_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


class WorkerChannel:
    """The main process's end of a worker's socket pair. Owns the socket.

    Attributes:
        channel: The socket.
        outbox: Messages, each with its descriptors, that the socket did not take yet.
        is_lost: Whether this process no longer uses the worker: it is dead, retired or detached.
    """

    __slots__ = ("_refused_at", "channel", "is_lost", "outbox")

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.outbox: collections.deque[tuple[bytes, tuple[int, ...]]] = collections.deque()
        self.is_lost = False
        # When the kernel first refused the descriptors of the message; None if it took those of the
        # last message.
        self._refused_at: float | None = None

    def try_send(self, data: bytes, descriptors: tuple[int, ...]) -> bool:
        """Send a message without blocking.

        Returns:
            Whether it was sent. A message to a dead worker counts as sent, and is lost.
        """
        try:
            if descriptors:
                socket.send_fds(self.channel, [data], descriptors)
            else:
                self.channel.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                self._pause_before_retry(error)
                return False
            if error.errno not in _PEER_IS_GONE:
                raise
            # The worker is dying, which its pidfd will report.
        self._refused_at = None
        return True

    def _pause_before_retry(self, error: OSError) -> None:
        now = time.monotonic()
        if self._refused_at is None:
            self._refused_at = now
        if now - self._refused_at > _RETRY_LIMIT_S:
            text = (
                "more file descriptors are on their way between this user's processes than one "
                "process may have open, and no process takes them; raise `ulimit -n`"
            )
            raise OSError(error.errno, text) from error
        time.sleep(_RETRY_S)

    def flush(self) -> bool:
        """Send the messages in ``outbox``. Returns whether all of them were sent."""
        while self.outbox:
            data, descriptors = self.outbox[0]
            if not self.try_send(data, descriptors):
                return False
            self.outbox.popleft()
        return True

    def receive(self) -> bytes | None:
        """Return the next message, if one is there. Does not sleep."""
        try:
            return self.channel.recv(RECEIVE_BYTES) or None
        except (BlockingIOError, ConnectionError):
            return None  # if the socket has failed, the pidfd will show why

    @property
    def has_ended(self) -> bool:
        """Whether the worker has closed its end, as far as is known."""
        poll = select.poll()
        poll.register(self.channel, 0)  # hanging up is always reported
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """Close the socket. The worker ends when it has answered its present task."""
        with Suppressed(OSError):  # the worker is gone, or the socket is shut down already
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()


class WorkerHandle(WorkerChannel):
    """A worker's process, socket and pidfd. Owns the socket and the pidfd.

    Attributes:
        process: The ``multiprocessing`` process.
        pidfd: Readable when the process has ended; -1 once closed.
    """

    __slots__ = ("_forked", "pidfd", "process")

    def __init__(self, process: BaseProcess, channel: socket.socket) -> None:
        super().__init__(channel)
        self.process = process
        # What the nursery has forked is not a child of this process: it may be reaped already.
        popen = process._popen  # type: ignore[attr-defined]
        self._forked = popen if isinstance(popen, Forked) else None
        self.pidfd = process.sentinel if self._forked else os.pidfd_open(process.pid or 0)

    def close_pidfd(self) -> None:
        """Close the pidfd. May be called again."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0 and self._forked is None:
            os.close(pidfd)
        elif self._forked is not None:
            self._forked.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, reaped or not."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def reap(self, deadline: float) -> bool:
        """Wait for the worker's end, and reap it.

        Waits on the pidfd, since multiprocessing's sentinel is not readable while a child process
        of the worker lives.

        Args:
            deadline: Time of the monotonic clock until which to wait.

        Returns:
            Whether the worker has ended.
        """
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        if self.process.exitcode is None:
            # A forkserver reaps the worker and tells this process, which takes a moment more.
            self.process.join(1.0)
        if self.process.exitcode is None:
            # A SIGCHLD handler, or SIG_IGN, has reaped it. multiprocessing would keep it, with its
            # pipes, and at exit send a signal to its pid, which may be another process's by then.
            multiprocessing.process._children.discard(self.process)  # type: ignore[attr-defined]
        self.process.join(0)  # makes multiprocessing forget it
        return True


def end_all(workers: list[WorkerHandle], grace_s: float) -> None:
    """Wait for workers to end, reap them, and close their pidfds. May be called again.

    Args:
        workers: Workers that have been told to end.
        grace_s: Seconds in which they may end by themselves. Then they get SIGTERM, and SIGKILL.
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


def end_unused(worker: WorkerHandle) -> None:
    """Kill a worker that was sent no task, and reap it."""
    worker.process.kill()
    worker.hang_up()
    end_all([worker], 0.0)
