"""The process that owns the workers which the ranks of a host share: the owner.

One of the ranks starts it (``host_pool``), as a fresh interpreter that has no device open. It
imports the program's main file once and forks the workers, so that they share the imported modules.
It loads neither the dataset nor a batch. It answers the ranks' few messages, starts workers, reaps
workers that die, and reports these deaths to the ranks.

With ``num_workers="auto"`` it decides how many workers there are, by the times that the ranks
report (:mod:`shmloader.pools.adapting`), and tells the ranks. Each rank attaches to the workers
that are wanted. A worker that is not wanted ends when the last rank has detached from it.

It ends, with its workers, when no rank is connected any more, however the ranks ended. So nothing
is left of a run whose ranks were killed. A rank that leaves before the others does not disturb
them, even if it is the rank that started this process.
"""

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmloader.batch.payload import ReceivedPayload
from shmloader.host.meeting import Hello, Roll, admit, peer_of
from shmloader.interruptions import Suppressed, is_interruption
from shmloader.memory.limits import OomKills
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.adapting import Adapter
from shmloader.pools.handle import KILL_S, WorkerHandle, end_all
from shmloader.pools.host_child import HostWorkerStart, host_worker_main
from shmloader.pools.host_messages import (
    Attach,
    Attached,
    Connect,
    Contents,
    Demand,
    Detach,
    EpochBegun,
    Kill,
    Left,
    Lost,
    Wanted,
    Welcome,
    describe_owner,
    pack,
    unpack,
)
from shmloader.pools.main_guard import name_of
from shmloader.pools.parent_death import ParentDeathPipe
from shmloader.pools.status_page import Phase, StatusPage

# How long the workers may take to end by themselves when no rank is left.
_GRACE_S = 1.0

# How long a rank that connects may take to say who it is.
_HELLO_S = 1.0

# Sent to a worker with the descriptor of a rank's channel.
_NEW_RANK = b"rank"


@dataclass(frozen=True, slots=True)
class ServiceStart:
    """The values that the process gets when it starts.

    Attributes:
        worker_count: The most workers there may be.
        first_count: How many workers there should be at first; None if their number is fixed.
        base_seed: Seeds the workers' random generators.
        dataset: Describes the dataset by class and length.
        contents: What the workers get, so that a rank with another dataset notices the difference.
        first: The rank that starts the process; it sets this.
    """

    worker_count: int
    first_count: int | None
    base_seed: int
    dataset: str
    contents: Contents = field(default_factory=Contents)
    first: Hello | None = None


