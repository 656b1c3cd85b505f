"""The queue of tasks, and how often to look for a message before sleeping.

**The queue** is one ``SOCK_SEQPACKET`` pair from which every idle worker receives. The kernel is
the dispatcher: a message goes to one worker, whole. The main process holds the receiving end as
well, so it can take back what no worker has received.

A worker may die between receiving a message and noting its number on the status page. So it writes
``RECEIVING`` there first (:mod:`shmloader.pools.status_page`). When a worker has died, the main
process takes back what is queued, waits for living workers to leave that state, and then receives
their answers. What is neither queued, nor noted by a living worker, nor answered was the dead
worker's. A worker that was woken for a message may have died, or be stopped, without receiving it,
and no other would be woken. So an idle worker looks into the queue every :data:`LOOK_S` as well.

(Waiting by ``poll`` would wake all idle workers for each message: 64 of them cost 381 µs of CPU a
task instead of 21.)

**Before sleeping.** To put a process to sleep and to wake it takes some ten microseconds of two
processors, and the next message often arrives sooner. So both ends of a socket look for a message a
few times, and let other processes run in between. With two workers on two cores, this gives 1.04 to
1.2 times as many batches a second. They yield before every fourth look only: an idle worker that
yields at each one takes turns at looking with the main process on its core, which gives a sixth
fewer single ints a second (AMD EPYC, 2026-11-28). But where busy processes share the cores, letting
them run takes a turn of each, some 16 ms with four on two cores. So when looking took long, both
ends sleep at once for a while. A rank that shares workers looks less often: torchrun starts each
rank in a session of its own, and yielding gives the core only to processes of the same session
(sched(7), autogroup). With 5 looks instead of 50, two such ranks on two cores take 78 µs of CPU for
a small batch instead of 129 (AMD EPYC, 2026-11-25, with a yield at each look).
"""

import collections
import errno
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

from shmloader.interruptions import Suppressed
from shmloader.memory import compiled
from shmloader.messages import RECEIVE_BYTES, seq_of_task

#: How often an idle worker looks for tasks that nothing has woken it for, in seconds.
LOOK_S = 1.0

# How often to look for a message, which takes about 20 µs in all on an idle core.
LOOKS = 50
# The same in a rank that shares workers.
SHARED_LOOKS = 5
# Other processes run before every so many looks.
_YIELD_EVERY = 4

# Said for descriptors, too: else Python asks the kernel, which a sandbox may forbid.
_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET


# If looking took longer than this, other processes need the core. Then nobody looks again for so
# many times as long, a second at most: who sleeps gets the core back sooner.
_LONG_NS, _REST, _MOST_REST_NS = 3_000_000, 32, 1_000_000_000
_rests_until_ns = 0


def looks(most: int) -> Iterator[None]:
    """Yield for each look for a message, and let other processes run before every fourth one."""
    global _rests_until_ns  # noqa: PLW0603 - as in the compiled part, one for the process
    yield
    began_ns = now_ns = time.monotonic_ns()
    for left in range(most - 1, 0, -1):
        if left % _YIELD_EVERY:
            yield
            continue
        if now_ns < _rests_until_ns:
            break
        try:
            os.sched_yield()
        except OSError as error:
            # A sandbox may refuse it, with any number. A signal handler's error has none.
            if error.errno is None:
                raise
        now_ns = time.monotonic_ns()
        if now_ns - began_ns > _LONG_NS:
            _rests_until_ns = now_ns + min(_REST * (now_ns - began_ns), _MOST_REST_NS)
        yield


def _receive(channel: socket.socket, most: int) -> bytes | None:
    """Receive a message: b"" if the other end is closed, None if there is none after some looks."""
    for _ in looks(most):
        try:
            with Suppressed(ConnectionError):
                return channel.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            return b""  # it was closed before it had received all
        except BlockingIOError:
            pass
    return None


receive = compiled.receive_one or _receive


class Outbox:
    """Sends messages in order and without blocking.

    Attributes:
        channel: The socket.
        outbox: Messages that the socket did not take yet.
        is_lost: Whether messages are dropped, since the worker is dead or detached.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self.is_lost = channel, False
        self.outbox: collections.deque[bytes] = collections.deque()

    def send(self, data: bytes) -> bool:
        """Send a message. Returns False if it waits here for :meth:`flush`."""
        if self.is_lost:
            return True
        if not self.outbox:
            try:
                self.channel.send(data)
            except BlockingIOError:
                pass
            except ConnectionError:  # the worker is dying, which its process will show
                return True
            else:
                return True
        self.outbox.append(data)
        return False

    def flush(self) -> bool:
        """Send what waits here. Returns whether nothing waits any more."""
        outbox = self.outbox
        while outbox:
            data = outbox.popleft()  # before it is sent: no interruption has it sent twice
            try:
                self.channel.send(data)
            except BlockingIOError:
                outbox.appendleft(data)
                return False
            except ConnectionError:
                outbox.clear()
        return True


class TaskQueue(Outbox):
    """The main process's two ends. In a process that gets it pickled, it has a receiving end only.

    Raises:
        OSError: If there are no descriptors left.
    """

    def __init__(self) -> None:
        sender, self._receiver = socket.socketpair(*_KIND)
        super().__init__(sender)
        sender.setblocking(False)
        self._receiver.setblocking(False)

    def __getstate__(self) -> Any:
        """Pickle for a process that is being started."""
        return {"_receiver": self._receiver}

    def pop_receiver(self) -> socket.socket:
        """Return the receiving end in a worker, which owns it from now on."""
        receiver = socket.socket(*_KIND, fileno=self._receiver.detach())
        receiver.setblocking(False)
        return receiver

    def recall(self) -> list[int]:
        """Take back all tasks that no worker has received, and return their tickets' numbers."""
        recalled = []
        while self._receiver.fileno() >= 0:  # closing may begin again after an interruption
            try:
                recalled.append(self._receiver.recv(RECEIVE_BYTES))
            except BlockingIOError:
                break
        recalled.extend(self.outbox)
        self.outbox.clear()
        return [seq_of_task(data) for data in recalled]

    def close(self) -> None:
        """Close both ends. May be called again, after :meth:`recall`, if it was interrupted."""
        self._receiver.close()  # first: at the end of a closed sender, `recall` would not stop
        self.channel.close()


def watch_queue(poll: select.epoll, queue: socket.socket) -> None:
    """Have a worker's epoll wake it for tasks: one idle worker for each."""
    try:
        poll.register(queue, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    except OSError as error:  # a sandbox that does not know the flag
        if error.errno != errno.EINVAL:
            raise
        poll.register(queue, select.EPOLLIN)
