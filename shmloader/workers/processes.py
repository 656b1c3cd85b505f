"""The pool of worker processes, as the main process sees it.

Owns the processes, one ``SOCK_SEQPACKET`` socket pair each, and their pidfds. Knows nothing of
batches: it moves bytes, and it says who died.

Guarantees:
    * A send never blocks. What a socket refuses waits here, in order.
    * Everything that a worker sent before it died is received before its death is told.
    * ``close`` ends every worker within a bounded time, stopped or hung ones too, reaps it,
      and leaves no descriptor. Called again, or in a forked child, it ends no process.

Assumes that one thread at a time calls the methods.
"""

import collections
import contextlib
import errno
import math
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

from shmloader.faults import FAULTS
from shmloader.memory.debug import is_debugging
from shmloader.memory.limits import control_groups, oom_kills
from shmloader.memory.room import Demand
from shmloader.memory.slot import close_inherited_slots
from shmloader.messages import RECEIVE_BYTES
from shmloader.workers.board import AtWork, Board
from shmloader.workers.channel import receive_soon
from shmloader.workers.child import WorkerStart, worker_main
from shmloader.workers.fetch import FetchPlan
from shmloader.workers.finishing import finish
from shmloader.workers.lifeline import Lifeline
from shmloader.workers.parking import all_parked
from shmloader.workers.payload import (
    PICKLE_ERRORS,
    ForkedPayload,
    Payload,
    unimportable_main_hidden,
)

# How long close() waits for a worker to end by itself (it may be inside a sample), after
# SIGTERM, and after SIGKILL.
_GRACE_S = 1.0
_TERMINATE_S = 0.3
_KILL_S = 5.0

_PEER_IS_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)

_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


class _Pools:
    """The pools of this process, for a forked worker to close what is not its own."""

    live: ClassVar["weakref.WeakSet[ProcessPool]"] = weakref.WeakSet()


