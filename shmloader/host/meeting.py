"""Connects the ranks of one host, by a Unix socket that has a name but no file.

The first rank that binds the name is the host of the meeting, and the others are its guests. It
does not matter which rank is the host. The kernel removes the name when the process that bound it
ends, however it ends. The name exists once for each network namespace, so ranks in containers with
separate networks do not meet.

Any user can bind a name or connect to it. So each side asks the kernel which user the other side is
(``SO_PEERCRED``, unix(7)), and refuses another user before it reads anything. In a user namespace
the kernel shows all users that are not mapped there with one number (user_namespaces(7)). A process
of a user with that number cannot take part in a meeting.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from shmloader.interruptions import is_interruption
from shmloader.process_state import PROCESS

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

# struct ucred of <sys/socket.h>: process, user and group.
_CREDENTIALS = struct.Struct("3i")

# The number that stands for all users that are not mapped, unless /proc gives another one.
_OVERFLOW_USER = 65534

# /proc/self/uid_map where all users are mapped: in the namespace in which the machine started.
_ALL_USERS = ["0", "0", "4294967295"]

# Between the host's bind and listen the kernel refuses guests. They try again after this time.
_RETRY_S = 0.01

# A number of tasks, and on how many nodes in a row there are so many.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

# How long a process may take to end after it has closed its sockets.
_END_MS = 1000


def name_of_run() -> str:
    """Return a text that names this run: from the environment, else from the parent process.

    Ranks that no launcher started, such as those of ``torch.multiprocessing.spawn``, have the same
    parent.
    """
    found = [f"{name}={os.environ[name]}" for name in _RUN_VARIABLES if name in os.environ]
    return "\n".join(found) or f"child of {os.getppid()}"


class Meeting:
    """One side of a meeting: the host that was first to bind a name, or a guest of it.

    Attributes:
        is_host: Whether this process is the host.
        name: The socket's abstract name.
        host_pid: Process id of the host; 0 if the host is in another container and not visible from
            here.

    Args:
        topic: What the ranks meet for; it distinguishes the meetings of one run.
        is_alone: Whether no other rank will come. The name is then random, so that no other process
            finds it.

    Raises:
        OSError: If this system has no such sockets, or no descriptor is left.
        PermissionError: If another user has bound the name, or if the kernel shows other users with
            this user's number.
    """

    def __init__(self, topic: str, *, is_alone: bool = False) -> None:
        if _others_look_like(os.geteuid()):
            raise PermissionError(
                f"user {os.geteuid()} stands for all users that this user namespace does not "
                "map, so ranks cannot be distinguished from processes of other users; run as a "
                "mapped user (`unshare --map-root-user`), or use share()"
            )
        # Two programs that are not ranks and have the same parent would otherwise share a name.
        run = secrets.token_hex(16) if is_alone else name_of_run()
        digest = hashlib.sha256(os.fsencode(f"{run}\n{topic}")).hexdigest()[:32]
        self.name = f"\0shmloader-{os.geteuid()}-{digest}"
        self.host_pid = os.getpid()
        while True:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.is_host = self._begin()
            except BlockingIOError:
                self.close()
                time.sleep(_RETRY_S)
            except BaseException:
                self.close()
                raise
            else:
                break
        if self.is_host:
            PROCESS.meetings.add(self)

    def _begin(self) -> bool:
        """Connect to the host, or become the host.

        Raises:
            BlockingIOError: If neither is possible at this moment.
        """
        # Overrides what the user has set by socket.setdefaulttimeout().
        self._socket.settimeout(None)
        try:
            self.host_pid = _connect(self._socket, self.name)
        except ConnectionRefusedError:
            return self._bind()
        return False

    def _bind(self) -> bool:
        try:
            self._socket.bind(self.name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or is_interruption(error):
                raise
            raise BlockingIOError from error  # another rank has bound it meanwhile
        self._socket.listen(socket.SOMAXCONN)
        return True

    # The host ----------------------------------------------------------------------------

    def next_guest(self, *, may_wait: bool) -> socket.socket | None:
        """Return a connection to the next guest of this user; None if no guest waits.

        Args:
            may_wait: Whether to wait until a guest comes.
        """
        while may_wait or _readable(self._socket.fileno(), timeout_ms=0):
            guest, _ = self._socket.accept()
            guest.settimeout(None)
            if peer_of(guest)[1] == os.geteuid():
                return guest
            guest.close()
        return None

    # A guest -----------------------------------------------------------------------------

    def wait_for_host(self) -> socket.socket:
        """Wait until the host has sent something; return the connection to it.

        The connection alone does not show that the host has ended if a child that the host forked
        still has a copy of the socket. So this also watches the host's process.

        Raises:
            ConnectionResetError: If the host has ended.
        """
        with self._host_process() as pidfd:
            ready = _readable(self._socket.fileno(), pidfd)
        if self._socket.fileno() not in ready:
            raise ConnectionResetError("the host has ended")
        return self._socket

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
        try:
            pidfd = os.pidfd_open(self.host_pid)
        except OSError as error:  # the host has ended, or is in another container and not visible
            if is_interruption(error):
                raise
            yield None
            return
        try:
            yield pidfd
        finally:
            os.close(pidfd)

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


def _readable(*descriptors: int | None, timeout_ms: int | None = None) -> set[int]:
    """Wait until one of these can be read, or has hung up. Returns those."""
    poll = select.poll()  # select.select() takes no descriptor above 1023
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}


def _others_look_like(user: int) -> bool:
    """Return whether the kernel shows other users with this user's number."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        numbered = Path("/proc/self/uid_map").read_text().split()
    except OSError as error:
        if is_interruption(error):
            raise
        return user == _OVERFLOW_USER
    return user == overflow and numbered != _ALL_USERS


def connect(name: str) -> socket.socket:
    """Connect to a host of this user by its name. The caller owns the connection.

    Raises:
        ConnectionRefusedError: If there is no host of this name any more.
        PermissionError: If another user has bound the name.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(None)
        _connect(connection, name)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(connection: socket.socket, name: str) -> int:
    """Connect to a host of this user. Returns its process id."""
    connection.connect(name)
    pid, user = peer_of(connection)
    if user != os.geteuid():
        raise PermissionError(
            f"user {user} has taken the name by which the ranks of this run find each other; "
            "give the run another id or port"
        )
    return pid


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
