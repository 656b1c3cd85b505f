"""Counts the cores that this process may use, by affinity and by its control groups' quotas."""

import math
import os
from pathlib import Path

from shmloader.memory.limits import ControlGroup, control_groups


def usable_cores(root: Path) -> int:
    """Return how many cores affinity and quotas allow, at least 1.

    Args:
        root: Directory that holds ``proc`` and ``sys``, normally ``/``.
    """
    quota = core_quota(root)
    cores = affinity()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def affinity() -> int:
    """Return how many cores this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_quota(root: Path) -> float | None:
    """Return how many cores' time the process's control groups grant; None without a quota."""
    quotas = map(_quota_of, control_groups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: ControlGroup) -> float | None:
    try:
        if group.is_v2:
            quota, period = (group.path / "cpu.max").read_text().split()
        else:
            quota = (group.path / "cpu.cfs_quota_us").read_text()
            period = (group.path / "cpu.cfs_period_us").read_text()
        granted = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return None
    return granted if granted > 0 else None
