"""Reads how long threads had a core, and how long they could have run but no core was free."""

import threading
import time
from pathlib import Path
from typing import NamedTuple

from shmloader.interruptions import is_interruption


class CoreTime(NamedTuple):
    """What the kernel reports of a thread, in ns since the thread began.

    Attributes:
        cpu_ns: CPU time.
        stalled_ns: Time in which it could have run but no core was free.
    """

    cpu_ns: int
    stalled_ns: int


class ConsumerUsage(NamedTuple):
    """What the consumer used in an epoch.

    Attributes:
        process_cpu_ns: CPU time of all threads of its process.
        core_time: Core time of the thread that takes the batches; None if not known.
    """

    process_cpu_ns: int = 0
    core_time: CoreTime | None = None

    def and_then(self, other: "ConsumerUsage") -> "ConsumerUsage":
        """Return the sum of this usage and that of a later epoch."""
        ours, theirs = self.core_time, other.core_time
        both = ours or theirs
        if ours is not None and theirs is not None:
            both = CoreTime(ours.cpu_ns + theirs.cpu_ns, ours.stalled_ns + theirs.stalled_ns)
        return ConsumerUsage(self.process_cpu_ns + other.process_cpu_ns, both)


class ConsumerMeter:
    """Measures what the consumer uses. Made on the consumer's thread; any thread may read it."""

    def __init__(self) -> None:
        self._native_id = threading.get_native_id()
        self._process_begun_ns = time.process_time_ns()
        self._begun = core_time_of(self._native_id)

    def read(self) -> ConsumerUsage:
        """Return what was used since the meter was made."""
        process_ns = time.process_time_ns() - self._process_begun_ns
        now, begun = core_time_of(self._native_id), self._begun
        if now is None or begun is None:
            return ConsumerUsage(process_ns)
        spent = CoreTime(now.cpu_ns - begun.cpu_ns, now.stalled_ns - begun.stalled_ns)
        return ConsumerUsage(process_ns, spent)


def core_time_here() -> CoreTime | None:
    """Return the calling thread's core time; None if the kernel does not report it."""
    return _read("thread-self")


def core_time_of(native_id: int) -> CoreTime | None:
    """Return the core time of a thread of this process; None also if the thread has ended."""
    return _read(f"self/task/{native_id}")


def _read(thread: str) -> CoreTime | None:
    try:
        cpu_ns, stalled_ns, _ = Path(f"/proc/{thread}/schedstat").read_bytes().split()
        return CoreTime(int(cpu_ns), int(stalled_ns))
    except (OSError, ValueError) as error:
        if is_interruption(error):
            raise
        return None
