"""How much memory and how many cores there are; memory is checked before it is touched.

Reads files of ``/proc`` and of the control groups, and this process's resource limits. A file that
is missing or unreadable, or has other contents than expected, sets no limit.

A slot's pages come to exist when they are first written. Where there is no memory for them, the
kernel kills a process, or the write ends in SIGBUS. So before a process first writes to bytes of a
slot, it asks a :class:`MemoryAdmission`, which touches them in steps and reads free memory before
each. Other workers may grow their slots at the same time, so a step takes only this worker's share
of what is free. Thus nothing is refused just because others might have grown too.
"""

import contextlib
import errno
import fcntl
import functools
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shmloader.errors import SharedMemoryError
from shmloader.grammar import size
from shmloader.insight.measurements import read_file
from shmloader.memory.arena import ADD_SEALS, SEALS, Arena, Slot, memory_file, populate, soft_limit

#: Never taken for slots, since other processes may touch memory between a check and the write.
#: The page tables of 8 GiB of slots in one process take as much, and so do the smallest steps of
#: 64 workers.
RESERVE_BYTES = 16 << 20

# The most and the least bytes that are touched between two checks. Touching 8 MiB takes some 3 ms,
# and a check takes 0.1 ms.
_STEP_BYTES = 8 << 20
_LEAST_STEP_BYTES = 256 << 10

# How long a process waits for its turn of a core: what holds the turn may wait for this process.
# With eight workers on two cores that load a million strings (row G of the benchmarks), the first
# batch comes 1.2 times as late (1.1 to 1.3) where none of them waits.
_TURN_S = 10.0
_LOOK_EVERY_S = 0.01

# Names of a control group's limit and its use, by whether the hierarchy is the unified one; then
# those of the page cache in ``memory.stat``. The kernel drops active files, too, before it kills.
_FILES = {
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    True: ("memory.max", "memory.current"),
}
_CACHE = {
    False: ("total_inactive_file", "total_active_file"),
    True: ("inactive_file", "active_file", "slab_reclaimable"),
}

_NEVER_OVERCOMMIT = "2"

# Errors that mean that a resource is used up, not that the call is refused.
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN)


class Free(NamedTuple):
    """Memory that may still be taken.

    Attributes:
        nbytes: Number of bytes.
        limit: The limit that this follows from, in words.
    """

    nbytes: int
    limit: str


class ControlGroup(NamedTuple):
    """A control group of this process, or an ancestor of it.

    Attributes:
        name: Path in its hierarchy, as far as this process sees it.
        path: Its directory.
        is_v2: Whether it belongs to the unified hierarchy, whose files have other names.
    """

    name: str
    path: Path
    is_v2: bool


