"""CPU time, page faults, memory and descriptors of this process and of its workers.

Workers are all descendants of this process. Assumes Linux (``/proc``).
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """CPU seconds and minor faults of one process since it started."""

    cpu_s: float
    minor_faults: int

    @classmethod
    def of_self(cls) -> Usage:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.process_time(), usage.ru_minflt)

    @classmethod
    def of_pid(cls, pid: int) -> Usage:
        # The second field, the name, may hold spaces: count from its closing bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        minflt, utime, stime = int(fields[7]), int(fields[11]), int(fields[12])
        return cls((utime + stime) / _TICKS_PER_S, minflt)


class Spent(NamedTuple):
    """What was spent between two moments.

    Attributes:
        main_cpu_s: CPU time of this process, all its threads.
        workers_cpu_s: CPU time of all worker processes.
        others_cpu_s: CPU time that the machine spent on anything else meanwhile.
        minor_faults: Minor page faults, of this process and its workers.
    """

    main_cpu_s: float
    workers_cpu_s: float
    others_cpu_s: float
    minor_faults: int


class Meter:
    """Measures what is spent from the creation of the meter on."""

    def __init__(self) -> None:
        self._machine_cpu_s = cpu_s_of_machine()
        self._workers = usage_of_workers()
        self._main = Usage.of_self()

    def read(self) -> Spent:
        """Return what was spent since the meter was created."""
        main, workers = Usage.of_self(), usage_of_workers()
        machine_cpu_s = cpu_s_of_machine() - self._machine_cpu_s
        unused = Usage(0.0, 0)
        pairs = [(after, self._workers.get(pid, unused)) for pid, after in workers.items()]
        main_cpu_s = main.cpu_s - self._main.cpu_s
        workers_cpu_s = sum(after.cpu_s - before.cpu_s for after, before in pairs)
        return Spent(
            main_cpu_s=main_cpu_s,
            workers_cpu_s=workers_cpu_s,
            others_cpu_s=max(0.0, machine_cpu_s - main_cpu_s - workers_cpu_s),
            minor_faults=main.minor_faults
            - self._main.minor_faults
            + sum(after.minor_faults - before.minor_faults for after, before in pairs),
        )


def usage_of_workers() -> dict[int, Usage]:
    """Return the usage of each live worker, by its pid."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = Usage.of_pid(child.pid)
        except OSError:
            continue  # it has ended
    return found


def cpu_s_of_machine() -> float:
    """Return for how long the cores were not idle, including time stolen by a hypervisor."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.irq + times.softirq + times.steal + times.nice)


def pss_bytes(kind: str = "Pss") -> int:
    """Return the memory of this process and its workers. A page that n share counts 1/n in each.

    Args:
        kind: "Pss", or "Pss_Shmem" for shared memory alone.

    Returns:
        The sum of their proportional set sizes.
    """
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            total += pss_bytes_of(process.pid, kind)
        except OSError:
            continue  # it has ended
    return total


def pss_bytes_of(pid: int, kind: str = "Pss") -> int:
    """Return the memory of one process, in which a page that n processes share counts 1/n.

    Raises:
        OSError: If the process has ended, or is another user's.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith(f"{kind}:")]
    return sum(int(size) << 10 for size in sizes)


def descriptor_count() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
