"""Waiting for a message that is about to come.

To put a process to sleep and to wake it takes some ten microseconds of two processors, more in a
virtual machine, and the next message is often closer than that. So both ends look a few times,
letting others run in between, before they sleep. Two workers on two cores: 256 samples of 3×32×32
floats a batch, 1.15 to 1.2 times the batches; 114 small tensors, 1.04 to 1.07 times.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

# About 70 µs in all.
_LOOKS = 50


def receive_soon(receive: Callable[..., Any], *arguments: object) -> Any:
    """Receive without sleeping.

    Args:
        receive: A socket's method; raises BlockingIOError while nothing is there.
        arguments: Its arguments.

    Returns:
        What it returns; None if nothing has come.
    """
    for _ in range(_LOOKS):
        try:
            return receive(*arguments)
        except BlockingIOError:
            with contextlib.suppress(OSError):  # a sandbox
                os.sched_yield()
    return None
