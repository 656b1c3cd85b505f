"""One rank's part in the workers of its host: joins the pool, connects to its owner, leaves it.

The owner is the process that owns the workers (:mod:`shmloader.pools.host_service`). The ranks find
each other as those of ``share_on_host`` do (:mod:`shmloader.host.meeting`). The rank that comes
first starts the owner; after that, all ranks are equal.
"""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.process
import os
import select
import socket
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from shmloader.batch.payload import unimportable_main_hidden
from shmloader.batch.payload_digest import digests_of
from shmloader.host.meeting import Meeting
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.handle import KILL_S
from shmloader.pools.host_messages import Connect, Contents, Left, Welcome, pack, unpack
from shmloader.pools.host_service import ServiceStart, serve_host
from shmloader.pools.main_guard import (
    NO_GUARD_EXIT,
    NO_GUARD_TEXT,
    name_of,
    refuse_during_import,
    sigint_held_back,
)
from shmloader.pools.starting import pickle_for_workers, raise_with_remedy
from shmloader.process_state import PROCESS
from shmloader.threads.uninterruptible import uninterruptible

# How long the owner may take to answer a rank that leaves, and then to end if no rank is left.
_END_S = 10.0


# How long the owner may take to start and to answer before a warning names the peer.
_PATIENCE_MS = 60_000


def describe_dataset(dataset: object) -> str:
    """Describe a dataset by type and length."""
    length = ""
    with contextlib.suppress(TypeError, NotImplementedError):
        length = f" of {len(dataset)} samples"  # type: ignore[arg-type]
    return f"{type(dataset).__qualname__}{length}"


def open_host_pool(
    dataset: object,
    worker_init_fn: Callable[[int], None] | None,
    worker_count: int,
    base_seed: int,
    first_count: int | None = None,
    *,
    rank: int = 0,
    is_alone: bool = False,
) -> "HostPool":
    """Return this process's pool for a dataset: the one in use, or a new one.

    The caller calls :meth:`HostPool.note_kept` once it has stored the pool.

    Args:
        dataset: The dataset. Loaders of one process that have the same object share a pool.
        worker_init_fn: Called in each worker with the worker's number.
        worker_count: The most workers of the host. With an automatic number, the value of the rank
            that begins the pool counts.
        base_seed: Seeds the workers' random generators, if this rank starts the owner.
        first_count: How many workers there are at first; None if their number is fixed.
        rank: Number of this rank.
        is_alone: Whether this host has no other rank.

    Raises:
        ValueError: If another rank has begun the pool with other arguments, or has a dataset with
            other contents.
        RuntimeError: If the owner has ended right after its start, or this process is importing the
            program's main file.
        Exception: What pickling the dataset or starting a process raises.
    """
    key = (id(dataset), id(worker_init_fn), worker_count if first_count is None else "auto")
    pool: HostPool | None = PROCESS.host_pools.get(key)
    if pool is None or not pool.is_alive:
        # A pool whose owner has ended is replaced under the same number, so that this rank meets
        # the other ranks that have lost the pool, and those that have not opened it yet.
        number = PROCESS.pools_on_host if pool is None else pool.number
        digests = () if is_alone else digests_of(dataset, worker_init_fn)
        contents = Contents(rank, os.getpid(), digests)
        described = describe_dataset(dataset)
        start = ServiceStart(worker_count, first_count, base_seed, described, contents)
        pool = HostPool(dataset, worker_init_fn, start, number, is_alone=is_alone)
        PROCESS.host_pools[key] = pool
    return pool


class HostPool:
    """This rank's part in a pool, which lasts while a loader refers to this object.

    Attributes:
        worker_count: The most workers of the host.
        wanted_count: How many workers should be used, as far as is known; None if their number is
            fixed.
        owner_pid: Process id of the owner.
        number: Tells the pools of a run apart, and is the same in all ranks.

    Args:
        dataset, worker_init_fn: See :func:`open_host_pool`.
        start: What the owner gets, if this rank starts it.
        number: The pool's number.
        is_alone: Whether this host has no other rank.
    """

    def __init__(
        self,
        dataset: object,
        worker_init_fn: Callable[[int], None] | None,
        start: ServiceStart,
        number: int,
        *,
        is_alone: bool = False,
    ) -> None:
        self.number = number
        self._is_alone = is_alone
        self._objects = (dataset, worker_init_fn)  # kept alive, since their ids tell pools apart
        while True:
            meeting = Meeting(
                f"workers {number}",
                start.contents.rank,
                patience_ms=_PATIENCE_MS,
                is_alone=is_alone,
            )
            self._name = meeting.name
            process: BaseProcess | None = None
            try:
                if meeting.is_host:
                    start = dataclasses.replace(start, first=meeting.hello)
                    process, connection = _start_owner(meeting, self._objects, start)
                else:
                    connection = meeting.detach()
                welcome = receive_welcome(connection)
            except BaseException:
                meeting.close()
                if process is not None:  # not killed, since other ranks may use it already
                    uninterruptible(_Leaver(connection, process).run)
                raise
            if welcome is not None:
                break
            connection.close()
            if process is not None:
                process.join(KILL_S)
                raise RuntimeError(_describe_failed_start(process))
            # The rank that should have started the owner has failed with an error. This one tries.
        self._connection, self.owner_pid = connection, welcome.pid
        self.worker_count, self.wanted_count = welcome.worker_count, welcome.wanted_count
        in_child = _InChild(connection)
        PROCESS.meetings.add(in_child)
        self._closer = weakref.finalize(self, _close, os.getpid(), in_child, connection, process)
        try:
            _check(welcome, start)
        except BaseException:
            self.close()
            raise

    def note_kept(self) -> None:
        """Note that the caller keeps the pool. The next pool of this process gets the next number.

        If an interruption comes before this call, the pool is dropped. The pool that is opened in
        its place gets the same number, by which this rank meets the others.
        """
        if not self._is_alone:
            PROCESS.pools_on_host = max(PROCESS.pools_on_host, self.number + 1)

    @property
    def is_alive(self) -> bool:
        """Whether the owner runs, as far as is known."""
        if not self._closer.alive:
            return False
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return not poll.poll(0)

    def connect(self) -> socket.socket:
        """Return one more connection to the owner. The caller owns it.

        Raises:
            OSError: If the owner has ended, or no descriptor is left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                theirs.setblocking(True)
                socket.send_fds(self._connection, [pack(Connect())], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """Leave the pool. May be called again."""
        self._closer()


class _InChild:
    """Closes the connection in a forked child, whose copy would keep the owner from ending."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()


