"""``share_on_host``: one rank of a host builds an object and shares it, the others receive handles.

::

    the rank that comes first                      the others
    ─────────────────────────                      ──────────
    binds the run's name for this call             connect, say which rank they are, and wait
    share(build()), pickled in shared memory
    a thread ──── handle, descriptors ───────────▶ map the same memory, or raise what build() raised
"""

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.failures import RemoteError
from shmloader.batch.payload import Payload, ReceivedPayload, receive_payload
from shmloader.batch.payload_digest import mark_common
from shmloader.grammar import described_type
from shmloader.host.meeting import Meeting, ranks_of_host
from shmloader.interruptions import Caught, attempt, is_interruption
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.process_state import PROCESS
from shmloader.sampling.ranks import find_ranks
from shmloader.shared.sharing import share
from shmloader.threads.background import BackgroundThread

_T = TypeVar("_T")

_log = logging.getLogger("shmloader")

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
    several shells, have to initialise ``torch.distributed`` first, or each of them builds. This
    needs no collective operation, no port and no file, and ranks may come late and in any order.
    Only processes of the same user are answered. A rank that an earlier run has left behind is not
    met; a warning names its process. If the rank that builds ends or is interrupted before it has
    shared the object, another rank builds. If the host has one rank, and within ``build``, which
    runs in one rank, this is ``share(build())``.

    The memory has no name, and is freed when no process uses it any more. The rank that built the
    object keeps it until all ranks of this host have it, or until its process ends. The host's
    number of ranks is ``LOCAL_WORLD_SIZE``, or Slurm's number of tasks on this node, or else the
    world size. With more than one rank, this works on Linux only.

    Args:
        build: Function that returns the object. Called without arguments, in one rank. Only that
            rank's object is used, so it must not depend on the rank. An object that has no bulk to
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
    rank, world_size = find_ranks()
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
        try:
            payload = _receive(meeting.socket)
        except (ConnectionError, TimeoutError) as error:
            if is_interruption(error):
                raise
        else:
            found: _T = _open(payload, meeting.host_pid)
            mark_common(found)
            return found
        finally:
            meeting.close()


# The rank that builds ------------------------------------------------------------------------


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
    mark_common(shared)
    return shared


def _make(build: Callable[[], _T], *, writable: bool) -> tuple[Payload, _T]:
    """Build the object, and pickle it for the other ranks.

    Calls of ``share_on_host`` in ``build`` are not counted: only this rank makes them, and all
    ranks must count the same calls.
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
    """Admits the other ranks, and gives them the object. Runs until all have it.

    Args:
        meeting: The meeting that the ranks come to. The server closes it.
        guests: How many other ranks will come at most.
        payload: The object, or None, and the error, or None.
        shared: The object, which owns descriptors of the payload.
    """

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


# The others ----------------------------------------------------------------------------------


def _receive(channel: socket.socket) -> ReceivedPayload:
    """Receive what the host has built.

    Raises:
        ConnectionError, TimeoutError: If the host has ended or is stopped.
    """
    channel.settimeout(_REST_S)
    payload = receive_payload(channel)
    with contextlib.suppress(ConnectionError):  # the host may have ended, and is needed no more
        channel.send(_RECEIVED)
    return payload


def _open(payload: ReceivedPayload, builder: int) -> Any:
    """Return the object that the host has built.

    Raises:
        Exception: What the host raised, or what unpickling the object raises.
    """
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
