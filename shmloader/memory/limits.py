"""What the system says of memory: how much is free for this process, and who was killed for it.

Reads files of ``/proc`` and of the control groups, and this process's limits. A file that is
missing, not to be read, or not as expected sets no limit.
"""

import mmap
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shmloader.interruptions import Suppressed, is_interruption

# Fields of a line of /proc/self/mountinfo before the "-", and after it.
_MOUNT_ROOT, _MOUNT_POINT = 3, 4
_KIND, _OPTIONS = 0, 2

_NEVER_OVERCOMMIT = "2"


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that may still be taken.

    Attributes:
        nbytes: How much.
        limit: What sets the limit, in words.
    """

    nbytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of a control group's files, and of the page cache in its ``memory.stat``.

    Kubernetes takes the inactive files alone for what can be dropped. A file that is read a
    second time is active, and the kernel drops it all the same before it kills anybody; so does
    MemAvailable count both.
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
    """A control group of this process, or one that holds it.

    Attributes:
        name: Its path in its hierarchy, as far as this process sees it.
        path: Its directory.
        is_v2: Whether it is of the unified hierarchy, whose files have other names.
    """

    name: str
    path: Path
    is_v2: bool

    @property
    def files(self) -> _Files:
        """What its files of memory are called."""
        return _V2 if self.is_v2 else _V1


def control_groups(root: Path, controller: str = "memory") -> tuple[ControlGroup, ...]:
    """The groups that may limit this process, from its own one outwards.

    Args:
        root: Where ``proc`` and the mount points are: ``/``.
        controller: What they are to limit, as version 1 names it: "memory", "cpu".
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
    """A process's group in one hierarchy, and those around it, as far as they are mounted.

    Args:
        root: As above.
        path: The group's.
        controller: Of a hierarchy of version 1; None: the unified one.
    """
    found = _find_mount(root, path, controller)
    if found is None:
        return
    point, below = found
    while True:
        name = f"/{below}" if below.parts else "/"
        yield ControlGroup(name, point / below, is_v2=controller is None)
        if not below.parts:
            return
        below = below.parent


def _find_mount(root: Path, path: str, controller: str | None) -> tuple[Path, PurePosixPath] | None:
    """Where a hierarchy is mounted, and the group's path below that.

    In a container the mount often shows but the container's own groups, while the process's path
    may be told from outside (then the mount's root says how far it is in), or be outside.
    """
    fallback: tuple[Path, PurePosixPath] | None = None
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount, kind = before.split(), after.split()
        if len(mount) <= _MOUNT_POINT or len(kind) <= _OPTIONS:
            continue
        if controller is None:
            is_it = kind[_KIND] == "cgroup2"
        else:
            is_it = kind[_KIND] == "cgroup" and controller in kind[_OPTIONS].split(",")
        if not is_it:
            continue
        point = root / mount[_MOUNT_POINT].lstrip("/")
        own = PurePosixPath(path)
        if own.is_relative_to(mount[_MOUNT_ROOT]) and ".." not in own.parts:
            return point, own.relative_to(mount[_MOUNT_ROOT])
        fallback = fallback or (point, PurePosixPath())
    return fallback


def free_memory(root: Path, groups: tuple[ControlGroup, ...]) -> Free | None:
    """How much memory this process may still take before somebody is killed for it.

    Page cache counts as free, as far as the kernel says that it can be dropped; swap does not.

    Args:
        root: Where ``proc`` is: ``/``.
        groups: From :func:`control_groups`.

    Returns:
        The least of what the limits leave; None where nothing sets one.
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
    """What a group may still take.

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
    """Processes of this one's control group that the out-of-memory killer has ended so far.

    Args:
        groups: From :func:`control_groups`.

    Returns:
        The count of the innermost group that keeps one; None if none does.
    """
    for group in groups:
        count = _numbers(group.path / group.files.kills).get("oom_kill")
        if count is not None:
            return count
    return None


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """The addresses that this process may use: memory that is mapped, whether it has pages or not.

    Attributes:
        limit_bytes: The most there may be (``ulimit -v``); None: no limit.
        used_bytes: How much is used; None: not known.
    """

    limit_bytes: int | None
    used_bytes: int | None

    def describe(self) -> str:
        """The limit and the use, in words."""
        limit = "no limit" if self.limit_bytes is None else format_bytes(self.limit_bytes)
        used = "" if self.used_bytes is None else f"; {format_bytes(self.used_bytes)} are used"
        return f"{limit} (`ulimit -v`{used})"


def soft_limit(kind: int) -> int | None:
    """A limit of this process; None if there is none, or none is told.

    Args:
        kind: One of :mod:`resource`, such as ``RLIMIT_AS``.
    """
    try:
        soft, _ = resource.getrlimit(kind)
    except OSError as error:  # a sandbox
        if is_interruption(error):
            raise
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def address_space() -> AddressSpace:
    """The address space of this process."""
    used = None
    with Suppressed(OSError, ValueError, IndexError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    return AddressSpace(soft_limit(resource.RLIMIT_AS), used)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError as error:
        if is_interruption(error):
            raise
        return []


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; what is not so is left out."""
    found: dict[str, int] = {}
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1])
    return found


def format_bytes(nbytes: int) -> str:
    """A number of bytes in few digits: "77.1 MB"."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        # What would be rounded up to 1000.0 is 1.0 of the next unit.
        if value < 999.95:  # noqa: PLR2004
            return f"{value:.1f} {unit}" if unit != "bytes" else f"{nbytes} bytes"
        value /= 1000
    return f"{value:.1f} TB"