class _Worker:
    """A worker's handles."""

    __slots__ = ("channel", "is_lost", "outbox", "pidfd", "process")

    def __init__(self, process: BaseProcess, channel: socket.socket) -> None:
        self.process = process
        self.channel = channel
        self.pidfd = os.pidfd_open(process.pid or 0)
        self.outbox: collections.deque[tuple[bytes, int | None]] = collections.deque()
        self.is_lost = False

    def close_pidfd(self) -> None:
        """Close it; may be called again."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


class _Waker:
    """What ``wake`` writes to. Closed with the last reference: not while anybody uses it."""

    fd = -1

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class ProcessPool:
    """A fixed number of worker processes, some of which may be replaced.

    Attributes:
        processes: The ``multiprocessing`` processes, by worker number.
        is_waiting: Whether ``wait`` waits, or was left by an exception while it waited: no message
            has been taken from a worker that was not returned.
    """

    def __init__(
        self,
        context: BaseContext | None,
        worker_count: int,
        objects: object,
        plan: FetchPlan,
        base_seed: int,
        demand: Demand | None = None,
        *,
        may_replace: bool = False,
    ) -> None:
        """Start the workers.

        Args:
            context: The user's multiprocessing context; None for the default one.
            worker_count: How many.
            objects: (dataset, collate_fn, worker_init_fn, on_error).
            plan: How batches are made.
            base_seed: For the workers' random streams.
            may_replace: Whether ``replace`` will be called; keeps what it takes to start a worker.
            demand: What the workers may ask of memory.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If ``objects`` cannot be pickled for
                a start method that needs it.
            OSError: If there are no descriptors or processes left.
        """
        self._pid = os.getpid()
        self._context: Any = context or multiprocessing.get_context()
        self._workers: list[_Worker] = []
        self._starts: list[WorkerStart] = []
        self._payload: Payload | ForkedPayload | None = None
        self._starting: socket.socket | None = None
        self._is_closed = False
        self._is_exiting = False
        self._grace_s = _GRACE_S
        self.is_waiting = False
        self._groups = control_groups(Path("/" if demand is None else demand.root))
        self._oom_kills_before = oom_kills(self._groups)
        self._waker: _Waker | None = None
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        _Pools.live.add(self)
        # At the interpreter's exit multiprocessing waits for ever for a daemon that is stopped;
        # this comes first, whatever was registered when.
        self._at_exit = multiprocessing.util.Finalize(
            None, _close_pool, args=(weakref.ref(self),), exitpriority=100
        )
        self._lifeline: Lifeline | None = None
        self._board: Board | None = None
        try:
            lifeline = self._lifeline = Lifeline()
            board = self._board = Board(worker_count)
            self._payload = self._make_payload(objects)
            for worker_id in range(worker_count):
                start = WorkerStart(
                    worker_id, worker_count, base_seed, plan, lifeline, board, demand,
                    is_debugging(),
                )  # fmt: skip
                self._starts.append(start)
                self._workers.append(self._start_worker(worker_id))
        except BaseException:
            self.close()
            raise
        if not may_replace:
            self._payload.close()
            self._payload = None
            lifeline.close_read()
            board.close_for_start()

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes, by number."""
        return [worker.process for worker in self._workers]

    def _make_payload(self, objects: object) -> "Payload | ForkedPayload":
        method = self._context.get_start_method()
        if method == "fork":
            return ForkedPayload(objects)
        try:
            return Payload(objects, method)
        except PICKLE_ERRORS:
            warnings.warn(_PICKLE_WARNING, stacklevel=2)
            raise

    def _start_worker(self, worker_id: int) -> _Worker:
        assert self._board is not None
        assert self._lifeline is not None
        self._board.clear(worker_id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        closer = close_inherited if isinstance(self._payload, ForkedPayload) else None
        process = self._context.Process(
            target=worker_main,
            args=(self._payload, theirs, self._starts[worker_id], closer),
            daemon=True,
        )
        self._starting = ours
        try:
            with _sigint_blocked(), self._others_parked(), unimportable_main_hidden(), theirs:
                process.start()
            self._lifeline.tie(process.pid or 0)
            if FAULTS is not None:
                FAULTS.reach("main.start")
            ours.setblocking(False)
            worker = _Worker(process, ours)
        except BaseException:
            ours.close()
            if process.pid is not None:
                process.kill()
                process.join()
            raise
        finally:
            self._starting = None
        self._by_fd[ours.fileno()] = self._by_fd[worker.pidfd] = worker_id
        self._poll.register(ours, select.POLLIN)
        self._poll.register(worker.pidfd, select.POLLIN)
        return worker

    def _others_parked(self) -> contextlib.AbstractContextManager[None]:
        """Threads of ours stand still while we fork; the other methods copy none."""
        return all_parked() if self._context.get_start_method() == "fork" else nullcontext()

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of a lost one; it has been sent nothing yet.

        Raises:
            OSError: If there are no descriptors or processes left.
        """
        old = self._workers[worker_id]
        assert old.is_lost
        del self._by_fd[old.channel.fileno()], self._by_fd[old.pidfd]
        old.channel.close()
        old.close_pidfd()
        self._workers[worker_id] = self._start_worker(worker_id)

    def send(self, worker_id: int, data: bytes, descriptor: int | None = None) -> None:
        """Send a message to a worker; never blocks. A dead worker's message is dropped.

        Args:
            worker_id: To whom.
            data: The packed message.
            descriptor: Goes with it; must stay open until it is sent, that is, as long as the
                worker lives.
        """
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        if worker.outbox or not self._try_send(worker, data, descriptor):
            worker.outbox.append((data, descriptor))
            self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)

    def _try_send(self, worker: _Worker, data: bytes, descriptor: int | None) -> bool:
        try:
            if descriptor is None:
                worker.channel.send(data)
            else:
                socket.send_fds(worker.channel, [data], [descriptor])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _PEER_IS_GONE:
                raise
            # It is dying, and its pidfd tells us so.
        return True

    def receive(self, worker_id: int) -> bytes | None:
        """The next message from a worker, if one is there or about to come. Does not sleep."""
        try:
            return receive_soon(self._workers[worker_id].channel.recv, RECEIVE_BYTES) or None
        except OSError:
            return None  # its pidfd tells us more

    def _receive_now(self, worker: _Worker) -> bytes | None:
        try:
            return worker.channel.recv(RECEIVE_BYTES) or None
        except OSError:  # BlockingIOError is one
            return None

    def enable_wake(self) -> None:
        """Make :meth:`wake` work. Before any other thread uses the pool."""
        self._waker = _Waker()
        self._poll.register(self._waker.fd, select.POLLIN)

    def wake(self) -> None:
        """Let ``wait`` return, now or the next time. From any thread; nothing after ``close``."""
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(BlockingIOError):  # it is full: nobody has looked for long
                os.eventfd_write(waker.fd, 1)

    def wait(self, timeout_s: float | None) -> list[tuple[int, bytes | None]]:
        """Wait until something has happened.

        Args:
            timeout_s: At most so long; None for ever.

        Returns:
            Pairs of a worker's number and its message; None instead of a message: the worker
            is dead, and reaped. Empty when the time is over.
        """
        waker = self._waker  # stays open for as long as we look at it
        if self._is_closed:
            return []
        self.is_waiting = True
        events = self._poll.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000)))
        self.is_waiting = False
        if self._has_been_closed():  # by another thread, meanwhile
            if self._is_exiting and threading.current_thread().daemon:
                # The interpreter ends. Such a thread is not to be told anything any more.
                threading.Event().wait()
            return []
        happened: list[tuple[int, bytes | None]] = []
        for fd, event in events:
            if waker is not None and fd == waker.fd:
                os.eventfd_read(fd)
                continue
            worker_id = self._by_fd[fd]
            worker = self._workers[worker_id]
            if fd == worker.pidfd:
                happened.extend(self._lose(worker_id))
            elif not worker.is_lost:
                if event & select.POLLOUT:
                    self._flush(worker)
                data = self._receive_now(worker)
                if data is not None:
                    happened.append((worker_id, data))
                elif event & (select.POLLHUP | select.POLLERR):
                    # The socket has ended; the pidfd will say more in a moment.
                    self._poll.unregister(worker.channel)
        return happened

    def _has_been_closed(self) -> bool:
        return self._is_closed

    def _flush(self, worker: _Worker) -> None:
        while worker.outbox:
            data, descriptor = worker.outbox[0]
            if not self._try_send(worker, data, descriptor):
                return
            worker.outbox.popleft()
        self._poll.modify(worker.channel, select.POLLIN)

    def _lose(self, worker_id: int) -> Iterator[tuple[int, bytes | None]]:
        """Take a dead worker's last messages, reap it, and say that it is lost."""
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        while (data := self._receive_now(worker)) is not None:
            yield worker_id, data
        worker.is_lost = True
        worker.outbox.clear()
        with contextlib.suppress(KeyError):
            self._poll.unregister(worker.channel)
        self._poll.unregister(worker.pidfd)
        _reap(worker, time.monotonic() + _KILL_S)
        yield worker_id, None

    def exit_code(self, worker_id: int) -> int | None:
        """Exit code of a lost worker, negative for a signal; None if somebody else reaped it."""
        code: int | None = self._workers[worker_id].process.exitcode
        return code

    def oom_kills(self, worker_id: int) -> int:
        """Where a worker was killed by SIGKILL: how often the out-of-memory killer was at work.

        Returns:
            Processes of our control group that it has ended since the pool was made; 0 if this is
            not known, or the worker ended otherwise.
        """
        if self.exit_code(worker_id) != -signal.SIGKILL or self._oom_kills_before is None:
            return 0
        return (oom_kills(self._groups) or 0) - self._oom_kills_before

    def pid(self, worker_id: int) -> int:
        """Process number of a worker."""
        return self._workers[worker_id].process.pid or 0

    def was_at(self, worker_id: int) -> AtWork:
        """What a worker is at, without asking it, or a lost one was at when it died."""
        assert self._board is not None
        return self._board.read(worker_id)

    def ask(self, worker_id: int) -> AtWork:
        """What a worker is at, with its Python stack. Takes up to a third of a second."""
        assert self._board is not None
        return self._board.ask(worker_id, self.pid(worker_id))

    def close(self) -> None:
        """End and reap all workers. May be called again; from any thread."""
        if self._is_closed:
            return
        if os.getpid() != self._pid:
            self._abandon()
            return
        self._is_closed = True
        self._at_exit.cancel()
        finish(self._end_all)

    def _end_all(self) -> None:
        # Who presses Ctrl-C meanwhile does not want to wait for workers that are busy.
        grace_s, self._grace_s = self._grace_s, 0.0
        for worker in self._workers:
            # Ends the worker's loop when it has answered what it is at.
            with contextlib.suppress(OSError):
                worker.channel.shutdown(socket.SHUT_RDWR)
            worker.channel.close()
        if FAULTS is not None:
            FAULTS.reach("main.close")
        _end([worker for worker in self._workers if worker.pidfd >= 0], grace_s)
        self._close_shared()

    def _close_shared(self) -> None:
        self._waker = None
        for part in (self._payload, self._lifeline, self._board):
            if part is not None:
                part.close()

    def _abandon(self) -> None:
        """Close our descriptors in a forked child; the workers are not its own."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            # The numbers of its descriptors may be somebody else's by now.
            return
        if self._starting is not None:
            self._starting.close()
        for worker in self._workers:
            worker.channel.close()
            with contextlib.suppress(OSError):
                os.close(worker.pidfd)
        self._close_shared()


def _close_pool(reference: "weakref.ref[ProcessPool]") -> None:
    pool = reference()
    if pool is not None:
        pool._is_exiting = True
        if FAULTS is not None:
            FAULTS.reach("main.exit")
        pool.close()


def close_inherited() -> None:
    """Close, in a forked worker, what the fork gave it of this and of other loaders."""
    for pool in list(_Pools.live):
        pool._abandon()
    close_inherited_slots()


def _end(workers: list[_Worker], grace_s: float) -> None:
    """Wait for workers to end, and reap them; help those that do not end by themselves."""
    for wait_s, then in (
        (grace_s, BaseProcess.terminate),
        (_TERMINATE_S, BaseProcess.kill),
        (_KILL_S, None),
    ):
        deadline = time.monotonic() + wait_s
        for worker in workers:
            if _reap(worker, deadline):
                worker.close_pidfd()
        workers = [worker for worker in workers if worker.pidfd >= 0]
        if then is not None:
            for worker in workers:
                then(worker.process)


def _reap(worker: _Worker, deadline: float) -> bool:
    """Wait for a worker's end until ``deadline`` of the monotonic clock; whether it has ended.

    Waits on the pidfd: multiprocessing's sentinel stays silent for as long as a child of the
    worker's own lives.
    """
    poll = select.poll()
    poll.register(worker.pidfd, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return False
    if worker.process.exitcode is None:
        # A forkserver reaps it and tells us, which takes a moment more.
        worker.process.join(1.0)
    if worker.process.exitcode is None:
        # Somebody else has reaped it (a SIGCHLD handler, or SIG_IGN). multiprocessing would keep
        # it, with its pipes, and send its number a signal at exit, whosever that is then.
        multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
    worker.process.join(0)  # lets multiprocessing forget it
    return True


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Keep Ctrl-C from a worker until it ignores it; the main process gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
