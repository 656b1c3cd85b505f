"""Connects the ranks of one host, and shares an object among them (``share_on_host``).

::

    the rank that comes first                      the others
    ─────────────────────────                      ──────────
    binds the run's name for this call             connect, say which rank they are, and wait
    share(build()), pickled in shared memory
    a thread ──── handle, descriptors ───────────▶ map the same memory, or raise what build() raised

The rank that binds the name first, of a Unix socket without a file, is the host of the meeting, and
the others are its guests. The kernel removes the name when that process ends, however it ends. Its
guests then try the name again. The name exists once for each network namespace, so ranks in
containers with separate networks do not meet. Any user can bind a name or connect to it. So each
side asks the kernel which user the other side is (``SO_PEERCRED``) before it reads anything.

An earlier launch with the same address and port may have left ranks behind:

* If ``torch.distributed`` is initialised, the name contains a random number on which the ranks
  agree through its store.
* Otherwise it contains the variables of the run, and the process that launched the rank. A guest
  goes on to the next name if the host was not started at about the same time, or is stopped.
* A launcher, such as a shell, may launch twice within seconds. So no guest is admitted whose rank
  has come before as another process. It goes on to the next name, too.

The module is long because it has both what ranks need to meet and what they meet for.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.failures import RemoteError
from shmloader.batch.payload import Payload, ReceivedPayload, receive_payload
from shmloader.grammar import described_type
from shmloader.insight.measurements import read_file
from shmloader.interruptions import Caught, attempt, is_interruption
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.process_state import PROCESS
from shmloader.sampling.arguments import resolve_ranks
from shmloader.shared.sharing import share
from shmloader.threads import BackgroundThread

_T = TypeVar("_T")

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
_RANK_VARIABLES = ("RANK=", "LOCAL_RANK=", "SLURM_PROCID=")

# struct ucred of <sys/socket.h>: process, user and group.
_CREDENTIALS = struct.Struct("3i")

# Between the host's bind and listen the kernel refuses guests. They try again after this time.
_RETRY_S = 0.01

# How long a guest may take to say which rank it is. How long a host may take to answer before the
# guest looks whether it is stopped.
_GUEST_S = 1.0
_HOST_S = 2.0

# A number of tasks, and on how many nodes in a row there are so many.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

# Ranks that one launcher starts at once are started within this time of each other.
_TOGETHER_S = 10.0

# A guest first sends its rank. The host answers with one of the words.
_RANK = struct.Struct("=q")
_ADMITTED, _REFUSED = b"admitted", b"refused"


def name_of_run(launcher: int) -> str:
    """Return a text that names a run: its launcher, and the variables of the environment."""
    found = [f"{name}={os.environ[name]}" for name in _RUN_VARIABLES if name in os.environ]
    return "\n".join([*found, f"launched by {launcher}, started at {_started_s(launcher)}"])


def name_of_socket(run: str, topic: str, number: int = 0) -> str:
    """Return the abstract name of a meeting's socket: the first one, or one of the next ones."""
    digest = hashlib.sha256(os.fsencode(f"{run}\n{topic}\n{number}")).hexdigest()[:32]
    return f"\0shmloader-{os.geteuid()}-{digest}"


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

    It is the nearest ancestor that does not belong to the rank.
    """
    ours, pid = _rank_variables("self"), os.getppid()
    while ours and pid > 1 and _rank_variables(pid) in (None, ours):
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return pid


def _rank_variables(pid: int | str) -> list[str] | None:
    """Return the rank's variables with which a process was started; None if it cannot be read."""
    text = read_file(f"/proc/{pid}/environ")
    found = sorted(one for one in text.split("\0") if one.startswith(_RANK_VARIABLES))
    return found if text else None


