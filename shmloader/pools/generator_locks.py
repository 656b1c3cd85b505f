"""Keeps forked workers from random generators that are locked for ever.

torch's and NumPy's generators of a process have a lock, which a thread holds while it draws,
without the GIL. A child that is forked meanwhile finds the lock held by a thread that it does not
have, and waits for it for ever as soon as it seeds the generator. torch's own workers do.

* NumPy's lock is one of Python's. It is held during the fork, and released on both sides.
* torch's cannot be held from Python, and a draw may take it several times. So a worker that is
  forked from a process with several threads reports that it has got the lock. One that does not
  report in time is killed, and another one is forked.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shmloader.interruptions import is_interruption
from shmloader.process_state import PROCESS

# The first wait for a report, which takes milliseconds. Each further one is twice as long, up to
# the longest: the machine may be busy.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 16.0

_REPORT = b"-"


@contextlib.contextmanager
def numpy_unlocked() -> Iterator[None]:
    """Fork inside this block: the child finds NumPy's generator unlocked.

    Waits as long as another thread draws from it. One thread at a time enters the block.
    """
    lock: Any = np.random.mtrand._rand._bit_generator.lock
    with lock:
        PROCESS.lock_held_for_fork = lock
        try:
            yield
        finally:
            PROCESS.lock_held_for_fork = None


def _release_in_child() -> None:
    lock, PROCESS.lock_held_for_fork = PROCESS.lock_held_for_fork, None
    if lock is not None:
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def report_unlocked(channel: socket.socket) -> None:
    """Tell the main process that torch's generator is not locked. Called first in the worker."""
    torch.default_generator.get_state()
    channel.send(_REPORT)


def waits_s() -> Iterator[float]:
    """Yield how long to wait for the report of each worker that is forked, in seconds."""
    wait_s = _FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def is_unlocked(channel: socket.socket, wait_s: float) -> bool:
    """Wait for a worker's report. Returns whether it came, or the worker has ended."""
    channel.settimeout(wait_s)
    try:
        channel.recv(len(_REPORT))
    except (TimeoutError, ConnectionError) as error:
        if is_interruption(error):
            raise
        return isinstance(error, ConnectionError)
    return True
