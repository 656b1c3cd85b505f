"""The nursery: a process that imports the program and torch once, and then forks workers.

Under "spawn" and "forkserver" each worker would import torch by itself, which takes seconds of a
core's time and 150 MB of memory. Here one fresh interpreter does it, with the environment,
directory, ``sys.path``, ``sys.argv`` and main module that "spawn" gives a process. Workers load
their own datasets::

    main process, or a rank                       nursery
    ───────────────────────                       ───────
    starts it, or meets it ─────────────────────▶ imports the program's main module, and torch
    pickles the dataset                           ready ─────────────────────────────────┐
    waits for it ◀───────────────────────────────────────────────────────────────────────┘
    a pickled process, or the socket of a rank ─▶ forks the worker, unless it runs for other ranks
    its pid, with a descriptor of it ◀─────────── and reaps it
    its exit code ◀──────────────────────────────

**For one process.** Loaders share the nursery of this process, as long as what it has taken over is
as it was. It ends with the last loader that uses it, or with the main process. If it dies, its
workers go on, and their exit codes are not known.

**For the ranks of a host** (:mod:`shmloader.pools.host_pool`). The rank that comes first starts it,
and the others connect to it. It passes their sockets to the workers. It ends, with its workers,
when no rank is connected any more, however the ranks ended.

**Threads.** A process with several threads must not fork: another thread may hold a lock. If the
program has started threads when it has been imported, "spawn" starts each worker afresh. (A fork
ends the threads of OpenBLAS, which expects forks, so they are counted after a first one.)
"""

import array
import contextlib
import errno
import gc
import multiprocessing
import multiprocessing.process
import operator
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from shmloader.batch.payload import Payload, unimportable_main_hidden
from shmloader.errors import WorkerDiedError
from shmloader.interruptions import SIGNAL_S, Suppressed, uninterruptible
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.forking import Descriptors, is_readable, name_of, sigint_blocked
from shmloader.pools.nursery_process import Facts, HostStart, Report, serve
from shmloader.process_state import PROCESS

# How long the nursery may take to report the exit code of a worker that has ended, and how long it
# may take to end.
_REPORT_S = 5.0
_END_S = 10.0


def _surroundings() -> tuple[object, ...]:
    """Return what a fresh interpreter takes over from this process."""
    folder = ""
    with contextlib.suppress(FileNotFoundError):
        folder = os.getcwd()  # noqa: PTH109 - compared only
    return dict(os.environ), folder, [*sys.path], [*sys.argv], spawn.get_executable()


def nursery_of_process() -> "Nursery":
    """Return the nursery of this process. It is started unless one runs that will do."""
    wanted = _surroundings()
    nursery: Nursery | None = PROCESS.nursery()
    if nursery is None or not nursery.is_alive or nursery.surroundings != wanted:
        nursery = start_nursery(None)
        nursery.surroundings = wanted
        PROCESS.nursery = weakref.ref(nursery)
    return nursery


class _NoCollectionMeanwhile(str):
    """A process's name that disables the garbage collector of the process as it is unpickled.

    A fresh interpreter unpickles its name before it imports anything. The collector would look
    again and again through the objects that imports make, nearly all of which stay: that takes a
    sixth of the time of importing torch.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(-1), ((_CollectorDisabled(), str(self)),)


class _CollectorDisabled:
    def __reduce__(self) -> tuple[Any, ...]:
        return gc.disable, ()


def start_nursery(start: HostStart | None) -> "Nursery":
    """Start a nursery: that of ranks as ``start`` says, else this process's own.

    Raises:
        OSError: If there are no descriptors or processes left.
        RuntimeError: If this process is importing the program's main file: there is no main guard.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("spawn").Process(
        target=serve, name=_NoCollectionMeanwhile(name_of("nursery")), args=(theirs, start)
    )
    nursery = Nursery(ours, process, is_own=start is None)
    with theirs, sigint_blocked(is_fresh=True), unimportable_main_hidden():
        process.start()
    # At this process's exit, multiprocessing would wait for it.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    # Nothing more comes through its two pipes.
    process._popen.close()  # type: ignore[attr-defined]
    return nursery