def _stat(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on (proc(5)); [] if unknown."""
    return read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _started_s(pid: int | str) -> float:
    """Return when a process was started, in seconds since boot; 0 if that is not known."""
    stat = _stat(pid)
    return int(stat[19]) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, and has no running child that may answer in its place."""
    children = read_file(f"/proc/{pid}/task/{pid}/children").split()
    own, *others = map(_stat, [str(pid), *children])
    return bool(own) and all(not stat or stat[0] in "TtZ" for stat in (own, *others))


class Roll:
    """The ranks that have come to a meeting, and their processes. Its host keeps it."""

    def __init__(self, rank: int) -> None:
        self._pids = {rank: os.getpid()}

    def admit(self, guest: socket.socket) -> bool:
        """Read which rank a guest is, and tell it whether it may take part.

        The connection is closed if the guest is of another launch or another user.
        """
        guest.settimeout(_GUEST_S)
        with contextlib.suppress(ConnectionError, TimeoutError):  # it has gone
            pid, user = peer_of(guest)
            if user == os.geteuid():
                (rank,) = _RANK.unpack(guest.recv(_RANK.size) or bytes(_RANK.size))
                is_known = self._pids.setdefault(rank, pid) == pid
                guest.send(_ADMITTED if is_known else _REFUSED)
                if is_known:
                    return True
        guest.close()
        return False


class Meeting:
    """One side of a meeting: the host that was first to bind a name, or a guest that it admitted.

    Attributes:
        is_host: Whether this process is the host.
        roll: The ranks that have come, if it is the host.
        socket: The host's is the one that guests connect to. A guest's is its connection to the
            host.
        name: The socket's abstract name.
        host_pid: Process id of the host; 0 if it is in another container.

    Args:
        topic: What the ranks meet for; it distinguishes the meetings of one run.
        rank: Number of this rank.
        is_alone: Whether no other rank will come. The name is then random.

    Raises:
        OSError: If this system has no such sockets, or no descriptor is left.
        PermissionError: If another user has bound the name.
    """

    def __init__(self, topic: str, rank: int = 0, *, is_alone: bool = False) -> None:
        token = secrets.token_hex(16) if is_alone else _token_of_group()
        run, number = token or name_of_run(_launcher()), 0
        self.roll, self.host_pid = Roll(rank), os.getpid()
        while True:
            self.name = name_of_socket(run, topic, number)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.socket.settimeout(_HOST_S)
                self.is_host = self._try_to_host()
                why = "" if self.is_host else self._try_to_be_admitted(rank, token)
                if not why:
                    break
            except (BlockingIOError, ConnectionError):
                time.sleep(_RETRY_S)
            except BaseException:
                self.socket.close()
                raise
            else:
                number += 1
                _log.warning(
                    "Process %d has the name of this run on this host, but %s. Rank %d does not "
                    "use its data. If an earlier run left it behind, end it: kill -9 %d",
                    self.host_pid, why, rank, self.host_pid,
                )  # fmt: skip
            self.socket.close()
        self.socket.settimeout(None)
        PROCESS.meetings.add(self.socket)

    def _try_to_host(self) -> bool:
        """Connect to the host, or become it. Returns whether it is. Raises to try again."""
        try:
            self.socket.connect(self.name)
        except ConnectionRefusedError:
            try:
                self.socket.bind(self.name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise BlockingIOError from error  # another rank has bound it meanwhile
            self.socket.listen(socket.SOMAXCONN)
            return True
        return False

    def _try_to_be_admitted(self, rank: int, token: str | None) -> str:
        """Wait until the host admits this rank. Returns why it does not; "" if it does."""
        self.host_pid, user = peer_of(self.socket)
        if user != os.geteuid():
            raise PermissionError(
                f"user {user} has taken the name by which the ranks of this run find each other; "
                "give the run another id or port"
            )
        another = "belongs to another launch"
        if not token and abs(_started_s(self.host_pid) - _started_s("self")) > _TOGETHER_S:
            return another
        self.socket.send(_RANK.pack(rank))
        _log.info("rank %d waits for process %d", rank, self.host_pid)
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while not poll.poll(1000 * _HOST_S):
            if _is_stopped(self.host_pid):
                return "is stopped"
        answer = self.socket.recv(len(_ADMITTED))
        if not answer:
            raise ConnectionResetError("the meeting was closed")
        return "" if answer == _ADMITTED else another

    def detach(self) -> socket.socket:
        """Return the socket, which the caller owns from now on."""
        PROCESS.meetings.discard(self.socket)
        return self.socket

    def close(self) -> None:
        """End the meeting here. May be called again."""
        self.detach().close()


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


# What a guest sends when it has received everything.
_RECEIVED = b"received"

# How long a guest waits for the payload.
_REST_S = 30.0


def share_on_host(build: Callable[[], _T], writable: bool = False) -> _T:
    """Build an object in one rank of this host, and share it with the host's other ranks.

    Each rank calls this with the same function. The rank that comes first calls ``build`` and
    shares what it returns, as :func:`shmloader.share` does. The others wait, and get an equal
    object over the same memory. So a dataset is built once and is in memory once, however many
    ranks and workers read it:

    .. code-block:: python

        import shmloader

        def make_dataset():
            return [f"sample {index}" for index in range(1000)]

        dataset = shmloader.share_on_host(make_dataset)

    The ranks find each other by a Unix socket that is named after the run. If
    ``torch.distributed`` is initialised, the name is a random number that the ranks agree on
    through its store. Otherwise it is the process that launched the ranks, together with torchrun's
    run id and restart count, ``MASTER_ADDR``, ``MASTER_PORT``, and Slurm's job and step. Then the
    ranks must be started within 10 s of each other. So ranks that are launched one by one, or in
    several shells, have to initialise ``torch.distributed`` first. Otherwise each of them builds.
    This needs no collective operation, no port and no file, and ranks may come late and in any
    order. Only processes of the same user are answered. A rank that an earlier run has left behind
    is not met; a warning names its process. If the rank that builds ends or is interrupted before
    it has shared the object, another rank builds. On a host with one rank, and inside ``build``,
    this is ``share(build())``.

    The memory has no name, and is freed when no process uses it any more. The rank that built the
    object keeps it until all ranks of this host have it, or until its process ends. The host's
    number of ranks is ``LOCAL_WORLD_SIZE``, or Slurm's number of tasks on this node, or else the
    world size. With more than one rank, this works on Linux only.

    Args:
        build: Function that returns the object. Called without arguments, in one rank. Only that
            rank's object is used, so it must not depend on the rank. An object with nothing to
            share is sent as a copy.
        writable: Whether arrays may be written to; see :func:`shmloader.share`.

    Returns:
        What ``build`` returned, in shared memory. In the rank that built it, it is what ``share``
        returns.

    Raises:
        Exception: What ``build`` raises, in every rank that takes part. In the other ranks it has
            the same type if that can be built from a text, and is a RuntimeError otherwise.
        TypeError, AttributeError, pickle.PicklingError: If the object cannot be pickled. A
            TypeError also if ``build`` is not callable.
        SharedMemoryError: If there is not enough memory.
        RuntimeError: On a system other than Linux, if there is more than one rank.
        PermissionError: If another user has taken the name of the run.
        ValueError: If the environment gives the number of ranks but not this process's rank, or the
            reverse, or if these numbers are wrong. Under Lightning, call it in ``setup()`` or
            ``train_dataloader()``: processes know their rank from there on.

    Note:
        Several calls are told apart by their number, so all ranks must make the same calls in the
        same order, as with collective operations. Ranks in containers with separate networks do not
        find each other, and each container builds its own object.
    """
    if not callable(build):
        raise TypeError(
            "build should be a function that makes the dataset, "
            f"but got {described_type(build)}: share_on_host(lambda: dataset) or share(dataset)"
        )
    rank, world_size = resolve_ranks()
    ranks = ranks_of_host(world_size)
    if ranks == 1 or threading.get_ident() in PROCESS.builds_on_host:
        return share(build(), writable)
    if sys.platform != "linux":
        raise RuntimeError("share_on_host() with more than one rank needs Linux; use share()")
    number = PROCESS.calls_on_host
    PROCESS.calls_on_host += 1
    while True:
        meeting = Meeting(f"share_on_host {number}", rank)
        if meeting.is_host:
            return _build(meeting, build, ranks - 1, writable=writable)
        channel = meeting.socket
        try:
            channel.settimeout(_REST_S)
            payload = receive_payload(channel)
            with contextlib.suppress(ConnectionError):  # the host may have ended by now
                channel.send(_RECEIVED)
        except (ConnectionError, TimeoutError) as error:
            if is_interruption(error):
                raise
        else:
            found: _T = _open(payload, meeting.host_pid)
            return found
        finally:
            meeting.close()


def _build(meeting: Meeting, build: Callable[[], _T], guests: int, *, writable: bool) -> _T:
    with contextlib.ExitStack() as stack:
        stack.callback(meeting.close)  # then another rank builds
        made: Any = attempt(_make, build, writable=writable)
        error = made.error if isinstance(made, Caught) else None
        if error is not None:
            remote = RemoteError.of(error, f"in process {os.getpid()}, a rank of this host")
            made = Payload((None, remote)), None
        _Server(meeting, guests, *made).start()
        stack.pop_all()
    if error is not None:
        try:
            raise error
        finally:
            del error  # the traceback pins this frame
    shared: _T = made[1]
    return shared


def _make(build: Callable[[], _T], *, writable: bool) -> tuple[Payload, _T]:
    """Build the object, and pickle it for the other ranks.

    Calls of ``share_on_host`` in ``build`` are not counted: only this rank makes them.
    """
    thread = threading.get_ident()
    PROCESS.builds_on_host.add(thread)
    try:
        shared = share(build(), writable)
    finally:
        PROCESS.builds_on_host.discard(thread)
    try:
        return Payload((shared, None)), shared
    except PICKLE_ERRORS as error:
        found = find_unpicklable([shared], ["dataset"])
        raise explain_unpicklable(
            error, found, "the other ranks of this host", _OPEN_LATER
        ) from error


_OPEN_LATER = "Set it to None in build(), and create it when it is first used."


class _Server(BackgroundThread):
    """Admits the other ranks, and gives them the object. Runs until all have it."""

    def __init__(
        self, meeting: Meeting, guests: int, payload: Payload, shared: object = None
    ) -> None:
        super().__init__("shmloader_host")
        self._meeting, self._left = meeting, guests
        self._payload, self._shared = payload, shared

    def work(self) -> None:
        """Admit ranks as they come, and answer them. Runs on the server's thread."""
        try:
            while self._left:
                with self.resting():
                    guest = self._meeting.socket.accept()[0]
                if self._meeting.roll.admit(guest):
                    self._send(guest)
        finally:
            self._meeting.close()
            self._payload.close()
            self._shared = None

    def _send(self, guest: socket.socket) -> None:
        """Answer a rank. It is not counted if it goes before it has received everything."""
        with guest:
            try:
                self._payload.send(guest)
                self._left -= guest.recv(len(_RECEIVED)) == _RECEIVED
            except OSError as error:
                _log.warning("could not send the shared object to a rank of this host: %s", error)


def _open(payload: ReceivedPayload, builder: int) -> Any:
    """Return the object that the host has built, or raise what it raised."""
    with PROCESS.opening:
        before = PROCESS.received
        try:
            shared, error = payload.load()
        finally:
            PROCESS.received = before
    if error is not None:
        who = f"process {builder}" if builder else "a process in another container"
        raise error.rebuilt(f"The object for all ranks of this host was built by {who}.")
    return shared
