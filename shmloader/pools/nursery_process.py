"""What runs in the nursery (:mod:`shmloader.pools.nursery`): forks workers and reports their ends.

A worker of a host's ranks that has died is forked again when a rank asks for it.
"""

import contextlib
import errno
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from shmloader.batch.payload import receive_payload
from shmloader.host import admit
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.forking import (
    Descriptors,
    ParentDeathPipe,
    exit_code_of_child,
    fork,
    ignore_sigint,
    is_readable,
    name_of,
    run_process,
)
from shmloader.pools.worker import WorkerStart, worker_main

# How long the workers may take to end by themselves when no rank is left.
_GRACE_S = 1.0


class Facts(NamedTuple):
    """What a nursery tells a new client.

    It says whether the nursery has other threads. If ranks share workers, also which rank has
    started the nursery, and what all ranks should have in common, by name.
    """

    has_threads: bool = False
    rank: str = ""
    common: Mapping[str, int] = {}


class Report(NamedTuple):
    """Nursery → client.

    Attributes:
        kind: "ready": everything is imported. "forked": a worker runs; a descriptor of its process
            comes with the message. "ended": a worker has ended. "left": the nursery goes on
            without this client.
        pid: The worker, or the nursery; 0 if no worker could be forked.
        value: :class:`Facts`, the number of the error, or the exit code if that is known.
    """

    kind: str
    pid: int = 0
    value: Any = 0


@dataclass
class HostStart:
    """The values that the nursery of a host's ranks gets when it starts.

    Attributes:
        listener: The socket to which the other ranks connect.
        payload: What the workers get: (dataset, worker_init_fn).
        base_seed: Seeds the workers' random generators.
        facts: What ranks are told.
    """

    listener: socket.socket
    payload: Any
    base_seed: int
    facts: Facts


class _Shared(NamedTuple):
    """A worker that ranks share.

    ``channel`` takes the sockets of ranks to it; it ends when this is closed.
    """

    pid: int
    pidfd: int
    channel: socket.socket


def serve(channel: socket.socket, start: HostStart | None = None) -> None:
    """Fork workers until no client is left. The target of the nursery's process.

    ``channel`` connects it to the process that has started it. ``start`` describes the workers that
    ranks share; None for one process's own workers.
    """
    ignore_sigint()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel may reap the workers
    gc.freeze()
    gc.enable()  # which its name has disabled
    _Server(start, handler).run(channel)