def serve_host(
    listener: socket.socket, first: socket.socket, payload: ReceivedPayload, start: ServiceStart
) -> None:
    """Serve the ranks of this host until none is left. The target of the process.

    Args:
        listener: The socket to which the other ranks connect.
        first: The connection to the rank that started this process.
        payload: What the workers get: (dataset, worker_init_fn).
        start: What the process gets.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # each rank handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    gc.freeze()
    _HostService(listener, payload, start).run(first)


@dataclass(eq=False)
class _Rank:
    """A connection to a rank.

    Attributes:
        connection: The socket to the rank.
        pid: The rank's process id; 0 if it is in a PID namespace that is not visible here.
        attached: The workers to which the rank is attached: ``Attach.attachment`` by worker number.
    """

    connection: socket.socket
    pid: int
    attached: dict[int, int] = field(default_factory=dict)

    def tell(self, message: tuple[object, ...]) -> None:
        """Send a message. If it cannot be sent, the rank is gone, which its socket will show."""
        with Suppressed(OSError):
            self.connection.send(pack(message), socket.MSG_DONTWAIT)


class _HostService:
    def __init__(
        self, listener: socket.socket, payload: ReceivedPayload, start: ServiceStart
    ) -> None:
        self._listener = listener
        self._payload = payload
        self._start = start
        self._context: Any = multiprocessing.get_context("fork")
        self._parent_death = ParentDeathPipe()
        self._status_page = StatusPage(start.worker_count)
        self._oom_kills = OomKills(Path("/"))
        assert start.first is not None
        self._roll = Roll(start.first)
        self._ranks: dict[int, _Rank] = {}
        self._workers: dict[int, WorkerHandle] = {}
        # Worker numbers by pidfd, which is readable when the worker has ended.
        self._by_pidfd: dict[int, int] = {}
        self._poll = select.poll()
        self._cores = os.sched_getaffinity(0)
        self._adapter: Adapter | None = None
        if start.first_count is not None:
            self._adapter = Adapter(start.first_count, start.worker_count)

    def run(self, first: socket.socket) -> None:
        """Serve until no rank is left."""
        self._listener.setblocking(False)
        self._listener.listen(socket.SOMAXCONN)  # from now on, ranks see this process as their peer
        self._poll.register(self._listener, select.POLLIN)
        self._add(first)
        try:
            while self._ranks:
                for fd, _ in self._poll.poll():
                    if fd in self._by_pidfd:
                        # The descriptor may be that of another worker by now.
                        if self._workers[self._by_pidfd[fd]].has_ended:
                            self._reap(self._by_pidfd[fd])
                    elif fd in self._ranks:
                        self._take(self._ranks[fd])
                    elif fd == self._listener.fileno():
                        self._accept()
        finally:
            self._listener.close()
            for worker in self._workers.values():
                worker.hang_up()
            end_all([*self._workers.values()], _GRACE_S)

    # Ranks -------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            if admit(connection, self._roll, _HELLO_S):
                self._add(connection)

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        rank = self._ranks[connection.fileno()] = _Rank(connection, peer_of(connection)[0])
        self._use_cores_of(rank.pid)
        self._poll.register(connection, select.POLLIN)
        wanted = None if self._adapter is None else self._adapter.count
        start = self._start
        rank.tell(Welcome(os.getpid(), start.worker_count, wanted, start.dataset, start.contents))

    def _use_cores_of(self, pid: int) -> None:
        """Let the workers also run on the cores of a rank.

        Launchers bind each rank to different cores (Slurm's ``--cpu-bind``), and this process has
        inherited those of the rank that started it.
        """
        with Suppressed(OSError):  # the rank has ended, or its cores may not be read
            more = os.sched_getaffinity(pid) - self._cores if pid else set()
            if more:
                self._cores |= more
                for worker in self._workers.values():
                    _bind(worker.process.pid or 0, self._cores)
                _bind(os.getpid(), self._cores)

    def _take(self, rank: _Rank) -> None:
        """Handle a rank's message, or the end of its connection."""
        try:
            data, descriptors, _, _ = socket.recv_fds(rank.connection, RECEIVE_BYTES, 1)
        except BlockingIOError:
            return
        except OSError as error:  # the rank has ended
            if is_interruption(error):
                raise
            data, descriptors = b"", []
        if not data:
            self._drop(rank)
            return
        message = unpack(data)
        if isinstance(message, Attach):
            # If no descriptor came, this process has none left. The kernel has then closed the
            # rank's channel, which the rank sees.
            for fd in descriptors:
                with socket.socket(fileno=fd) as channel:
                    self._attach(rank, message, channel)
        elif isinstance(message, Connect):
            for fd in descriptors:
                self._add(socket.socket(fileno=fd))
        elif isinstance(message, Detach):
            self._detach(rank, {message.worker_id})
        elif isinstance(message, Kill) and message.worker_id in rank.attached:
            self._workers[message.worker_id].process.kill()
        elif self._adapter is not None and isinstance(message, EpochBegun | Demand):
            self._adapt(self._adapter, rank, message)

    def _drop(self, rank: _Rank) -> None:
        fd = rank.connection.fileno()
        self._poll.unregister(fd)
        del self._ranks[fd]
        # The same process is about to close its other connections as well. All processes of PID
        # namespaces that are not visible here have the process id 0.
        others = [one for one in self._ranks.values() if one.pid != rank.pid or not one.pid]
        rank.tell(Left(is_last=not others))
        rank.connection.close()
        self._detach(rank, set(rank.attached))

    def _attach(self, rank: _Rank, message: Attach, channel: socket.socket) -> None:
        """Give a rank's channel to a worker, which is started if it does not run."""
        worker_id, attachment = message
        worker = self._workers.get(worker_id)
        if worker is not None and worker.is_lost:  # it was no longer wanted, and is about to end
            worker.process.kill()
            self._reap(worker_id)
            worker = None
        if worker is None:
            try:
                worker = self._start_worker(worker_id)
            except OSError as error:
                if is_interruption(error):
                    raise
                owner = describe_owner(os.getpid())
                because = f"{owner} could not start worker {worker_id}: {error}."
                rank.tell(Lost(worker_id, attachment, 0, None, 0, False, because))
                return
        with Suppressed(OSError):  # it has just died, which the rank will be told
            socket.send_fds(worker.channel, [_NEW_RANK], [channel.fileno()])
        if self._adapter is not None and not rank.attached:
            rank.tell(Wanted(self._adapter.count))
        rank.attached[worker_id] = attachment
        rank.tell(Attached(worker_id, worker.process.pid or 0))

    # How many workers there are ----------------------------------------------------------

    def _adapt(self, adapter: Adapter, rank: _Rank, message: EpochBegun | Demand) -> None:
        """Take account of a rank's report, and tell all ranks if the wanted number has changed."""
        before = adapter.count
        if isinstance(message, EpochBegun):
            adapter.begin()
            return
        adapter.note(
            time.monotonic_ns(),
            message.wait_ns,
            message.busy_ns,
            batches=message.batches,
            consumer=rank.connection.fileno(),
        )
        if adapter.count != before:
            for other in self._ranks.values():
                if other.attached:  # connections without workers do not read the message
                    other.tell(Wanted(adapter.count))

    def _detach(self, rank: _Rank, worker_ids: set[int]) -> None:
        """Detach a rank from workers. End those that are not wanted and that no rank uses."""
        for worker_id in worker_ids:
            rank.attached.pop(worker_id, None)
        if self._adapter is None:
            return
        used = set[int]().union(*(other.attached for other in self._ranks.values()))
        for worker_id in worker_ids - used:
            if worker_id >= self._adapter.count and worker_id in self._workers:
                self._workers[worker_id].is_lost = True
                self._workers[worker_id].hang_up()

    # Workers -----------------------------------------------------------------------------

    def _start_worker(self, worker_id: int) -> WorkerHandle:
        """Fork a worker.

        Raises:
            OSError: If there are no descriptors or processes left.
        """
        self._status_page.clear(worker_id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = HostWorkerStart(
            worker_id,
            self._start.worker_count,
            self._start.base_seed,
            self._parent_death,
            self._status_page,
        )
        process = self._context.Process(
            target=host_worker_main,
            name=name_of(worker_id),
            args=(self._payload, theirs, start, self._close_in_worker),
            daemon=True,
        )
        try:
            with theirs:
                process.start()
            worker = WorkerHandle(process, ours)
        except BaseException:
            ours.close()
            raise
        self._workers[worker_id] = worker
        self._by_pidfd[worker.pidfd] = worker_id
        self._poll.register(worker.pidfd, select.POLLIN)
        return worker

    def _close_in_worker(self) -> None:
        """Close, in a forked worker, what belongs to this process."""
        self._listener.close()
        for rank in self._ranks.values():
            rank.connection.close()
        for worker in self._workers.values():
            worker.channel.close()
            os.close(worker.pidfd)

    def _reap(self, worker_id: int) -> None:
        """Reap a dead worker, and tell the ranks that are attached to it."""
        worker = self._workers.pop(worker_id)
        del self._by_pidfd[worker.pidfd]
        self._poll.unregister(worker.pidfd)
        worker.reap(time.monotonic() + KILL_S)
        worker.hang_up()
        worker.close_pidfd()
        code = worker.process.exitcode
        kills = self._oom_kills.since(code)
        was_loading = self._status_page.read(worker_id).phase is Phase.LOADING
        for rank in self._ranks.values():
            attachment = rank.attached.pop(worker_id, None)
            if attachment is not None:
                pid = worker.process.pid or 0
                rank.tell(Lost(worker_id, attachment, pid, code, kills, was_loading))


def _bind(pid: int, cores: set[int]) -> None:
    """Let all threads of a process run on the given cores."""
    with Suppressed(OSError):  # the process has ended
        os.sched_setaffinity(pid, cores)
    with Suppressed(OSError):  # /proc is not there
        for task in Path(f"/proc/{pid}/task").iterdir():
            with Suppressed(OSError):  # the thread has ended
                os.sched_setaffinity(int(task.name), cores)
