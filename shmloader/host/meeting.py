"""Connects the ranks of one host, by a Unix socket that has a name but no file.

The first rank that binds the name is the host of the meeting, and the others are its guests. It
does not matter which rank is the host. The kernel removes the name when the process that bound it
ends, however it ends. The name exists once for each network namespace, so ranks in containers with
separate networks do not meet.

Any user can bind a name or connect to it. So each side asks the kernel which user the other side is
(``SO_PEERCRED``, unix(7)), and refuses another user before it reads anything.

**Who belongs together.** An earlier launch with the same address and port may have left ranks
behind. They must not meet those of the next launch.

* If ``torch.distributed`` is initialised, the ranks agree on a random number through the store of
  its process group. The name contains it, so no other launch can have the name.
* Otherwise the name contains the variables of the run, and each guest tells the host who it is. It
  is admitted if the same process has launched both, at about the same time, or if one of them has
  launched the other. Else it goes on to the next name.
* A launcher, such as a shell, may launch twice within seconds. So no guest is admitted whose rank
  has come before as another process.
* A host that is stopped, or stuck in the kernel, cannot answer. Its guests go on to the next name.
"""

import contextlib
import errno
import hashlib
import io
import logging
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.distributed

from shmloader.process_state import PROCESS

_log = logging.getLogger("shmloader")

# The variables that together name a run on its host. torchrun's run id is "none" unless the user
# gives one; then the port tells runs apart. Each restart by torchrun counts as a run of its own.
_RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)

# Variables that a process which belongs to a rank has, such as a shell between the launcher and the
# rank, and that the launcher does not have, or has with other values.
_RANK_VARIABLES = (b"RANK=", b"LOCAL_RANK=", b"SLURM_PROCID=")

# struct ucred of <sys/socket.h>: process, user and group.
_CREDENTIALS = struct.Struct("3i")

# Between the host's bind and listen the kernel refuses guests. They try again after this time.
_RETRY_S = 0.01

# A number of tasks, and on how many nodes in a row there are so many.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

# How long a process may take to end after it has closed its sockets.
_END_MS = 1000

# How long a host may take to answer before the guest looks whether it is stopped.
_SILENCE_MS = 2000

# Ranks that one launcher starts at once are started within this time of each other.
_TOGETHER_S = 10.0

# A guest's first message: the fields of Hello. The host answers with one of the words below.
_HELLO = struct.Struct("=qqdqd?")
_ADMITTED, _REFUSED = b"admitted", b"refused"


def name_of_run() -> str:
    """Return a text that names this run: from the environment, else from the parent process.

    Ranks that no launcher started, such as those of ``torch.multiprocessing.spawn``, have the same
    parent.
    """
    found = [f"{name}={os.environ[name]}" for name in _RUN_VARIABLES if name in os.environ]
    parent = os.getppid()
    return "\n".join(found) or f"child of {parent}, started at {_started_s(parent)}"


def _token_of_group() -> str | None:
    """Return the random number that the ranks of ``torch.distributed`` agree on; None if none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return str(store.compare_set("shmloader", "", secrets.token_hex(16)).decode())
    except (RuntimeError, AttributeError, NotImplementedError):
        return None  # the group has no store (MPI), or the process that has it has ended


def _launcher() -> int:
    """Return the pid of the process that launched this rank; 0 if it is not visible from here.

    It is the parent, or the nearest ancestor that does not belong to the rank. A process of another
    user, whose variables cannot be read, counts as belonging to the rank.
    """
    ours, pid = _rank_variables("self"), os.getppid()
    while ours and pid > 1 and _rank_variables(pid) in (None, ours):
        stat = _stat(pid)
        pid = 0 if stat is None else int(stat[1])
    return pid


def _rank_variables(pid: int | str) -> list[bytes] | None:
    """Return the rank's variables with which a process was started; None if it cannot be read."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None
    return sorted(one for one in variables if one.startswith(_RANK_VARIABLES))


