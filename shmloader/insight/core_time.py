"""Reads how long threads had a core, and how long they could have run but no core was free."""

from pathlib import Path
from typing import NamedTuple


class CoreTime(NamedTuple):
    """What the kernel reports of a thread, in ns since the thread began.

    Attributes:
        cpu_ns: CPU time.
        stalled_ns: Time in which it could have run but no core was free.
    """

    cpu_ns: int
    stalled_ns: int


def core_time_here() -> CoreTime | None:
    """Return the calling thread's core time; None if the kernel does not report it."""
    return _read("thread-self")


def core_time_of(native_id: int) -> CoreTime | None:
    """Return the core time of a thread of this process; None also if the thread has ended."""
    return _read(f"self/task/{native_id}")


def _read(thread: str) -> CoreTime | None:
    try:
        cpu_ns, stalled_ns, _ = Path(f"/proc/{thread}/schedstat").read_bytes().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
        return None
    return CoreTime(int(cpu_ns), int(stalled_ns))
