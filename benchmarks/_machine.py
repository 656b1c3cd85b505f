"""Describes what a benchmark ran on: machine, versions, date."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import psutil


def describe_machine() -> dict[str, str]:
    """Collect what a reader needs to judge the figures, in the order to print it."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "memory": f"{_gib(psutil.virtual_memory().total)}, /dev/shm {_dev_shm()}",
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "shmloader")},
    }


def find_commit() -> str:
    """Return the commit that is measured, as ``git describe`` names it, or "unknown"."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def _dev_shm() -> str:
    try:
        return _gib(shutil.disk_usage("/dev/shm").total)
    except OSError:
        return "missing"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
