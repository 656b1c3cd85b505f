"""Compares what a process holds at two times: processes, threads, descriptors, mappings, files.

Read by the check of invariant I8 after each test, and inside each trial of the fault campaign.
"""

import gc
import os
import re
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

# Descriptors that other libraries open once and keep for the life of the process.
KEPT_BY_OTHERS = re.compile(
    r"/pym-\d+-"  # the memory that multiprocessing.Value and Array are cut from
    r"|^/dev/nvidia"  # the CUDA driver
)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the test process holds: each thing by its identity, with words to name it."""

    process: dict[object, str]
    thread: dict[object, str]
    descriptor: dict[object, str]
    mapping: dict[object, str]
    file: dict[object, str]

    @classmethod
    def now(cls) -> "Holdings":
        return cls(_processes(), _threads(), _descriptors(), _mappings(), _shm_files())

    def beyond(self, earlier: "Holdings") -> list[str]:
        """Name what is held now and was not earlier, one line each."""
        return [
            f"{field.name} {words}"
            for field in fields(self)
            for key, words in getattr(self, field.name).items()
            if key not in getattr(earlier, field.name)
            # Only for new files, since this may look at every process of the machine.
            and not (isinstance(key, Path) and _is_of_strangers(key))
        ]

    def left(self, within_s: float) -> list[str]:
        """Wait until nothing beyond this is held; return what still is after so many seconds."""
        deadline, pause_s = time.monotonic() + within_s, 0.01
        while (left := Holdings.now().beyond(self)) and time.monotonic() < deadline:
            gc.collect()
            # Longer and longer: a collection lets no other thread run, such as one that is to end.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
        return left


def _processes() -> dict[object, str]:
    found: dict[object, str] = {}
    for pid in _descendants(os.getpid()):
        try:
            child = psutil.Process(pid)
            words = f"{child.pid} ({child.status()}, parent {child.ppid()}): {child.cmdline()}"
        except psutil.ZombieProcess:
            words = f"{child.pid} (ended, not reaped)"
        except psutil.NoSuchProcess:
            continue
        found[child] = words
    return found


def _descendants(pid: int) -> list[int]:
    """Return all descendants, from the kernel's lists: psutil would look at every process."""
    found = []
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        if Path(f"/proc/{pid}").exists():
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    for child in map(int, " ".join(lists).split()):
        found += [child, *_descendants(child)]
    return found


def _threads() -> dict[object, str]:
    return {thread: repr(thread) for thread in threading.enumerate()}


def _descriptors() -> dict[object, str]:
    """Return descriptors by number, target and inode, since a number may be used again."""
    found: dict[object, str] = {}
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers, not paths
        try:
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - may be no path
            inode = os.fstat(number).st_ino
        except OSError:
            continue  # the descriptor of the listing
        if not KEPT_BY_OTHERS.search(target):
            found[number, target, inode] = f"{number} -> {target}"
    return found


def _mappings() -> dict[object, str]:
    """Return mappings of our memfds by name and inode, since one can have several lines."""
    found: dict[object, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" not in line or "shmloader" not in line:
            continue
        span, _flags, _offset, _device, inode, name = line.split(maxsplit=5)
        found[name, inode] = f"{name} at {span}"
    return found


def _shm_files() -> dict[object, str]:
    """Return all files in /dev/shm."""
    return {
        path: str(path)
        for path in Path("/dev/shm").iterdir()
        # A multiprocessing lock belongs to the test itself, and goes with it.
        if not path.name.startswith("sem.")
    }


def _is_of_strangers(path: Path) -> bool:
    """Whether another program of this machine put the file into /dev/shm."""
    owner = re.match(r"torch_(\d+)_|pym-(\d+)-", path.name)
    if owner:
        return _is_a_stranger(int(owner[1] or owner[2]))
    # The names that multiprocessing.shared_memory, Open MPI and MPICH give do not show the owner.
    is_nameless = path.name.startswith(("psm_", "sm_segment.", "mpich_shm_"))
    return is_nameless and _is_mapped_by_strangers(path)


def _is_mapped_by_strangers(path: Path) -> bool:
    """Whether a process that is neither this one nor a descendant maps the file, or it is gone."""
    for process in psutil.process_iter():
        try:
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return _is_a_stranger(process.pid)
        except OSError:
            continue
    return not path.exists()


def _is_a_stranger(pid: int) -> bool:
    """Whether a process runs that is neither this one nor a descendant."""
    try:
        process = psutil.Process(pid)
        return os.getpid() not in {pid, *(parent.pid for parent in process.parents())}
    except psutil.NoSuchProcess:
        return False
