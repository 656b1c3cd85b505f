"""Connects the ranks of one host, and shares an object among them (``share_on_host``).

::

    the rank that comes first                      the others
    ─────────────────────────                      ──────────
    binds the run's name for this call             connect, and wait
    share(build()), pickled in shared memory
    a thread ──── handle, descriptors ───────────▶ map the same memory

The rank that binds the name first, of a Unix socket without a file, is the host of the meeting, and
the others are its guests. The name contains a random number on which the ranks agree through the
store of ``torch.distributed``, so an earlier launch does not know it. The kernel removes the name
when that process ends, however it ends. Its guests then try the name again. The name exists once
for each network namespace, so ranks in containers with separate networks do not meet. Any user can
bind a name or connect to it. So each side asks the kernel which user the other side is
(``SO_PEERCRED``) before it reads anything.

The module is long because it has both what ranks need to meet and what they meet for.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed

from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.payload import Payload, ReceivedPayload, receive_payload
from shmloader.grammar import described_type
from shmloader.interruptions import is_interruption
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.process_state import PROCESS
from shmloader.sampling.arguments import resolve_ranks
from shmloader.shared.sharing import share
from shmloader.threads import BackgroundThread

_T = TypeVar("_T")

_log = logging.getLogger("shmloader")

# struct ucred of <sys/socket.h>: process, user and group.
_CREDENTIALS = struct.Struct("3i")

# Between the host's bind and listen the kernel refuses guests. They try again after this time.
_RETRY_S = 0.01

# A number of tasks, and on how many nodes in a row there are so many.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def token_of_group(caller: str) -> str:
    """Return the random number that the ranks of ``torch.distributed`` agree on.

    Raises:
        RuntimeError: If the process group is not initialised; names the caller.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            f"{caller} with several ranks needs torch.distributed: call init_process_group() first."
        )
    store = torch.distributed.distributed_c10d._get_default_store()
    # torchrun keeps its store when it restarts the ranks.
    key = f"shmloader {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    return str(store.compare_set(key, "", secrets.token_hex(16)).decode())


def name_of_socket(run: str, topic: str) -> str:
    """Return the abstract name of a meeting's socket."""
    digest = hashlib.sha256(f"{run}\n{topic}".encode()).hexdigest()[:32]
    return f"\0shmloader-{os.geteuid()}-{digest}"


class Meeting:
    """One side of a meeting: the host that was first to bind a name, or one of its guests.

    Attributes:
        is_host: Whether this process is the host.
        socket: The host's is the one that guests connect to. A guest's is its connection to the
            host.
        name: The socket's abstract name.

    Args:
        topic: What the ranks meet for; it distinguishes the meetings of one run.
        caller: What a rank calls for it, by the name that an error gives it.
        is_alone: Whether no other rank will come. The name is then random.

    Raises:
        OSError: If this system has no such sockets, or no descriptor is left.
        PermissionError: If another user has bound the name.
        RuntimeError: If other ranks may come, and there is no process group.
    """

    def __init__(self, topic: str, caller: str, *, is_alone: bool = False) -> None:
        run = secrets.token_hex(16) if is_alone else token_of_group(caller)
        self.name = name_of_socket(run, topic)
        while True:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self.socket.settimeout(None)  # whatever socket.setdefaulttimeout() says
                self.is_host = self._try_to_host()
                break
            except BaseException as error:
                self.socket.close()
                # Another rank may have bound the name since this one tried to connect.
                if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(_RETRY_S)
        PROCESS.meetings.add(self.socket)

    def _try_to_host(self) -> bool:
        """Connect to the host, or become it. Returns whether it is."""
        try:
            self.socket.connect(self.name)
        except ConnectionRefusedError:
            self.socket.bind(self.name)
            self.socket.listen(socket.SOMAXCONN)
            return True
        pid, user = peer_of(self.socket)
        if user != os.geteuid():
            raise PermissionError(
                f"user {user} has taken the name by which the ranks of this run find each other"
            )
        _log.info("process %d waits for process %d, a rank of this host", os.getpid(), pid)
        return False

    def detach(self) -> socket.socket:
        """Return the socket, which the caller owns from now on."""
        PROCESS.meetings.discard(self.socket)
        return self.socket

    def close(self) -> None:
        """End the meeting here. May be called again."""
        self.detach().close()


