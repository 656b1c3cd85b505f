"""The nursery: a process that imports the program and torch once, and then forks workers.

Under "spawn" and "forkserver" each worker would import torch by itself, which takes seconds of a
core's time and 150 MB of memory for each. Here one fresh interpreter does it. It is started as
multiprocessing's "spawn" starts a process, so it has the environment, the directory, ``sys.path``,
``sys.argv`` and the main module that a spawned worker has, and the workers that it forks have them,
too. It loads no dataset: each worker loads its own, so what opens while it is unpickled is its own.

::

    main process                                  nursery
    ────────────                                  ───────
    starts it as soon as workers are wanted ────▶ imports the program's main module, and torch
    pickles the dataset                           ready ─────────────────────────────────┐
    waits for it ◀───────────────────────────────────────────────────────────────────────┘
    a pickled Process, with its descriptors ────▶ forks it
    its pid, with a descriptor of it ◀─────────── and reaps it
    its exit code ◀──────────────────────────────

**Which one is used.** Loaders share the nursery of this process, as long as the environment and the
other things named above are as they were when it started; else a new one is started. It ends with
the last loader that uses it. With "forkserver" it stays, and keeps its environment, as
multiprocessing's own server does.

**Threads.** A process with several threads must not fork: another thread may hold a lock. If the
program has started threads when it has been imported, "spawn" starts each worker afresh. (A fork
ends the threads of OpenBLAS, which expects forks, so they are counted after a first one.) Device
drivers have threads, so a program that uses a device when it is imported is among these.

**Guarantees.**

* The nursery ends with the main process, at once, however that ends (``parent_death``).
* If the nursery dies, its workers go on. Their exit codes are not known then.
"""

import atexit
import contextlib
import errno
import functools
import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing import popen_fork, spawn, util
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn

from shmloader.batch.payload import (
    Payload,
    ReceivedPayload,
    receive_payload,
    unimportable_main_hidden,
)
from shmloader.errors import WorkerDiedError
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.main_guard import (
    NO_GUARD_EXIT,
    NO_GUARD_TEXT,
    name_of,
    sigint_held_back,
)
from shmloader.pools.parent_death import ParentDeathPipe, WorkerParentDeathPipe
from shmloader.process_state import PROCESS
from shmloader.threads.wakeup import SIGNAL_S

# How long the nursery may take to report the exit code of a worker that has ended, and how long it
# may take to end after SIGKILL.
_REPORT_S = 1.0
_KILL_S = 5.0


class _Report(NamedTuple):
    """Nursery → main process.

    Attributes:
        kind: "ready": everything is imported. "forked": a process was forked; a descriptor of it
            comes with the message. "ended": a process has ended.
        pid: The process; 0 if it could not be forked.
        value: "ready": whether there are other threads. "forked": the number of the error. "ended":
            the exit code, negative for a signal.
    """

    kind: str
    pid: int = 0
    value: int = 0


