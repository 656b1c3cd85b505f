"""Keeps forked workers from random generators that are locked for ever.

torch's and NumPy's generators of a process have a lock, which a thread holds while it draws,
without the GIL. A child that is forked meanwhile finds the lock held by a thread that it does not
have, and waits for it for ever as soon as it seeds the generator. torch's own workers do.

* NumPy's lock is one of Python's, so a forked worker makes it anew.
* torch's cannot be reached from Python, and one draw may take it several times. So a worker that is
  forked from a process with several threads of Python's reports that it has got the lock. One that
  does not report in time is killed, and another one is forked.
"""

import select
import socket
import time
from typing import Any

import numpy as np
import torch

from shmloader.pools.handle import WorkerHandle
from shmloader.threads.wakeup import SIGNAL_S

#: How long the report of the first worker that is forked is awaited, in seconds. It takes
#: milliseconds. That of each further one is awaited twice as long: the machine may be busy.
FIRST_WAIT_S = 1.0
#: How many workers are forked before that is given up, after two minutes.
TRIES = 7

_REPORT = b"-"


def unlock_numpy() -> None:
    """Make the lock of NumPy's generator anew. Called in a forked worker, before it seeds it."""
    lock: Any = np.random.mtrand._rand._bit_generator.lock
    lock._at_fork_reinit()


def await_torch() -> None:
    """Wait until no other thread draws from torch's generator, or does for a moment not."""
    torch.default_generator.get_state()


def report_unlocked(channel: socket.socket) -> None:
    """Tell the main process that torch's generator is not locked. Called first in the worker.

    Raises:
        BrokenPipeError, ConnectionResetError: If the main process waits no longer.
    """
    await_torch()
    channel.send(_REPORT)


def has_reported(worker: WorkerHandle, wait_s: float) -> bool:
    """Wait for a worker's report. Returns whether it came, or the worker has ended."""
    poll = select.poll()
    for fd in (worker.channel.fileno(), worker.pidfd):
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        if poll.poll(min(left_s, SIGNAL_S) * 1000):
            worker.receive()
            return True
    return False
