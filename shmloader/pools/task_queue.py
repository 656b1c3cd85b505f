"""The queue of tasks, and how often to look for a message before sleeping.

**The queue** is one ``SOCK_SEQPACKET`` pair from which every idle worker receives.

The kernel is the dispatcher: a message goes to one worker, whole. The main process holds the
receiving end as well, so it can take back what no worker has received.

A worker may die between receiving a message and noting its number on the status page. So it writes
``RECEIVING`` there first (:mod:`shmloader.pools.status_page`). When a worker has died, the main
process takes back what is queued, waits for living workers to leave that state, and then receives
their answers. What is neither queued, nor noted by a living worker, nor answered was the dead
worker's. A worker that was woken for a message may have died, or be stopped, without receiving it,
and no other would be woken. So an idle worker looks into the queue every :data:`LOOK_S` as well.

(In a trial on two busy cores the queue took 54,000 tasks a second with 2 or 64 workers, and lost
none of 80,000 in 347 kills. Waiting by ``poll`` would wake all idle workers for each message: 64 of
them cost 381 µs of CPU a task instead of 21.)

**Before sleeping.** To put a process to sleep and to wake it takes some ten microseconds of two
processors, more in a virtual machine, and the next message often arrives sooner than that. So both
ends of a socket look for a message a few times, and let other processes run in between, before they
sleep. With two workers on two cores, this gives 1.15 to 1.2 times as many
batches a second if a batch is 256 samples of 3×32×32 floats, and 1.04 to 1.07 times as many if it
is 114 small tensors.

A rank that shares workers looks less often. torchrun starts each rank in a separate session, the
kernel divides the cores among sessions (sched(7), autogroup), and yielding gives the core only to
processes of the same session. With 5 looks instead of 50, in four rounds in turns (AMD EPYC,
2026-11-25), two such ranks on two cores take 78 µs of CPU for a small batch instead of 129, and
four take 122 instead of 183. A process that does not share its workers would lose by fewer looks: a
`TensorDataset` of a million rows (row K) gives 0.89 of the batches with 5 looks (0.85–0.94, four
rounds, 2026-11-26).
"""

import collections
import errno
import os
import select
import socket
from multiprocessing import reduction
from typing import Any

from shmloader.messages import RECEIVE_BYTES, seq_of_task

#: How often an idle worker looks for tasks that nothing has woken it for, in seconds.
LOOK_S = 1.0

# How often to look for a message, which takes about 70 µs in all.
LOOKS = 50
# The same in a rank that shares workers.
SHARED_LOOKS = 5


def let_others_run() -> None:
    """Let another process have this core, if one is ready to run."""
    try:
        os.sched_yield()
    except OSError as error:
        # A sandbox may refuse it, with any number. A signal handler's error has none.
        if error.errno is None:
            raise


class TaskQueue:
    """The main process's two ends. In a process that gets it pickled, it has a receiving end only.

    Attributes:
        sender: The sending end.

    Raises:
        OSError: If there are no descriptors left.
    """

    def __init__(self) -> None:
        self.sender, self._receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sender.setblocking(False)
        self._receiver.setblocking(False)
        # What the kernel has not accepted yet.
        self._backlog: collections.deque[bytes] = collections.deque()

    def __getstate__(self) -> Any:
        """Pickle for a process that is being started."""
        return reduction.DupFd(self._receiver.fileno())

    def __setstate__(self, duplicate: Any) -> None:
        self._receiver = socket.socket(fileno=duplicate.detach())

    def pop_receiver(self) -> socket.socket:
        """Return the receiving end in a worker, which owns it from now on."""
        receiver = socket.socket(fileno=self._receiver.detach())
        receiver.setblocking(False)
        return receiver

    def send(self, data: bytes) -> bool:
        """Send a task without blocking. Returns False if it waits here for :meth:`flush`."""
        if not self._backlog:
            try:
                self.sender.send(data)
            except BlockingIOError:
                pass
            else:
                return True
        self._backlog.append(data)
        return False

    def flush(self) -> bool:
        """Send what waits here. Returns whether nothing waits any more."""
        backlog = self._backlog
        while backlog:
            data = backlog.popleft()  # before it is sent: no interruption has it sent twice
            try:
                self.sender.send(data)
            except BlockingIOError:
                backlog.appendleft(data)
                return False
        return True

    def recall(self) -> list[int]:
        """Take back all tasks that no worker has received, and return their tickets' numbers."""
        recalled = []
        while self._receiver.fileno() >= 0:  # closing may begin again after an interruption
            try:
                recalled.append(self._receiver.recv(RECEIVE_BYTES))
            except BlockingIOError:
                break
        recalled.extend(self._backlog)
        self._backlog.clear()
        return [seq_of_task(data) for data in recalled]

    def close(self) -> None:
        """Close both ends. May be called again, after :meth:`recall`, if it was interrupted."""
        self._receiver.close()  # first: at the end of a closed sender, `recall` would not stop
        self.sender.close()


def watch_queue(poll: select.epoll, queue: socket.socket) -> None:
    """Have a worker's epoll wake it for tasks: one idle worker for each."""
    try:
        poll.register(queue, select.EPOLLIN | select.EPOLLEXCLUSIVE)
    except OSError as error:  # a sandbox that does not know the flag
        if error.errno != errno.EINVAL:
            raise
        poll.register(queue, select.EPOLLIN)