class _Surroundings(NamedTuple):
    """What a fresh interpreter takes over from this process."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    arguments: list[str]
    executable: object
    modules: list[str]


def _surroundings() -> _Surroundings:
    folder = ""
    with contextlib.suppress(FileNotFoundError):
        folder = os.getcwd()  # noqa: PTH109 - compared only
    # Only this private attribute shows which modules the user has a fork server import.
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    modules = [*getattr(server, "_preload_modules", ())]
    return _Surroundings(
        dict(os.environ), folder, [*sys.path], [*sys.argv], spawn.get_executable(), modules
    )


def nursery_of_process(*, keep: bool) -> "Nursery":
    """Return the nursery of this process. It is started unless one runs that will do.

    Args:
        keep: Whether it stays when no loader uses it.

    Raises:
        OSError: If there are no descriptors or processes left.
    """
    wanted = _surroundings()
    nursery: Nursery | None = PROCESS.kept_nursery if keep else PROCESS.nursery()
    if nursery is not None and not nursery.is_alive:
        nursery.close()
        nursery = None
    found = None if nursery is None else nursery.surroundings
    if found is not None and keep:
        found = found._replace(environment=wanted.environment)
    if nursery is None or found != wanted:
        nursery = Nursery(wanted)
        PROCESS.nursery = weakref.ref(nursery)
        if keep:
            PROCESS.kept_nursery = nursery
    return nursery


class Nursery:
    """The main process's end of a nursery. Several threads may use it.

    Attributes:
        surroundings: What the nursery has taken over from this process.
    """

    def __init__(self, surroundings: _Surroundings) -> None:
        self.surroundings = surroundings
        self._lock = threading.Lock()
        self._has_threads: int | None = None
        self._forked: tuple[_Report, list[int]] | None = None
        self._codes: dict[int, int] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tie = ParentDeathPipe()
        theirs.setblocking(True)  # whatever socket.setdefaulttimeout() says
        self._channel.setblocking(True)
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, name=name_of("nursery"), args=(theirs, tie, surroundings.modules)
        )
        self.close = weakref.finalize(self, _close, os.getpid(), self._channel, tie, self._process)
        PROCESS.meetings.add(self._channel)
        with theirs, sigint_held_back(is_fresh=True), unimportable_main_hidden():
            self._process.start()
        # At this process's exit, multiprocessing would wait for it.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        tie.tie(self._process.pid or 0)
        tie.close_read()

    @property
    def is_alive(self) -> bool:
        """Whether the nursery runs, and is this process's."""
        if self._channel.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._channel, 0)  # hanging up is always reported
        return not poll.poll(0)

    def await_threads(self) -> bool:
        """Wait until everything is imported. Returns whether the nursery has other threads.

        Raises:
            WorkerDiedError: If the nursery has ended, since the program cannot be imported.
        """
        with self._lock:
            try:
                while self._has_threads is None:
                    self._take(SIGNAL_S)
            except ConnectionError:
                raise WorkerDiedError(self._describe_end()) from None
            return bool(self._has_threads)

    def _describe_end(self) -> str:
        self._process.join(_KILL_S)
        pid, code = self._process.pid, self._process.exitcode
        if code == NO_GUARD_EXIT:
            return f"DataLoader worker (pid {pid}) exited unexpectedly. {NO_GUARD_TEXT}"
        if code is not None and code < 0:
            return (
                f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}. It "
                "imported the program, and forked the workers."
            )
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. It imports "
            "the program and forks the workers, and its output says why."
        )

    def fork(self, process: BaseProcess) -> tuple[int, int]:
        """Start a process of multiprocessing's. Returns its pid, and a descriptor of it.

        Raises:
            OSError: If there are no descriptors or processes left.
            WorkerDiedError: If the nursery has ended.
        """
        payload = Payload(process)
        try:
            with self._lock:
                payload.send(self._channel)
                while self._forked is None:
                    self._take(SIGNAL_S)
                (_, pid, number), descriptors = self._forked
                self._forked = None
        except BaseException as error:
            self.close()  # an answer that comes later would be taken for another one's
            if isinstance(error, ConnectionError):
                raise WorkerDiedError(self._describe_end()) from None
            raise
        finally:
            payload.close()
        if not descriptors:
            raise OSError(number or errno.EMFILE, os.strerror(number or errno.EMFILE))
        return pid, descriptors[0]

    def exit_code(self, pid: int, wait_s: float) -> int | None:
        """Return the exit code of a process that has ended; None if it is not reported in time."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            with contextlib.suppress(ConnectionError):
                while pid not in self._codes:
                    left_s = deadline - time.monotonic()
                    if not self._take(max(0.0, min(left_s, SIGNAL_S))) and left_s <= 0:
                        break
            return self._codes.pop(pid, None)

    def _take(self, wait_s: float) -> bool:
        """Take one report, if one comes in this time. Returns whether one came.

        Raises:
            ConnectionError: If the nursery has ended.
        """
        if self._channel.fileno() < 0:
            raise ConnectionResetError("the nursery was closed")
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if not poll.poll(wait_s * 1000):
            return False
        data: bytes = b""
        descriptors: list[int] = []
        with contextlib.suppress(ConnectionError):
            data, descriptors, _, _ = socket.recv_fds(self._channel, RECEIVE_BYTES, 1)
        if not data:
            self.close()
            if PROCESS.kept_nursery is self:
                PROCESS.kept_nursery = None
            raise ConnectionResetError("the nursery has ended")
        report: _Report = pickle.loads(data)
        if report.kind == "ready":
            self._has_threads = report.value
        elif report.kind == "forked":
            self._forked = report, descriptors
        else:
            self._codes[report.pid] = report.value
        return True


def _close(pid: int, channel: socket.socket, tie: ParentDeathPipe, process: Any) -> None:
    """End a nursery: the kernel kills it when its pipe is closed. In a forked child, leave it."""
    PROCESS.meetings.discard(channel)
    channel.close()
    tie.close()
    if os.getpid() == pid and process.pid is not None:
        process.join(_KILL_S)


class Forked(popen_fork.Popen):
    """What ``multiprocessing`` needs of a process that the nursery has forked.

    Attributes:
        sentinel: A descriptor of the process.
    """

    finalizer: "util.Finalize[Any]"

    def __init__(self, nursery: Nursery, process: Any) -> None:
        self._nursery = nursery
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        del process._Popen  # which is not for the process itself
        self.pid, self.sentinel = self._nursery.fork(process)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None while the process runs, and if its code is not known."""
        if self.returncode is None and self.finalizer.still_active():
            poll = select.poll()
            poll.register(self.sentinel, select.POLLIN)
            if poll.poll(0 if flag else None):
                self.returncode = self._nursery.exit_code(self.pid, _REPORT_S)
        return self.returncode

    def _send_signal(self, number: int) -> None:
        if self.returncode is None and self.finalizer.still_active():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, number)


