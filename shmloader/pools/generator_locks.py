"""Keeps forked workers from random generators that are locked for ever.

torch's generator has a lock in each process, and so has NumPy's. A thread that draws holds the lock
without the GIL. In a child that is forked meanwhile, the lock is held by a thread that the child
does not have. The child waits for ever for the lock as soon as it seeds the generator. This happens
to torch's own workers.

* NumPy's lock is a lock of Python's, so a forked worker can reset it.
* torch's lock cannot be reached from Python, and one draw may take it several times. So a worker
  that is forked from a process with several Python threads first takes the lock, and reports that.
  A worker that does not report in time is killed, and another one is forked.
"""

import select
import socket
import time
from typing import Any

import numpy as np
import torch

from shmloader.pools.handle import WorkerHandle
from shmloader.threads.wakeup import SIGNAL_S

#: How long the report of the worker that is forked first is awaited, in seconds. A report takes
#: milliseconds. For each further try the time is doubled, since the machine may be busy.
FIRST_WAIT_S = 1.0
#: How many workers are forked before the start is given up, after two minutes.
TRIES = 7

_REPORT = b"-"


def unlock_numpy() -> None:
    """Reset the lock of NumPy's generator. Called in a forked worker, before it seeds."""
    lock: Any = np.random.mtrand._rand._bit_generator.lock
    lock._at_fork_reinit()


def await_torch() -> None:
    """Wait until no other thread holds the lock of torch's generator. Takes and releases it."""
    torch.default_generator.get_state()


def report_unlocked(channel: socket.socket) -> None:
    """Tell the main process that torch's generator is not locked. Sent before anything else.

    Raises:
        BrokenPipeError, ConnectionResetError: If the main process no longer waits.
    """
    await_torch()
    channel.send(_REPORT)


def has_reported(worker: WorkerHandle, wait_s: float) -> bool:
    """Wait for a worker's report. Returns whether the report came or the worker has ended."""
    poll = select.poll()
    for fd in (worker.channel.fileno(), worker.pidfd):
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        if poll.poll(min(left_s, SIGNAL_S) * 1000):
            worker.receive()
            return True
    return False