def admit(listener: socket.socket) -> socket.socket | None:
    """Return the connection of the next guest; None if it belongs to another user."""
    guest = listener.accept()[0]
    if peer_of(guest)[1] == os.geteuid():
        return guest
    guest.close()
    return None


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
    parts = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")
    for found in filter(None, map(_TASKS.fullmatch, parts)):
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

# How long a guest waits for the payload once it comes, and how long it may take to receive it.
_REST_S = 30.0
_GUEST_S = 1.0


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

    With several ranks, ``torch.distributed`` has to be initialised. The ranks find each other by a
    Unix socket, whose name is a random number that they agree on through its store. This needs no
    collective operation, no port and no file, and ranks may come late and in any order. Only
    processes of the same user are answered. If the rank that builds ends, is interrupted or raises
    before it has shared the object, another rank builds. On a host with one rank, and inside
    ``build``, this is ``share(build())``.

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
        Exception: What ``build`` raises, in the rank that has called it. The others then call it.
        TypeError, AttributeError, pickle.PicklingError: If the object cannot be pickled. A
            TypeError also if ``build`` is not callable.
        SharedMemoryError: If there is not enough memory.
        RuntimeError: If there is more than one rank, and no process group, or another system than
            Linux.
        PermissionError: If another user has taken the name of the meeting.
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
    ranks = ranks_of_host(resolve_ranks()[1])
    if ranks == 1 or threading.get_ident() in PROCESS.builds_on_host:
        return share(build(), writable)
    if sys.platform != "linux":
        raise RuntimeError("share_on_host() with more than one rank needs Linux; use share()")
    number = PROCESS.calls_on_host
    while True:
        with contextlib.ExitStack() as stack:
            meeting = Meeting(f"share_on_host {number}", "share_on_host()")
            stack.callback(meeting.close)  # so that another rank builds, if this one raises
            if meeting.is_host:
                payload, built = _make(build, writable=writable)
                _Server(meeting, ranks - 1, payload, built).start()
                stack.pop_all()
                PROCESS.calls_on_host = number + 1
                return built
            try:
                received = _receive(meeting.socket)
            except (ConnectionError, TimeoutError) as error:
                if is_interruption(error):
                    raise
            else:
                found: _T = received.load()
                PROCESS.calls_on_host = number + 1
                return found


def _receive(channel: socket.socket) -> ReceivedPayload:
    """Wait until the object is built, and return what the host sends."""
    channel.recv(1, socket.MSG_PEEK)
    channel.settimeout(_REST_S)
    payload = receive_payload(channel)
    with contextlib.suppress(ConnectionError):  # the host may have ended by now
        channel.send(_RECEIVED)
    return payload


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
        return Payload(shared), shared
    except PICKLE_ERRORS as error:
        found = find_unpicklable([shared], ["dataset"])
        raise explain_unpicklable(
            error, found, "the other ranks of this host", _OPEN_LATER
        ) from error


_OPEN_LATER = "Set it to None in build(), and create it when it is first used."


class _Server(BackgroundThread):
    """Admits the other ranks, and gives them the object. Runs until all have it."""

    def __init__(self, meeting: Meeting, guests: int, payload: Payload, shared: object) -> None:
        super().__init__("shmloader_host")
        self._meeting, self._left = meeting, guests
        self._payload, self._shared = payload, shared

    def work(self) -> None:
        """Admit ranks as they come, and answer them. Runs on the server's thread."""
        try:
            while self._left:
                with self.resting():
                    guest = admit(self._meeting.socket)
                if guest is not None:
                    self._send(guest)
        finally:
            self._meeting.close()
            self._payload.close()
            self._shared = None

    def _send(self, guest: socket.socket) -> None:
        """Answer a rank. It is not counted if it goes before it has received everything."""
        with guest:
            guest.settimeout(_GUEST_S)
            try:
                self._payload.send(guest)
                self._left -= guest.recv(len(_RECEIVED)) == _RECEIVED
            except OSError as error:
                _log.warning("could not send the shared object to a rank of this host: %s", error)