def _has_threads() -> bool:
    """Whether this process has other threads, besides those that a fork ends."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208 - counted only


class _Server:
    """State of the nursery between two events."""

    def __init__(self, start: HostStart | None, child_handler: Any) -> None:
        self._start, self._child_handler = start, child_handler
        self._poll = select.poll()
        self._clients: dict[int, socket.socket] = {}
        # Process ids, and what owns their descriptors, by the numbers of these.
        self._children: dict[int, tuple[int, Descriptors]] = {}
        self._workers: dict[int, _Shared] = {}
        if start is None:
            self._facts = Facts(_has_threads())
        else:
            self._parent_death = ParentDeathPipe()
            self._facts = start.facts
            self._poll.register(start.listener, select.POLLIN)

    def run(self, channel: socket.socket) -> None:
        """Serve until no client is left."""
        self._add(channel)
        while self._clients:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                elif fd in self._clients:
                    self._follow(self._clients[fd])
                elif self._start is not None and fd == self._start.listener.fileno():
                    client = admit(self._start.listener)
                    if client is not None:
                        self._add(client)
        if self._start is not None:
            # Workers that do not end in time are killed as this process ends.
            self._start.listener.close()
            for worker in self._workers.values():
                worker.channel.close()
            deadline = time.monotonic() + _GRACE_S
            for pidfd in self._children:
                is_readable(pidfd, deadline - time.monotonic())

    # Clients -----------------------------------------------------------------------------

    def _add(self, client: socket.socket) -> None:
        client.setblocking(True)
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)
        self._send(client, Report("ready", os.getpid(), self._facts))

    def _send(self, client: socket.socket, report: Report, *descriptors: int) -> None:
        with contextlib.suppress(ConnectionError, BlockingIOError):  # the next receive reports it
            socket.send_fds(client, [pickle.dumps(report)], descriptors, socket.MSG_DONTWAIT)

    def _drop(self, client: socket.socket) -> None:
        fd = client.fileno()
        self._poll.unregister(fd)
        if len(self._clients) > 1:
            self._send(client, Report("left"))
            client.close()
        # Else it stays open, so that the client sees when this process has ended.
        del self._clients[fd]

    def _follow(self, client: socket.socket) -> None:
        """Do what a client asks for."""
        try:
            if self._start is None:
                with contextlib.closing(receive_payload(client)) as payload:
                    pid, pidfd = self._fork(lambda: run_process(payload.load))
                self._send(client, Report("forked", pid), pidfd)
            else:
                self._follow_rank(client)
        except ConnectionError:
            self._drop(client)
        except OSError as error:  # there are too few descriptors or processes
            self._send(client, Report("forked", value=error.errno or errno.EMFILE))

    def _fork(self, run: Callable[[], NoReturn]) -> tuple[int, int]:
        """Fork a worker. Returns its process id, and a descriptor of it."""

        def run_in_child() -> NoReturn:
            signal.signal(signal.SIGCHLD, self._child_handler)
            sockets = [*self._clients.values(), *(one.channel for one in self._workers.values())]
            for one in sockets if self._start is None else [*sockets, self._start.listener]:
                one.close()
            for _, owned in self._children.values():
                owned.close_all()
            run()

        pid, owned = fork(run_in_child)
        (pidfd,) = owned.numbers()
        self._children[pidfd] = pid, owned
        self._poll.register(pidfd, select.POLLIN)
        return pid, pidfd

    def _reap(self, pidfd: int) -> None:
        """Reap a worker that has ended, and report its exit code."""
        pid, owned = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        code = exit_code_of_child(pid)
        owned.close_all()
        for worker_id, worker in list(self._workers.items()):
            if worker.pid == pid:
                self._workers.pop(worker_id).channel.close()
        for client in self._clients.values():
            self._send(client, Report("ended", pid, code))

    # Workers that ranks share ------------------------------------------------------------

    def _follow_rank(self, client: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(client, RECEIVE_BYTES, 1)
        if not data:
            raise ConnectionResetError("the rank has left")
        if not descriptors:  # this process has none left
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with socket.socket(fileno=descriptors[0]) as channel:
            self._attach(client, pickle.loads(data), channel)

    def _attach(self, client: socket.socket, worker_id: int, channel: socket.socket) -> None:
        """Pass a rank's socket to a worker, which is started if it does not run."""
        worker = self._workers.get(worker_id)
        if worker is not None and is_readable(worker.pidfd):
            self._reap(worker.pidfd)
            worker = None
        if worker is None:
            worker = self._workers[worker_id] = self._start_worker(worker_id)
        with contextlib.suppress(ConnectionError):  # it has just died, which the rank will see
            socket.send_fds(worker.channel, [b"rank"], [channel.fileno()])
        self._send(client, Report("forked", worker.pid), worker.pidfd)

    def _start_worker(self, worker_id: int) -> _Shared:
        start = self._start
        assert start is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        count, seed = start.facts.common["num_workers"], start.base_seed
        worker_start = WorkerStart(worker_id, count, seed, self._parent_death)
        arguments = start.payload, theirs, worker_start
        process = multiprocessing.get_context("fork").Process(
            target=worker_main, name=name_of(worker_id), args=arguments, daemon=True
        )

        def run() -> NoReturn:
            ours.close()
            run_process(lambda: process)

        with theirs:
            try:
                return _Shared(*self._fork(run), ours)
            except OSError:
                ours.close()
                raise
