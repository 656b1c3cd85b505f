"""Workers that all ranks of a host share, as one rank sees them.

::

    rank 0 ─┐ HostPool: one connection, held while a loader uses the pool   ┌─ owner (host_service)
    rank 1 ─┤ HostWorkers: one more for each iterator ──────────────────────┤   starts and reaps
    …       │                                                               └──┬──────┬──────
            └── one socket pair for each iterator and worker ── batches ────▶ worker 0, worker 1, …

The ranks find each other as those of ``share_on_host`` do (:mod:`shmloader.host.meeting`). The rank
that comes first starts the owner, and has no other part in it than the others.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import os
import select
import socket
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess

from shmloader.batch.payload import Payload, unimportable_main_hidden
from shmloader.errors import ClosedLoaderError
from shmloader.host.meeting import Meeting, connect
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.answers import Death
from shmloader.pools.handle import KILL_S, WorkerChannel
from shmloader.pools.host_loads import Loads
from shmloader.pools.host_messages import (
    Attach,
    Attached,
    Detach,
    Kill,
    Left,
    Lost,
    Wanted,
    Welcome,
    pack,
    unpack,
)
from shmloader.pools.host_service import ServiceStart, serve_host
from shmloader.pools.main_guard import (
    NO_GUARD_EXIT,
    NO_GUARD_TEXT,
    name_of,
    refuse_during_import,
)
from shmloader.pools.starting import pickle_for_workers, raise_with_remedy, sigint_held_back
from shmloader.pools.status_page import StatusPage
from shmloader.pools.task_server import DESCRIPTOR_BYTES, TaskConfig
from shmloader.pools.worker_channels import WorkerChannels
from shmloader.process_state import PROCESS
from shmloader.threads.uninterruptible import uninterruptible

# How long the owner may take to end, once it has said that no rank is left.
_END_S = 10.0


def describe_dataset(dataset: object) -> str:
    """Say what a dataset looks like, to notice that ranks have different ones."""
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
) -> "HostPool":
    """Return the pool of this host for a dataset: the one in use, or one that is begun here.

    Args:
        dataset: The dataset. Loaders of one process that have the same object share a pool.
        worker_init_fn: Called in each worker with its number.
        worker_count: The most workers of the host. If their number changes, that is for the rank
            to say that begins the pool.
        base_seed: Seeds the workers' random generators, if this rank starts them.
        first_count: How many there are at first, if their number changes; None if it is fixed.

    Raises:
        ValueError: If another rank has begun the pool with other arguments.
        RuntimeError: If the process that owns the workers has ended at once.
        Exception: What pickling the dataset raises, or starting a process.
    """
    key = (id(dataset), id(worker_init_fn), worker_count if first_count is None else "auto")
    pool: HostPool | None = PROCESS.host_pools.get(key)
    if pool is None or not pool.is_alive:
        # In place of one whose owner has ended, it gets the same number: the rank meets those who
        # have lost it as well, and those who had not opened it yet.
        number = PROCESS.pools_on_host if pool is None else pool.number
        start = ServiceStart(worker_count, first_count, base_seed, describe_dataset(dataset))
        pool = HostPool(dataset, worker_init_fn, start, number)
        # Only now is the number used: after an interruption the rank still meets the others.
        PROCESS.pools_on_host = max(PROCESS.pools_on_host, number + 1)
        PROCESS.host_pools[key] = pool
    return pool


class HostPool:
    """This rank's part in a pool, which lasts while a loader refers to this object.

    Attributes:
        worker_count: The most workers of the host.
        wanted_count: How many should be used, as far as is known; None if all of them always.
        owner_pid: Process id of the process that owns the workers.
        number: Tells the pools of a run apart, and is the same in all ranks.

    Args:
        dataset, worker_init_fn: See :func:`open_host_pool`.
        start: What the owner gets, if this rank starts it.
        number: The pool's number.
    """

    def __init__(
        self,
        dataset: object,
        worker_init_fn: Callable[[int], None] | None,
        start: ServiceStart,
        number: int,
    ) -> None:
        self.number = number
        self._objects = (dataset, worker_init_fn)  # kept, since their ids tell pools apart
        while True:
            meeting = Meeting(f"workers {number}")
            self._name = meeting.name
            process: BaseProcess | None = None
            try:
                if meeting.is_host:
                    process, connection = _start_owner(meeting, self._objects, start)
                else:
                    connection = meeting.detach()
                welcome, _ = _receive_welcome(connection)
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
            # The rank that was to start it could not, and has raised an error. This one tries.
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
        return connect(self._name)

    def close(self) -> None:
        """Leave the pool. May be called again."""
        self._closer()


class _InChild:
    """Closes a connection in a forked child, which must not keep the owner from ending."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def close(self) -> None:
        self._connection.close()


