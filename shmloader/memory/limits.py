"""Reads memory limits: how much this process may still take, and how many processes were killed.

Reads files of ``/proc`` and of the control groups, and this process's resource limits. A file that
is missing or unreadable, or has other contents than expected, sets no limit.
"""

import mmap
import resource
import signal
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Names of a control group's limit, its use and its counts of killed processes, by whether the
# hierarchy is the unified one; then those of the page cache in ``memory.stat``. Kubernetes counts
# only inactive files as memory that can be dropped. A file that is read a second time is active,
# but the kernel drops it too before it kills a process, and MemAvailable counts both.
_FILES = {
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    True: ("memory.max", "memory.current", "memory.events"),
}
_CACHE = {
    False: ("total_inactive_file", "total_active_file"),
    True: ("inactive_file", "active_file", "slab_reclaimable"),
}

_NEVER_OVERCOMMIT = "2"


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

    Args:
        root: Directory that holds ``proc`` and the mount points: ``/``.
        controller: Name of the resource in version 1: "memory" or "cpu".
    """
    groups: list[ControlGroup] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = not controllers
        if is_v2 or controller in controllers.split(","):
            mount = _find_mount(root, path, "" if is_v2 else controller)
            if mount is not None:
                point, below = mount
                for group in (below, *below.parents):
                    name = f"/{group}" if group.parts else "/"
                    groups.append(ControlGroup(name, point / group, is_v2))
    return tuple(groups)


def _find_mount(root: Path, path: str, controller: str) -> tuple[Path, PurePosixPath] | None:
    """Return where a hierarchy is mounted, and the group's path below that.

    In a container, the mount often shows only the container's own groups, while the process's path
    may be that on the host, which begins with the mount's root, or lie outside the mount.

    Args:
        root: Directory that holds ``proc`` and the mount points.
        path: Path of the group in the hierarchy.
        controller: Controller of a version 1 hierarchy; "" for the unified one.
    """
    found: Path | None = None
    own = PurePosixPath(path)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        match line.partition(" - ")[0].split()[3:5], line.partition(" - ")[2].split():
            case [mount_root, mount_point], [kind, _, options, *_]:
                is_v2 = kind == "cgroup2" and not controller
                if not is_v2 and (kind != "cgroup" or controller not in options.split(",")):
                    continue
                point = root / mount_point.lstrip("/")
                if own.is_relative_to(mount_root) and ".." not in own.parts:
                    return point, own.relative_to(mount_root)
                found = found or point
    return None if found is None else (found, PurePosixPath())


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
    mode = _read(root / "proc/sys/vm/overcommit_memory").strip()
    if mode == _NEVER_OVERCOMMIT and "CommitLimit" in info and "Committed_AS" in info:
        left = max(0, info["CommitLimit"] - info["Committed_AS"])
        yield Free(left * 1024, "CommitLimit, since vm.overcommit_memory = 2")
    for group in groups:
        limit_file, usage_file, _ = _FILES[group.is_v2]
        limit = _read(group.path / limit_file).strip()  # may be "max"
        usage = _read(group.path / usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():
            stat = _numbers(group.path / "memory.stat")
            used = max(0, int(usage) - sum(stat.get(name, 0) for name in _CACHE[group.is_v2]))
            yield Free(max(0, int(limit) - used), f"limit of the control group {group.name}")


class OomKills:
    """Counts what the out-of-memory killer ends in the control group of this process.

    Args:
        root: Directory that holds ``proc`` and ``sys``, normally ``/``.
    """

    def __init__(self, root: Path) -> None:
        self._groups = control_groups(root)
        self._before = self.count()

    def count(self) -> int | None:
        """Return the count of the innermost group that has one; None if none has."""
        for group in self._groups:
            count = _numbers(group.path / _FILES[group.is_v2][2]).get("oom_kill")
            if count is not None:
                return count
        return None

    def since(self, exit_code: int | None) -> int:
        """Return how many processes it has ended since this object was made.

        Args:
            exit_code: How the process ended that is asked about. The result is 0 unless it was
                killed by SIGKILL.
        """
        if exit_code != -signal.SIGKILL or self._before is None:
            return 0
        return (self.count() or 0) - self._before


def soft_limit(kind: int) -> int | None:
    """Return a resource limit of this process; None if there is none, or it cannot be read.

    Args:
        kind: A constant of :mod:`resource`, such as ``RLIMIT_AS``.
    """
    try:
        soft, _ = resource.getrlimit(kind)
    except OSError as error:
        if error.errno is None:  # a signal handler's
            raise
        return None  # a sandbox refuses the call
    return None if soft == resource.RLIM_INFINITY else soft


def describe_address_space() -> str:
    """Return the limit on this process's address space, and its use, in words."""
    limit_bytes = soft_limit(resource.RLIMIT_AS)
    limit = "no limit" if limit_bytes is None else format_bytes(limit_bytes)
    pages = _read(Path("/proc/self/statm")).partition(" ")[0]
    used = f"; {format_bytes(int(pages) * mmap.PAGESIZE)} are used" if pages.isdecimal() else ""
    return f"{limit} (`ulimit -v`{used})"


def _read(path: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        if error.errno is None:  # a signal handler's
            raise
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Return the file's lines that begin with a name and a number; others are left out."""
    lines = map(str.split, _read(path).splitlines())
    return {
        words[0].rstrip(":"): int(words[1])
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes in few digits: "77.1 MB"."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        # A value that would be rounded up to 1000.0 is 1.0 of the next unit.
        if value < 999.95:  # noqa: PLR2004
            return f"{value:.1f} {unit}" if unit != "bytes" else f"{nbytes} bytes"
        value /= 1000
    return f"{value:.1f} TB"