def start_in(nursery: Nursery, process: Any) -> None:
    """Start a process of multiprocessing's in the nursery."""
    process._Popen = functools.partial(Forked, nursery)
    process.start()


# The nursery itself ----------------------------------------------------------------------------


def serve(channel: socket.socket, _tie: WorkerParentDeathPipe, modules: Sequence[str]) -> None:
    """Fork processes until the main process ends this one. The target of its process.

    Args:
        channel: Brings the processes, and takes the reports.
        _tie: Has the pipe's reading end, whose owner the kernel ends with the main process.
        modules: Modules that the user has a fork server import.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    heard = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel might reap the workers
    for name in ("shmloader.pools.child", *modules):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    _send(channel, _Report("ready", value=_has_threads()))
    children: dict[int, int] = {}  # pids by their descriptors
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                poll.unregister(fd)
                pid = children.pop(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _send(channel, _Report("ended", pid, code))
                continue
            try:
                payload = receive_payload(channel)
                pid = os.fork()
            except ConnectionError:
                return
            except OSError as error:  # there are too few descriptors or processes
                _send(channel, _Report("forked", value=error.errno or 0))
                continue
            if pid == 0:
                signal.signal(signal.SIGCHLD, heard)
                channel.close()
                for other in children:
                    os.close(other)
                _run(payload)
            payload.close()
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            _send(channel, _Report("forked", pid), pidfd)


def _has_threads() -> bool:
    """Whether this process has other threads, besides those that a fork ends."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208 - counted only


def _send(channel: socket.socket, report: _Report, *descriptors: int) -> None:
    with contextlib.suppress(ConnectionError):  # the next receive reports it
        socket.send_fds(channel, [pickle.dumps(report)], descriptors)


def _run(payload: ReceivedPayload) -> NoReturn:
    """Run a process of multiprocessing's, as its own "spawn" runs one. Ends this process."""
    code = 1
    try:
        process = payload.load()
        code = process._bootstrap(parent_sentinel=os.pidfd_open(process._parent_pid))
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(code)
