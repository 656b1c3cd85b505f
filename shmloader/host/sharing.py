"""``share_on_host``: one rank of a host builds an object and shares it, the others receive handles.

::

    the rank that comes first                      the others
    ─────────────────────────                      ──────────
    binds the run's name for this call             connect, and say who they are
    a thread ──── answers that they may wait ────▶ wait
    share(build()), pickled in shared memory
    the thread ── "built", handle, descriptors ──▶ map the same memory
             └─── "failed", exception ───────────▶ raise it
"""

import logging
import os
import pickle
import select
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
from shmloader.host.meeting import Meeting, Roll, ranks_of_host
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.memory.pickled import PICKLE_ERRORS
from shmloader.process_state import PROCESS
from shmloader.sampling.ranks import find_ranks
from shmloader.shared.sharing import share
from shmloader.threads.background import BackgroundThread

_T = TypeVar("_T")

_log = logging.getLogger("shmloader")

# How the first message to a guest begins. After "built", the payload follows in further messages.
# After "failed", the rest of this message is the error.
# "again" says that another rank has to build.
_BUILT, _FAILED, _AGAIN = b"built", b"failed", b"again"

# What a guest sends when it has received everything.
_RECEIVED = b"received"

# The most characters of an error's text, which may be four bytes each, and the most bytes of the
# first message, which has to fit into the socket's buffer of about 212 KB.
_ERROR_CHARACTERS = 20_000
_ANSWER_BYTES = 128 * 1024

# How long a guest waits for the rest of a payload.
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
    met; a warning names its process. If the host has one rank, and within ``build``, which runs in
    one rank, this is ``share(build())``.

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
        RuntimeError: If the process that builds ends before it has shared the object; or, on a
            system other than Linux, if there is more than one rank.
        PermissionError: If another user has taken the name of the run.
        ValueError: If the environment gives the number of ranks but not this process's rank, or the
            reverse, or if these numbers are wrong.

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
    rank, world_size = _find_ranks()
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
            answer = _receive(meeting)
        finally:
            meeting.close()
        if answer is not None:
            found: _T = _open(answer, meeting.host_pid)
            mark_common(found)
            return found
        # The host's build() was interrupted, or it had answered as many ranks as it expected.


def _find_ranks() -> tuple[int, int]:
    """Return the rank and the number of ranks.

    Raises:
        ValueError: If the environment's rank and world size are incomplete or wrong, as in a
            process that Lightning has started and that has not called ``fit`` yet.
    """
    try:
        return find_ranks()
    except ValueError as error:
        if is_interruption(error):
            raise
        raise ValueError(
            f"{error}. share_on_host() needs a process that knows its rank; under Lightning, call "
            "it in setup() or train_dataloader()"
        ) from error


# The rank that builds ------------------------------------------------------------------------


def _build(meeting: Meeting, build: Callable[[], _T], guests: int, *, writable: bool) -> _T:
    server = _Server(meeting, guests)
    try:
        server.start()
        shared = share(_call(build), writable)
        server.finish(_pickled(shared), shared)
        mark_common(shared)
    except BaseException as error:
        answer: bytes | None = None
        if not is_interruption(error):
            remote = RemoteError.of(error, f"in process {os.getpid()}, a rank of this host")
            answer = _FAILED + pickle.dumps(remote.shortened(_ERROR_CHARACTERS))
        server.finish(answer)  # without an answer, another rank builds
        raise
    return shared


def _call(build: Callable[[], _T]) -> _T:
    """Call the function, without counting its own calls of ``share_on_host``.

    Only this rank makes those calls, and all ranks must count the same calls.
    """
    thread = threading.get_ident()
    PROCESS.builds_on_host.add(thread)
    try:
        return build()
    finally:
        PROCESS.builds_on_host.discard(thread)


def _pickled(shared: object) -> Payload:
    try:
        return Payload([shared])
    except PICKLE_ERRORS as error:
        if is_interruption(error):
            raise
        found = find_unpicklable([shared], ["dataset"])
        raise explain_unpicklable(
            error, found, "the other ranks of this host", _OPEN_LATER
        ) from error


_OPEN_LATER = "Set it to None in build(), and create it when it is first used."