def _start_owner(
    meeting: Meeting, objects: tuple[object, ...], start: ServiceStart
) -> tuple[BaseProcess, socket.socket]:
    """Start the owner. Returns its process, and a connection to it."""
    refuse_during_import()
    payload = pickle_for_workers(objects, ("dataset", "worker_init_fn"), "spawn")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("spawn").Process(
        target=serve_host,
        name=name_of("host"),
        args=(meeting.detach(), theirs, payload, start),
    )
    try:
        with sigint_held_back(is_fresh=True), unimportable_main_hidden():
            process.start()
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            raise_with_remedy(error)
        raise
    finally:
        theirs.close()
        payload.close()
        meeting.close()
    # At this process's exit, multiprocessing would wait for the owner, while other ranks use it.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process, ours


def receive_welcome(connection: socket.socket) -> Welcome | None:
    """Wait for the owner's first message; return None if the owner has ended."""
    connection.settimeout(None)
    try:
        data = connection.recv(RECEIVE_BYTES)
    except ConnectionError as error:
        if is_interruption(error):
            raise
        return None
    message = unpack(data) if data else None
    return message if isinstance(message, Welcome) else None


def _describe_failed_start(process: BaseProcess) -> str:
    if process.exitcode == NO_GUARD_EXIT:
        return NO_GUARD_TEXT
    return (
        f"the process that should start the workers of this host (pid {process.pid}) ended with "
        f"exit code {process.exitcode}; its output says why"
    )


def _check(welcome: Welcome, start: ServiceStart) -> None:
    """Check that this rank has the arguments of the rank that began the pool."""
    ours = start.worker_count if start.first_count is None else "auto"
    theirs = welcome.worker_count if welcome.wanted_count is None else "auto"
    if ours != theirs:
        raise ValueError(
            "num_workers should be the same on all ranks of a host with worker_scope='host', but "
            f"got num_workers={ours!r}, and another rank has {theirs!r}"
        )
    mine, other = start.contents, welcome.contents
    if welcome.dataset != start.dataset:
        raise ValueError(
            "ranks that share workers (worker_scope='host') should have the same dataset, and make "
            f"their loaders in the same order, but {mine.name} has {start.dataset}, and "
            f"{other.name} has {welcome.dataset}"
        )
    differing = {name for name, _ in {*mine.digests} ^ {*other.digests}}
    if differing:
        raise ValueError(
            "ranks that share workers (worker_scope='host') should have the same dataset, but "
            f"{', '.join(sorted(differing))} of {mine.name} and {other.name} differ. All ranks "
            "would get samples of one rank's dataset. Build it once with share_on_host(), leave "
            "what depends on the rank out of pickling (__getstate__), or use worker_scope='rank'"
        )


def _close(
    pid: int, in_child: _InChild, connection: socket.socket, process: BaseProcess | None
) -> None:
    """Leave the pool, and reap the owner if this rank has started it and is the last one."""
    PROCESS.meetings.discard(in_child)
    if os.getpid() != pid:
        connection.close()
        return
    uninterruptible(_Leaver(connection, process).run)


class _Leaver:
    """Leaves a pool. ``run`` can be run again after an interruption.

    Args:
        connection: The connection to the owner. It is closed.
        process: The owner's process if this rank has started it; else None. It is reaped if this
            rank is the last one.
    """

    def __init__(self, connection: socket.socket, process: BaseProcess | None) -> None:
        self._connection = connection
        self._process = process

    def run(self) -> None:
        """Leave the pool."""
        with Suppressed(OSError):  # the owner has ended, or does not answer
            self._connection.settimeout(_END_S)
            self._connection.shutdown(socket.SHUT_WR)
            # The answer stays in the socket: after an interruption it is read again.
            while self._process is not None and (
                data := self._connection.recv(RECEIVE_BYTES, socket.MSG_PEEK)
            ):
                message = unpack(data)
                if isinstance(message, Left):
                    if not message.is_last:
                        self._process = None
                    break
                self._connection.recv(RECEIVE_BYTES)
        self._connection.close()
        if self._process is not None:
            self._process.join(_END_S)