def _stat(pid: int | str) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` from the state on (proc(5)); None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _started_s(pid: int | str) -> float:
    """Return when a process was started, in seconds since boot; 0 if that is not known."""
    stat = _stat(pid)
    return 0.0 if stat is None else int(stat[19]) / os.sysconf("SC_CLK_TCK")


def _progress(pid: int) -> list[str]:
    """Return the fields that show whether a stopped or waiting process has done anything.

    They are its state, page faults and CPU time. The list is empty unless the process is stopped or
    cannot be interrupted.
    """
    stat = _stat(pid) if pid else None
    return [] if stat is None or stat[0] not in "TtD" else [stat[0], *stat[7:13]]


def _has_running_child(pid: int) -> bool:
    """Return whether a process has a child that is not stopped: it may be the one to answer."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    states = [stat[0] for stat in map(_stat, children) if stat is not None]
    return any(state not in "TtZ" for state in states)


class Hello(NamedTuple):
    """Who takes part in a meeting.

    Attributes:
        rank: The rank's number.
        pid: The rank's process id, as the process itself sees it.
        started_s: When the process was started, in seconds since boot.
        launcher: Process id of the process that launched it; 0 if that is not visible.
        launched_s: When the launcher was started, in seconds since boot.
        is_certain: Whether no other launch can have the name.
    """

    rank: int
    pid: int
    started_s: float
    launcher: int
    launched_s: float
    is_certain: bool

    @classmethod
    def own(cls, rank: int, *, is_certain: bool) -> "Hello":
        """Return that of this process."""
        launcher = _launcher()
        launched_s = _started_s(launcher)
        return cls(rank, os.getpid(), _started_s("self"), launcher, launched_s, is_certain)

    def belongs_with(self, other: "Hello") -> bool:
        """Whether both processes are ranks of one launch."""
        is_near = abs(self.started_s - other.started_s) <= _TOGETHER_S
        return (
            self.is_certain
            or (self[3:5] == other[3:5] and is_near)
            or self[3:5] == other.process
            or self.process == other[3:5]
        )

    @property
    def process(self) -> tuple[int, float]:
        """What tells the process from all others of this host."""
        return self.pid, self.started_s


class Roll:
    """The ranks that have come to a meeting. Its host keeps it.

    Args:
        host: The rank that is the host.
    """

    def __init__(self, host: Hello) -> None:
        self._host = host
        self._processes = {host.rank: host.process}

    def admits(self, guest: Hello) -> bool:
        """Whether a guest is a rank of the same launch. Notes that it has come."""
        if not guest.belongs_with(self._host):
            return False
        return self._processes.setdefault(guest.rank, guest.process) == guest.process


def admit(guest: socket.socket, roll: Roll, timeout_s: float) -> bool:
    """Read who a guest is, and tell it whether it may take part.

    Args:
        guest: The connection to the guest. It gets this timeout, and is closed if the guest is of
            another launch or another user.
        roll: The ranks that have come.
        timeout_s: How long the guest may take for each message.

    Returns:
        Whether the guest may take part.
    """
    guest.settimeout(timeout_s)
    with contextlib.suppress(ConnectionError, TimeoutError):  # it has gone
        if peer_of(guest)[1] == os.geteuid():
            data = guest.recv(_HELLO.size)
            is_admitted = len(data) == _HELLO.size and roll.admits(Hello(*_HELLO.unpack(data)))
            guest.send(_ADMITTED if is_admitted else _REFUSED)
            if is_admitted:
                return True
    guest.close()
    return False


class Meeting:
    """One side of a meeting: the host that was first to bind a name, or a guest of it.

    Attributes:
        is_host: Whether this process is the host.
        hello: What this rank says of itself.
        roll: The ranks that have come to this host.
        name: The socket's abstract name.
        guests: Connections that wait for what the host makes.
        host_pid: Process id of the host; 0 if the host is in another container and not visible from
            here.

    Args:
        topic: What the ranks meet for; it distinguishes the meetings of one run.
        rank: Number of this rank.
        patience_ms: After which time a warning names a host that does not answer.
        is_alone: Whether no other rank will come. The name is then random, so that no other process
            finds it.

    Raises:
        OSError: If this system has no such sockets, or no descriptor is left.
        PermissionError: If another user has bound the name.
    """

    def __init__(
        self, topic: str, rank: int = 0, *, patience_ms: int = _SILENCE_MS, is_alone: bool = False
    ) -> None:
        token = secrets.token_hex(16) if is_alone else _token_of_group()
        self.hello = Hello.own(rank, is_certain=token is not None)
        self.roll = Roll(self.hello)
        self._topic = f"{token or name_of_run()}\n{topic}"
        self._patience_ms = patience_ms
        self._use_name(0)
        self.host_pid = os.getpid()
        self.guests: list[socket.socket] = []
        while True:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.is_host = self._begin()
                if self.is_host or self._introduce():
                    break
                self.close()
            except (BlockingIOError, ConnectionError):
                self.close()
                time.sleep(_RETRY_S)
            except BaseException:
                self.close()
                raise
        if self.is_host:
            PROCESS.meetings.add(self)

    def _use_name(self, number: int) -> None:
        """Use the run's name of this number. The others' hosts belong to other launches."""
        self._number = number
        digest = hashlib.sha256(os.fsencode(f"{self._topic}\n{number}")).hexdigest()[:32]
        self.name = f"\0shmloader-{os.geteuid()}-{digest}"

    def _begin(self) -> bool:
        """Connect to the host, or become the host.

        Raises:
            BlockingIOError: If neither is possible at this moment.
        """
        # Overrides what the user has set by socket.setdefaulttimeout().
        self._socket.settimeout(None)
        try:
            self._connect()
        except ConnectionRefusedError:
            return self._bind()
        return False

    def _connect(self) -> None:
        self._socket.connect(self.name)
        self.host_pid, user = peer_of(self._socket)
        if user != os.geteuid():
            raise PermissionError(
                f"user {user} has taken the name by which the ranks of this run find each other; "
                "give the run another id or port"
            )

    def _bind(self) -> bool:
        try:
            self._socket.bind(self.name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise BlockingIOError from error  # another rank has bound it meanwhile
        self._socket.listen(socket.SOMAXCONN)
        return True

    def _introduce(self) -> bool:
        """Tell the host who this is. Returns whether it admits this rank.

        Raises:
            ConnectionError: If the host has ended, or has closed the meeting.
        """
        self._socket.send(_HELLO.pack(*self.hello))
        before, silent_ms = _progress(self.host_pid), 0
        while not self._wait(_SILENCE_MS):
            now, silent_ms = _progress(self.host_pid), silent_ms + _SILENCE_MS
            if now and now == before and not _has_running_child(self.host_pid):
                return self._leave_host("is stopped or stuck")
            if silent_ms == self._patience_ms:
                _log.warning(
                    "Process %d, for which rank %d waits, has not answered for %d s. If an earlier "
                    "run left it behind, end it: kill -9 %d",
                    self.host_pid, self.hello.rank, silent_ms // 1000, self.host_pid,
                )  # fmt: skip
            before = now
        answer = self._socket.recv(len(_ADMITTED))
        if not answer:
            raise ConnectionResetError("the meeting was closed")
        return answer == _ADMITTED or self._leave_host("belongs to another launch")

    def _leave_host(self, why: str) -> bool:
        """Tell of a host that is not met, and use the next name. Returns False."""
        _log.warning(
            "Process %d has the name of this run on this host, but %s. Rank %d does not use its "
            "data. If an earlier run left it behind, end it: kill -9 %d",
            self.host_pid, why, self.hello.rank, self.host_pid,
        )  # fmt: skip
        self._use_name(self._number + 1)
        return False

    # The host ----------------------------------------------------------------------------

    def next_guest(self, wakeup: socket.socket | None = None) -> socket.socket | None:
        """Wait for a guest, and return the connection to it.

        Args:
            wakeup: The wait ends, and None is returned, when this can be read.
        """
        if wakeup is not None and wakeup.fileno() in _readable(
            self._socket.fileno(), wakeup.fileno()
        ):
            return None
        return self._socket.accept()[0]

    # A guest -----------------------------------------------------------------------------

    def wait_for_host(self) -> socket.socket:
        """Wait until the host has sent something; return the connection to it.

        The connection alone does not show that the host has ended if a child that the host forked
        still has a copy of the socket. So this also watches the host's process.

        Raises:
            ConnectionResetError: If the host has ended.
        """
        self._wait(None)
        return self._socket

    def _wait(self, timeout_ms: int | None) -> bool:
        """Wait until the host has sent something. Returns False if it has not in this time.

        Raises:
            ConnectionResetError: If the host has ended.
        """
        with self._host_process() as pidfd:
            ready = _readable(self._socket.fileno(), pidfd, timeout_ms=timeout_ms)
        if ready and self._socket.fileno() not in ready:
            raise ConnectionResetError("the host has ended")
        return bool(ready)

    @property
    def has_lost_host(self) -> bool:
        """Whether the host's process has ended, rather than closed the meeting.

        A process closes its sockets a moment before it has ended, so this waits up to 1 s for its
        end. A host that is not visible from here counts as lost.
        """
        with self._host_process() as pidfd:
            return pidfd is None or bool(_readable(pidfd, timeout_ms=_END_MS))

    @contextlib.contextmanager
    def _host_process(self) -> Iterator[int | None]:
        """Yield a descriptor that is readable once the host has ended.

        Yields None if the host has ended already, or is not visible from here.
        """
        pids = (self.host_pid,) if self.host_pid else ()
        process = None
        with contextlib.suppress(ProcessLookupError):
            # An interruption comes after both calls or before them, so no descriptor is lost.
            process = next(map(io.FileIO, map(os.pidfd_open, pids)), None)
        if process is None:
            yield None
            return
        with process:
            yield process.fileno()

    # Both --------------------------------------------------------------------------------

    def detach(self) -> socket.socket:
        """Return the socket, which the caller owns from now on.

        A guest's socket is its connection to the host. The host's is the one that guests connect
        to.
        """
        PROCESS.meetings.discard(self)
        return self._socket

    def close(self) -> None:
        """End the meeting here. May be called again."""
        PROCESS.meetings.discard(self)
        self._socket.close()
        for guest in self.guests:
            guest.close()


def _readable(*descriptors: int | None, timeout_ms: int | None = None) -> set[int]:
    """Wait until one of these can be read, or has hung up. Returns those."""
    poll = select.poll()  # select.select() takes no descriptor above 1023
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}


def ranks_of_host(world_size: int) -> int:
    """Return how many ranks this host has; ``world_size`` if the environment does not say.

    The number is in ``LOCAL_WORLD_SIZE``, or in Slurm's ``SLURM_STEP_TASKS_PER_NODE`` together with
    ``SLURM_NODEID``. "4(x2),3" means 4 tasks on the first and the second node, and 3 on the third.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if text.isdecimal() and int(text):
        return min(world_size, int(text))
    node = os.environ.get("SLURM_NODEID", "")
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = _TASKS.fullmatch(part)
        if found is not None:
            counts += [int(found[1])] * int(found[2] or 1)
    if node.isdecimal() and int(node) < len(counts):
        return max(1, min(world_size, counts[int(node)]))
    return world_size


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end of a connection."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user
