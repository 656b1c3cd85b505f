"""How many cores this process may use: by affinity, and by the quota of its control groups."""

import math
import os
from pathlib import Path

_MICROSECOND_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable_cores(root: Path) -> int:
    """The least of what affinity and quotas leave; at least 1.

    Args:
        root: Where ``proc`` and ``sys`` are: ``/``.
    """
    quota = core_quota(root)
    cores = affinity()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affinity() -> int:
    """Cores that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota(root: Path) -> float | None:
    """Cores' worth of time that the process's control groups grant; None without a quota."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            points = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
        elif "cpu" in controllers.split(","):
            points = (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup" / controllers)
        else:
            continue
        # In a container the path is often told from outside, and the mount shows what is inside.
        for point in points:
            group = Path(path.lstrip("/"))
            for place in (point / group, *(point / parent for parent in group.parents)):
                quota = _quota_of(place)
                if quota is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _quota_of(group: Path) -> float | None:
    v2 = _read(group / "cpu.max").split()
    quota, period = v2 if len(v2) > 1 else (_read(group / name) for name in _MICROSECOND_FILES)
    try:
        granted = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return None
    return granted if granted > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