def _start_owner(
    meeting: Meeting, objects: tuple[object, ...], start: ServiceStart
) -> tuple[BaseProcess, socket.socket]:
    """Start the process that owns the workers. Returns it, and a connection to it."""
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
    # At this process's exit, multiprocessing would wait for it, while other ranks use it.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process, ours


def _receive_welcome(connection: socket.socket) -> tuple[Welcome | None, Loads | None]:
    """Wait for the owner's first message, and what comes with it; None if it has ended."""
    connection.settimeout(None)
    try:
        data, ancillary, _, _ = connection.recvmsg(RECEIVE_BYTES, DESCRIPTOR_BYTES)
    except ConnectionError as error:
        if is_interruption(error):
            raise
        data, ancillary = b"", []
    message = unpack(data) if data else None
    if not isinstance(message, Welcome):
        return None, None
    if not ancillary:  # the kernel let no further descriptor pass
        return message, None
    (fd,) = struct.unpack("i", ancillary[0][2][:4])
    loads = Loads(message.worker_count, fd)
    loads.close_descriptor()
    return message, loads


def _describe_failed_start(process: BaseProcess) -> str:
    if process.exitcode == NO_GUARD_EXIT:
        return NO_GUARD_TEXT
    return (
        f"the process that was to own the workers of this host (pid {process.pid}) ended with exit "
        f"code {process.exitcode}; its own output says why"
    )