class _Server(BackgroundThread):
    """Admits the other ranks, and answers them when the object is built.

    Runs until all have come or the process ends.

    Args:
        meeting: The meeting that the ranks come to. The server closes it.
        guests: How many other ranks will come at most.
    """

    def __init__(self, meeting: Meeting, guests: int) -> None:
        super().__init__("shmloader_host")
        self._meeting, self._left = meeting, guests
        self._roll = Roll(meeting.hello)
        self._guests: list[socket.socket] = []
        self._answer: Payload | bytes | None = None
        self._shared: object = None  # owns descriptors of the payload
        self._is_finished = False
        self._ours, self._theirs = socket.socketpair()

    def finish(self, answer: Payload | bytes | None, shared: object = None) -> None:
        """Give all ranks the pickled object, or the message of an error; None: they try again."""
        if not self._is_finished:
            self._answer, self._shared, self._is_finished = answer, shared, True
        with Suppressed(OSError):  # the thread has ended
            self._ours.send(b".")
        if self._thread.ident is None:
            self._close()

    def work(self) -> None:
        """Admit ranks as they come, and answer them. Runs on the server's thread."""
        poll = select.poll()
        for each in (self._meeting.socket, self._theirs):
            poll.register(each, select.POLLIN)
        try:
            while self._left and not (self._is_finished and self._answer is None):
                with self.resting():
                    ready = [fd for fd, _ in poll.poll()]
                if self._theirs.fileno() in ready:
                    poll.unregister(self._theirs)
                if self._meeting.socket.fileno() in ready:
                    guest = self._meeting.socket.accept()[0]
                    if self._roll.admit(guest):
                        self._guests.append(guest)
                        PROCESS.meetings.add(guest)
                while self._is_finished and self._answer is not None and self._guests:
                    guest = self._guests.pop()
                    self._send(self._answer, guest)
                    PROCESS.meetings.discard(guest)
        finally:
            self._close()

    def _send(self, answer: Payload | bytes, guest: socket.socket) -> None:
        """Answer a rank. It is not counted if it goes before it has received everything."""
        with guest:
            try:
                if isinstance(answer, bytes):
                    guest.send(answer)
                else:
                    guest.send(_BUILT)
                    answer.send(guest)
                if guest.recv(_ANSWER_BYTES) == _RECEIVED:
                    self._left -= 1
            except OSError as error:
                if is_interruption(error):
                    raise
                _log.warning("could not send the shared object to a rank of this host: %s", error)

    def _close(self) -> None:
        for end in (self._ours, self._theirs):
            end.close()
        for guest in self._guests:
            with Suppressed(OSError):
                guest.send(_AGAIN)
            PROCESS.meetings.discard(guest)
            guest.close()
        self._meeting.close()
        if isinstance(self._answer, Payload):
            self._answer.close()
        self._answer = self._shared = None


# The others ----------------------------------------------------------------------------------


def _receive(meeting: Meeting) -> RemoteError | ReceivedPayload | None:
    """Wait for the object that the host builds, or its error; None if this rank has to try again.

    Raises:
        RuntimeError: If the host has ended.
    """
    _log.info("%s builds an object for the ranks of this host", _describe(meeting.host_pid))
    channel = meeting.socket
    try:
        data = channel.recv(_ANSWER_BYTES)
        if data == _AGAIN:
            return None
        answer: RemoteError | ReceivedPayload
        if data.startswith(_FAILED):
            answer = pickle.loads(data.removeprefix(_FAILED))
        elif data == _BUILT:
            channel.settimeout(_REST_S)
            answer = receive_payload(channel)
        else:
            raise ConnectionResetError("the connection was closed")
    except (ConnectionError, TimeoutError) as error:
        if is_interruption(error):
            raise
        raise RuntimeError(
            f"{_describe(meeting.host_pid)}, the rank that was building the object for this host, "
            "ended before sharing it. Its own output says why; if it was killed, there may have "
            "been too little memory."
        ) from error
    with Suppressed(OSError):  # the host may have ended meanwhile, and is needed no more
        channel.send(_RECEIVED)
    return answer


def _describe(pid: int) -> str:
    return f"process {pid}" if pid else "a process in another container"


def _open(answer: RemoteError | ReceivedPayload, builder: int) -> Any:
    """Return the object that the host has built.

    Raises:
        Exception: What the host raised, or what unpickling the object raises.
    """
    if isinstance(answer, RemoteError):
        raise answer.rebuilt(
            f"The object for all ranks of this host was built by {_describe(builder)}."
        )
    with PROCESS.opening:
        before = PROCESS.received
        try:
            return answer.load()[0]
        finally:
            PROCESS.received = before