class Nursery:
    """A connection to a nursery. Several threads may use it.

    Attributes:
        surroundings: What the nursery has taken over from this process.
        close: Leaves the nursery. May be called again.
        pid: Process id of the nursery; 0 before :meth:`await_facts`.

    Args:
        channel: The connection.
        process: The nursery's process, if this process starts it.
        is_own: Whether it is killed when it is left, since no other process uses it.
    """

    surroundings: tuple[object, ...] = ()
    pid = 0

    _facts: Facts | None = None
    _forked: tuple[Report, Descriptors] | None = None

    def __init__(
        self, channel: socket.socket, process: Any = None, *, is_own: bool = False
    ) -> None:
        self._lock = threading.Lock()
        self._channel, self._process = channel, process
        self._codes: dict[int, int | None] = {}
        channel.setblocking(True)  # whatever socket.setdefaulttimeout() says
        self.close = weakref.finalize(self, _close, os.getpid(), channel, process, is_own)
        PROCESS.meetings.add(channel)

    @property
    def is_alive(self) -> bool:
        """Whether the nursery runs, and is this process's."""
        fd = self._channel.fileno()
        return fd >= 0 and not is_readable(fd, events=0)

    def await_facts(self) -> Facts:
        """Wait until everything is imported. Returns what the nursery says of itself.

        Raises:
            WorkerDiedError: If the nursery has ended, since the program cannot be imported.
            ConnectionError: The same, if another rank has started it.
        """
        with self._lock:
            try:
                while self._facts is None:
                    self._receive(SIGNAL_S)
            except ConnectionError as error:
                self._raise_end(error)
            return self._facts

    def _raise_end(self, error: ConnectionError) -> NoReturn:
        """Raise an error that says how the nursery has ended."""
        if self._process is None:
            raise error
        code = _await_end(self._process)
        text = f"exited unexpectedly with exit code {code}"
        if code is not None and code < 0:
            text = f"is killed by signal: {signal.strsignal(-code)}"
        raise WorkerDiedError(
            f"DataLoader worker (pid {self._process.pid}) {text}. It imports the program and forks "
            "the workers, and its output says why."
        ) from None

    def fork(self, process: BaseProcess) -> tuple[int, Descriptors]:
        """Have a process of multiprocessing's forked. Returns its pid, and a descriptor of it.

        Raises:
            OSError: If there are no descriptors or processes left.
            WorkerDiedError: If the nursery has ended.
        """
        with contextlib.closing(Payload(process)) as payload:
            return self._ask_for_worker(payload.send)

    def attach(self, worker_id: int, descriptor: int) -> tuple[int, Descriptors]:
        """Send a worker of the ranks' a socket. Returns and raises as :meth:`fork`."""
        data = pickle.dumps(worker_id)
        return self._ask_for_worker(lambda channel: socket.send_fds(channel, [data], [descriptor]))

    def _ask_for_worker(self, send: Callable[[socket.socket], object]) -> tuple[int, Descriptors]:
        try:
            with self._lock:
                if self._channel.fileno() < 0:
                    raise ConnectionResetError("the nursery has ended")
                send(self._channel)
                while self._forked is None:
                    self._receive(SIGNAL_S)
                (_, pid, number), found = self._forked
                self._forked = None
        except BaseException as error:
            self.close()  # an answer that comes later would be taken for another one's
            self._forked = None
            if isinstance(error, ConnectionError):
                self._raise_end(error)
            raise
        if not found.numbers():
            number = number or errno.EMFILE
            raise OSError(number, os.strerror(number))
        return pid, found

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended; None if it is not reported in time."""
        deadline = time.monotonic() + _REPORT_S
        with self._lock:
            with contextlib.suppress(ConnectionError):
                while pid not in self._codes and self._receive(deadline - time.monotonic()):
                    pass
            return self._codes.pop(pid, None)

    def _receive(self, wait_s: float) -> bool:
        """Receive one report, if one comes in this time. Returns whether one came."""
        if self._channel.fileno() < 0:
            raise ConnectionResetError("the nursery was closed")
        if not is_readable(self._channel.fileno(), wait_s):
            return False
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        received = Descriptors(map(self._channel.recvmsg, [RECEIVE_BYTES], [room]))
        data = received[0][0]
        if not data:
            self.close()
            raise ConnectionResetError("the nursery has ended")
        report: Report = pickle.loads(data)
        if report.kind == "ready":
            self.pid, self._facts = report.pid, report.value
        elif report.kind == "forked":
            self._forked = report, received
        else:
            self._codes[report.pid] = report.value
        return True


def _await_end(process: Any) -> int | None:
    """Wait for a nursery's end, and reap it. Returns its exit code; None if it is not known."""
    with contextlib.suppress(ProcessLookupError):  # other code has reaped it
        owned = Descriptors(map(os.pidfd_open, [process.pid]))
        is_readable(owned[0], _END_S)
    code: int | None = process.exitcode
    return code


def _close(pid: int, channel: socket.socket, process: Any, is_own: bool) -> None:
    """Leave a nursery. Wait for its end if this process has started it and is the last client."""
    PROCESS.meetings.discard(channel)

    def leave() -> None:
        has_ended = process is not None and process.pid is not None
        if is_own and has_ended:
            process.kill()
        with Suppressed(OSError):  # it has ended, or does not answer
            channel.settimeout(_END_S)
            channel.shutdown(socket.SHUT_WR)
            while not is_own and (data := channel.recv(RECEIVE_BYTES)):
                has_ended = has_ended and pickle.loads(data).kind != "left"
        channel.close()
        if has_ended:
            _await_end(process)

    if os.getpid() == pid:
        uninterruptible(leave)
    else:
        channel.close()
