"""Reads memory limits: how much this process may still take, and how many processes were killed.

Reads files of ``/proc`` and of the control groups, and this process's resource limits. A file that
is missing or unreadable, or has other contents than expected, sets no limit.
"""

import mmap
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shmloader.interruptions import Suppressed

# Fields of a line of /proc/self/mountinfo before the "-", and after it.
_MOUNT_ROOT, _MOUNT_POINT = 3, 4
_KIND, _OPTIONS = 0, 2

_NEVER_OVERCOMMIT = "2"


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that may still be taken.

    Attributes:
        nbytes: Number of bytes.
        limit: The limit that this follows from, in words.
    """

    nbytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of a control group's files, and of the page cache in its ``memory.stat``.

    Kubernetes counts only inactive files as memory that can be dropped. A file that is read a
    second time is active, but the kernel drops it too before it kills a process, and MemAvailable
    counts both.
    """

    limit: str
    usage: str
    cache: frozenset[str]
    kills: str


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    frozenset({"total_inactive_file", "total_active_file"}),
    "memory.oom_control",
)
_V2 = _Files(
    "memory.max",
    "memory.current",
    frozenset({"inactive_file", "active_file", "slab_reclaimable"}),
    "memory.events",
)


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group of this process, or an ancestor of it.

    Attributes:
        name: Path in its hierarchy, as far as this process sees it.
        path: Its directory.
        is_v2: Whether it belongs to the unified hierarchy, whose files have other names.
    """

    name: str
    path: Path
    is_v2: bool

    @property
    def files(self) -> _Files:
        """Names of its memory files."""
        return _V2 if self.is_v2 else _V1


def control_groups(root: Path, controller: str = "memory") -> tuple[ControlGroup, ...]:
    """Return the groups that may limit this process, its own first, then their ancestors.

    Args:
        root: Directory that holds ``proc`` and the mount points: ``/``.
        controller: Name of the resource in version 1: "memory" or "cpu".
    """
    own: dict[bool, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own[False] = path
        elif number == "0" and not controllers:
            own[True] = path
    groups: list[ControlGroup] = []
    for is_v2, path in own.items():
        groups += _groups_of(root, path, None if is_v2 else controller)
    return tuple(groups)


def _groups_of(root: Path, path: str, controller: str | None) -> Iterator[ControlGroup]:
    """Yield a process's group in one hierarchy and its ancestors, as far as they are mounted.

    Args:
        root: Directory that holds ``proc`` and the mount points.
        path: Path of the group.
        controller: Controller of a version 1 hierarchy; None for the unified one.
    """
    mount = _find_mount(root, path, controller)
    if mount is None:
        return
    point, below = mount
    while True:
        name = f"/{below}" if below.parts else "/"
        yield ControlGroup(name, point / below, is_v2=controller is None)
        if not below.parts:
            return
        below = below.parent


def _find_mount(root: Path, path: str, controller: str | None) -> tuple[Path, PurePosixPath] | None:
    """Return where a hierarchy is mounted, and the group's path below that.

    In a container, the mount often shows only the container's own groups, while the process's path
    may be that on the host, which begins with the mount's root, or lie outside the mount.
    """
    fallback: tuple[Path, PurePosixPath] | None = None
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) <= _MOUNT_POINT or len(kind) <= _OPTIONS:
            continue
        if controller is None:
            is_match = kind[_KIND] == "cgroup2"
        else:
            is_match = kind[_KIND] == "cgroup" and controller in kind[_OPTIONS].split(",")
        if not is_match:
            continue
        point = root / mount[_MOUNT_POINT].lstrip("/")
        own = PurePosixPath(path)
        if own.is_relative_to(mount[_MOUNT_ROOT]) and ".." not in own.parts:
            return point, own.relative_to(mount[_MOUNT_ROOT])
        fallback = fallback or (point, PurePosixPath())
    return fallback


def free_memory(root: Path, groups: tuple[ControlGroup, ...]) -> Free | None:
    """Return how much memory this process may still take before the kernel kills a process.

    Page cache that the kernel can drop counts as free; swap does not.

    Args:
        root: Directory that holds ``proc``: ``/``.
        groups: From :func:`control_groups`.

    Returns:
        What the tightest limit leaves; None if there is no limit.
    """
    limits = [*_machine_limits(root)]
    for group in groups:
        with Suppressed(OSError, ValueError):
            limits.append(_group_limit(group))
    return min(limits, key=lambda free: free.nbytes, default=None)


def _machine_limits(root: Path) -> Iterator[Free]:
    info = _numbers(root / "proc/meminfo")
    if "MemAvailable" in info:
        yield Free(info["MemAvailable"] * 1024, "MemAvailable")
    if "CommitLimit" in info and "Committed_AS" in info:
        mode = next(iter(_lines(root / "proc/sys/vm/overcommit_memory")), "")
        if mode.strip() == _NEVER_OVERCOMMIT:
            left = info["CommitLimit"] - info["Committed_AS"]
            yield Free(max(0, left) * 1024, "CommitLimit, since vm.overcommit_memory = 2")


def _group_limit(group: ControlGroup) -> Free:
    """Return what a group may still take.

    Raises:
        OSError: If its files cannot be read.
        ValueError: If it has no limit ("max").
    """
    files = group.files
    limit = int((group.path / files.limit).read_text())
    usage = int((group.path / files.usage).read_text())
    stat = _numbers(group.path / "memory.stat")
    cache = sum(nbytes for name, nbytes in stat.items() if name in files.cache)
    return Free(max(0, limit - max(0, usage - cache)), f"limit of the control group {group.name}")


def oom_kills(groups: tuple[ControlGroup, ...]) -> int | None:
    """Return how many processes of this control group the out-of-memory killer has ended so far.

    Args:
        groups: From :func:`control_groups`.

    Returns:
        The count of the innermost group that has one; None if none has.
    """
    for group in groups:
        count = _numbers(group.path / group.files.kills).get("oom_kill")
        if count is not None:
            return count
    return None


class OomKills:
    """Counts what the out-of-memory killer ends in the control group of this process.

    Args:
        root: Directory that holds ``proc`` and ``sys``, normally ``/``.
    """

    def __init__(self, root: Path) -> None:
        self._groups = control_groups(root)
        self._before = oom_kills(self._groups)

    def since(self, exit_code: int | None) -> int:
        """Return how many processes it has ended since this object was made.

        Args:
            exit_code: How the process ended that is asked about. The result is 0 unless it was
                killed by SIGKILL.
        """
        if exit_code != -signal.SIGKILL or self._before is None:
            return 0
        return (oom_kills(self._groups) or 0) - self._before


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """The address space of this process: memory that is mapped, whether it has pages or not.

    Attributes:
        limit_bytes: The limit (``ulimit -v``); None if there is none.
        used_bytes: How much is used; None if unknown.
    """

    limit_bytes: int | None
    used_bytes: int | None

    def describe(self) -> str:
        """Return the limit and the use in words."""
        limit = "no limit" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        used = "" if self.used_bytes is None else f"; {format_bytes(self.used_bytes)} are used"
        return f"{limit} (`ulimit -v`{used})"


def soft_limit(kind: int) -> int | None:
    """Return a resource limit of this process; None if there is none, or it cannot be read.

    Args:
        kind: A constant of :mod:`resource`, such as ``RLIMIT_AS``.
    """
    with Suppressed(OSError):  # refused by a sandbox
        soft, _ = resource.getrlimit(kind)
        return None if soft == resource.RLIM_INFINITY else soft
    return None


def address_space() -> AddressSpace:
    """Return the address space of this process."""
    used = None
    with Suppressed(OSError, ValueError, IndexError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    return AddressSpace(soft_limit(resource.RLIMIT_AS), used)


def _lines(path: Path) -> list[str]:
    with Suppressed(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def _numbers(path: Path) -> dict[str, int]:
    """Return the file's lines that begin with a name and a number; others are left out."""
    lines = map(str.split, _lines(path))
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