def control_groups(root: Path, controller: str = "memory") -> tuple[ControlGroup, ...]:
    """Return the groups that may limit this process, its own first, then their ancestors.

    In a container, the mount may show only the container's own groups, while the process's path is
    that on the host. So the longest end of the path counts that the mount has.

    Args:
        root: Directory that holds ``proc`` and ``sys``: ``/``.
        controller: Name of the resource in version 1: "memory" or "cpu".
    """
    groups: list[ControlGroup] = []
    for line in read_file(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = not controllers
        if is_v2 or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / ("" if is_v2 else controllers)
            names = [name for name in path.split("/") if name not in ("", "..")]
            while names and not mount.joinpath(*names).is_dir():
                del names[0]
            below = PurePosixPath(*names)
            for group in (below, *below.parents):
                name = f"/{group}" if group.parts else "/"
                groups.append(ControlGroup(name, mount / group, is_v2))
    return tuple(groups)


def free_memory(root: Path, groups: tuple[ControlGroup, ...] | None = None) -> Free | None:
    """Return how much memory this process may still take before the kernel kills a process.

    Page cache that the kernel can drop counts as free; swap does not.

    Args:
        root: Directory that holds ``proc``: ``/``.
        groups: From :func:`control_groups`; None to find them.

    Returns:
        What the tightest limit leaves; None if there is no limit.
    """
    limits = list(_limits(root, control_groups(root) if groups is None else groups))
    return min(limits, key=lambda free: free.nbytes, default=None)


def _limits(root: Path, groups: tuple[ControlGroup, ...]) -> Iterator[Free]:
    info = _numbers(root / "proc/meminfo")
    if "MemAvailable" in info:
        yield Free(info["MemAvailable"] * 1024, "MemAvailable")
    mode = read_file(root / "proc/sys/vm/overcommit_memory").strip()
    if mode == _NEVER_OVERCOMMIT and "CommitLimit" in info and "Committed_AS" in info:
        left = max(0, info["CommitLimit"] - info["Committed_AS"])
        yield Free(left * 1024, "CommitLimit, since vm.overcommit_memory = 2")
    for group in groups:
        limit_file, usage_file = _FILES[group.is_v2]
        limit = read_file(group.path / limit_file).strip()  # may be "max"
        usage = read_file(group.path / usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():
            stat = _numbers(group.path / "memory.stat")
            used = max(0, int(usage) - sum(stat.get(name, 0) for name in _CACHE[group.is_v2]))
            yield Free(max(0, int(limit) - used), f"limit of the control group {group.name}")


def describe_address_space() -> str:
    """Return the limit on this process's address space, in words."""
    soft = soft_limit(resource.RLIMIT_AS)
    return f"{'no limit' if soft is None else size(soft)} (`ulimit -v`)"


def _numbers(path: Path) -> dict[str, int]:
    """Return the file's lines that begin with a name and a number; others are left out."""
    lines = map(str.split, read_file(path).splitlines())
    return {
        words[0].rstrip(":"): int(words[1])
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }


def usable_cores(root: Path) -> int:
    """Return how many cores affinity and quotas allow, at least 1.

    Args:
        root: Directory that holds ``proc`` and ``sys``, normally ``/``.
    """
    return max(1, math.ceil(min(affinity(), core_quota(root) or math.inf)))


def affinity() -> int:
    """Return how many cores this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def at_most_one_a_core(fd: int) -> Iterator[None]:
    """Run this block in as many processes at once as there are cores; wait for up to 10 s.

    Each of them holds a lock on a byte of the file. The kernel releases it when a process ends. So
    a dead process keeps no other from its turn, and a stopped one only for so long (I3).
    """
    byte = os.getpid() % usable_cores(Path("/"))
    give_up_at = time.monotonic() + _TURN_S
    while time.monotonic() < give_up_at:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except BlockingIOError:
            time.sleep(_LOOK_EVERY_S)
        except OSError:  # a sandbox has no locks
            break
        else:
            break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)


def core_quota(root: Path) -> float | None:
    """Return how many cores' time the process's control groups grant; None without a quota."""
    quotas = map(_quota_of, control_groups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: ControlGroup) -> float | None:
    names = ("cpu.max",) if group.is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = [word for name in names for word in read_file(group.path / name).split()]
    with contextlib.suppress(ValueError, ZeroDivisionError):  # no such file, or "max"
        quota, period = map(int, words)
        return quota / period if quota > 0 else None
    return None


@functools.cache
def why_unsupported() -> str | None:
    """Return why slots and worker processes do not work on this system; None if they do.

    A sandbox may refuse a system call with any error.
    """
    try:
        with contextlib.closing(memory_file()) as file:
            fcntl.fcntl(file.fileno(), ADD_SEALS, SEALS)
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.eventfd(0))
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) not in _USED_UP:  # reported when it is needed
            return (
                f"memfd_create, pidfd_open or eventfd fails ({error}): they need Linux 5.3, and a "
                "sandbox that allows them"
            )
    return None


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How much memory one iterator may come to need. Sent to the workers.

    Attributes:
        worker_count: Number of processes that write to the slots.
        slot_count: Maximum number of slots for batches.
        root: Directory that holds ``proc`` and ``sys``.
    """

    worker_count: int
    slot_count: int
    root: str = "/"


class MemoryAdmission:
    """Decides whether a slot may grow. Each process of an iterator has one."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config, self._root = config, Path(config.root)
        self._groups = control_groups(self._root)

    def _read_free(self) -> Free | None:
        """Return what is free now, less the reserve."""
        free = free_memory(self._root, self._groups)
        return None if free is None else Free(max(0, free.nbytes - RESERVE_BYTES), free.limit)

    def is_short(self, present_bytes: int, slot_bytes: int) -> bool:
        """Whether memory is too short for slots to keep their pages while they wait for a batch.

        Args:
            present_bytes: Bytes that all slots have now.
            slot_bytes: Bytes that each slot may come to need. A worker needs as many for samples.
        """
        config = self._config
        more = (config.slot_count + config.worker_count) * slot_bytes - present_bytes
        if more <= RESERVE_BYTES:
            return False
        free = self._read_free()
        return free is not None and more > free.nbytes

    def grow(self, arena: Arena, slot: Slot, end: int) -> None:
        """Give a slot the pages up to ``end``, or raise if there is no memory for them.

        Args:
            arena: The slots.
            slot: A slot that is mapped up to ``end``, which its ``touched_bytes`` are afterwards.
            end: Bytes from its start that are about to be written.

        Raises:
            SharedMemoryError: If there is not enough memory. The slot is as large as it was.
        """
        config, before = self._config, slot.touched_bytes
        position = before
        while position < end and (free := self._read_free()) is not None:
            step = min(max(_LEAST_STEP_BYTES, free.nbytes // config.worker_count), _STEP_BYTES)
            step_end = min(position + step, end)
            is_short = end - position > free.nbytes
            if is_short or not populate(slot.mapping, position, step_end):
                left = free.nbytes
                if arena.give_back(slot, before):
                    left += position - before
                raise SharedMemoryError(
                    f"a batch needs at least {size(end)} of shared memory, {size(end - before)} "
                    f"more than its slot has, but {size(left)} is free ({free.limit}; "
                    f"{size(RESERVE_BYTES)} is kept in reserve). The loader uses up to "
                    f"{config.slot_count} such slots: lower batch_size, prefetch_factor or "
                    "num_workers."
                )
            position = step_end
        slot.touched_bytes = end