def _check(welcome: Welcome, start: ServiceStart) -> None:
    """Check that this rank wants what the rank wanted that began the pool."""
    ours = start.worker_count if start.first_count is None else "auto"
    theirs = welcome.worker_count if welcome.wanted_count is None else "auto"
    if ours != theirs:
        raise ValueError(
            "num_workers should be the same on all ranks of a host with worker_scope='host', but "
            f"got num_workers={ours!r}, and another rank has {theirs!r}"
        )
    if welcome.dataset != start.dataset:
        raise ValueError(
            "ranks that share workers (worker_scope='host') should have the same dataset, and make "
            f"their loaders in the same order, but got a {start.dataset}, and another rank has a "
            f"{welcome.dataset}"
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
        connection: The connection to the owner, which is closed.
        process: The owner, if this rank has started it; it is reaped if this rank is the last one.
    """

    def __init__(self, connection: socket.socket, process: BaseProcess | None) -> None:
        self._connection = connection
        self._process = process

    def run(self) -> None:
        """Leave."""
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


class HostWorkers(WorkerChannels[WorkerChannel]):
    """The workers of a host, as one iterator of one rank uses them.

    Args:
        pool: The pool of the host.
        functions: (collate_fn, on_error).
        tasks: How tasks are served.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If the functions cannot be pickled.
        OSError: If there are no descriptors left, or the owner has ended.
    """

    def __init__(self, pool: HostPool, functions: tuple[object, object], tasks: TaskConfig) -> None:
        self._pool: HostPool | None = pool
        self._page = StatusPage(pool.worker_count)
        self._control: socket.socket | None = None
        self._payloads: list[Payload] = []
        self._owner_pid = pool.owner_pid
        self._pids = [0] * pool.worker_count
        # How often this rank has attached to each worker.
        self._attachments = [0] * pool.worker_count
        self._deaths: dict[int, Death] = {}
        self._because = ""
        self._loads: Loads | None = None
        self._row = -1
        super().__init__()
        try:
            self._control = pool.connect()
            welcome, self._loads = _receive_welcome(self._control)
            if welcome is None:
                raise ConnectionResetError(self._describe_lost_owner())
            self._row = welcome.row
            self._payloads.append(Payload((tasks, self._page, self._row)))
            names = ("collate_fn", "on_error")
            self._payloads.append(pickle_for_workers(functions, names, "spawn"))
            self._poll.register(self._control, select.POLLIN)
            count = pool.worker_count if pool.wanted_count is None else pool.wanted_count
            for worker_id in range(count):
                self._workers.append(self._attach(worker_id))
                self._introduce(worker_id)
        except BaseException:
            self.close()
            raise
        self._open_readings()

    @property
    def _status_page(self) -> StatusPage:
        return self._page

    def _attach(self, worker_id: int) -> WorkerChannel:
        """Have the owner give a worker one end of a new socket pair."""
        assert self._control is not None
        self._pids[worker_id] = 0
        self._attachments[worker_id] += 1
        message = pack(Attach(worker_id, self._attachments[worker_id]))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                theirs.setblocking(True)
                socket.send_fds(self._control, [message], [theirs.fileno()])
            ours.setblocking(False)
            self._by_fd[ours.fileno()] = worker_id
            self._poll.register(ours, select.POLLIN)
        except BaseException:
            ours.close()
            raise
        return WorkerChannel(ours)

    def _introduce(self, worker_id: int) -> None:
        """Send a worker how to serve this rank's tasks."""
        for payload in self._payloads:
            for data, descriptors in payload.messages():
                self.send(worker_id, data, *descriptors)

    # What the owner says -----------------------------------------------------------------

    def _take_notice(self, fd: int) -> Iterator[tuple[int, bytes | None]]:
        """Follow the owner's messages."""
        assert self._control is not None
        assert fd == self._control.fileno()
        while True:
            try:
                data = self._control.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if is_interruption(error):
                    raise
                data = b""
            if not data:
                yield from self._lose_owner()
                return
            message = unpack(data)
            if isinstance(message, Attached):
                self._pids[message.worker_id] = message.pid
            elif isinstance(message, Wanted):
                self.wanted_count = message.worker_count
                if self._pool is not None:  # a later iterator begins with as many
                    self._pool.wanted_count = message.worker_count
            elif isinstance(message, Lost):
                worker_id, attachment, pid, exit_code, kills, was_loading = message
                if attachment != self._attachments[worker_id]:
                    continue  # this rank has detached from it, and attached to its successor
                is_ours = self.was_at(worker_id).is_loading
                death = Death(pid, exit_code, kills, was_elsewhere=was_loading and not is_ours)
                yield from self._lose(worker_id, death)

    def _lose_owner(self) -> Iterable[tuple[int, bytes | None]]:
        """Note that the owner has ended, and all workers with it."""
        assert self._control is not None
        self._poll.unregister(self._control)
        self._because = self._describe_lost_owner()
        if self._pool is not None:
            self._pool.close()
        for worker_id in range(len(self._workers)):
            death = Death(self.pid(worker_id), None, because=self._because)
            yield from self._lose(worker_id, death)

    def _lose(self, worker_id: int, death: Death) -> Iterator[tuple[int, bytes | None]]:
        """Yield a dead worker's last messages, and that it is lost."""
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        while (data := worker.receive()) is not None:
            yield worker_id, data
        worker.is_lost = True
        worker.outbox.clear()
        self._forget_tasks(worker_id)
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(worker.channel)
        self._deaths[worker_id] = death
        yield worker_id, None

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker; 0 if it is not known yet."""
        return self._pids[worker_id]

    def death(self, worker_id: int) -> Death:
        """Return how a lost worker ended."""
        return self._deaths[worker_id]

    def note_task(self, worker_id: int, epoch: int, seq: int) -> None:
        """Note a ticket that is sent to a worker, for the workers and the other ranks."""
        self._page.note_newest(epoch, seq)
        loads = self._loads  # another thread may close this meanwhile
        if loads is not None:
            loads.note_sent(self._row, worker_id)

    def loads_of_others(self) -> list[int] | None:
        """Return how many tasks each worker has from other ranks; None if that cannot be seen."""
        loads = self._loads
        return None if loads is None else loads.of_others(self._row)

    def _forget_tasks(self, worker_id: int) -> None:
        """Note that this rank awaits nothing of a worker any more."""
        loads = self._loads
        if loads is not None:
            loads.forget(self._row, worker_id)

    # Workers -----------------------------------------------------------------------------

    def kill(self, worker_id: int) -> None:
        """Have the owner kill a worker."""
        if self._control is not None and not self._workers[worker_id].is_lost:
            with Suppressed(OSError):  # the owner has ended, which the next wait reports
                self._control.send(pack(Kill(worker_id)))

    def replace(self, worker_id: int) -> None:
        """Have the owner start a worker in place of one that was lost, unless it has already."""
        try:
            self.start(worker_id)
        except ConnectionError as error:
            if is_interruption(error):
                raise
            raise RuntimeError(self._because or self._describe_lost_owner()) from error

    def start(self, worker_id: int) -> None:
        """Attach to a worker, which the owner starts unless it runs.

        Raises:
            OSError: If there are no descriptors left, or the owner has ended.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        if self._is_closed:
            raise ClosedLoaderError("the workers have been ended")
        if self._because:
            raise ConnectionResetError(self._because)
        if worker_id == len(self._workers):
            self._workers.append(self._attach(worker_id))
        else:
            old = self._workers[worker_id]
            self._by_fd.pop(old.channel.fileno(), None)
            old.channel.close()
            self._page.clear(worker_id)
            self._workers[worker_id] = self._attach(worker_id)
        self._introduce(worker_id)

    def retire(self, worker_id: int) -> None:
        """Detach from an idle worker, which the owner ends when no other rank uses it."""
        worker = self._workers[worker_id]
        if worker.is_lost or self._is_closed:
            return
        worker.is_lost = True
        worker.outbox.clear()
        self._forget_tasks(worker_id)
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(worker.channel)
        self._by_fd.pop(worker.channel.fileno(), None)
        worker.hang_up()
        self.report(Detach(worker_id))

    def report(self, message: tuple[object, ...]) -> bool:
        """Send the owner a message, without blocking. Called from any thread.

        Returns:
            Whether it was sent. It is not if the owner has ended, or has many to read.
        """
        control = self._control
        with Suppressed(OSError):
            if control is not None:
                control.send(pack(message), socket.MSG_DONTWAIT)
                return True
        return False

    def _describe_lost_owner(self) -> str:
        return (
            f"The process {self._owner_pid}, which owns the workers of this host "
            "(worker_scope='host'), has ended, and all workers with it. "
            "The next epoch starts new ones."
        )

    # End ---------------------------------------------------------------------------------

    def _end_all(self) -> None:
        self._is_closed = True
        self._at_exit.cancel()
        self._hang_up()
        self.readings.close()
        self._waker = self._pool = None

    def _hang_up(self) -> None:
        for worker in self._workers:
            worker.hang_up()
        if self._control is not None:
            if os.getpid() == self._pid:
                with Suppressed(OSError):  # also where a forked child has a copy of it
                    self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
        for payload in self._payloads:
            payload.close()
        self._loads = None
        self._page.close()

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child, which must not keep the owner from ending."""
        super().leave_to_parent()
        for worker in self._workers:
            worker.channel.close()
        if self._control is not None:
            self._control.close()

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        for worker in self._workers:
            worker.channel.close()
        self._workers.clear()
        self._hang_up()
        self._waker = None
