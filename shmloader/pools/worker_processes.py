"""The worker processes of a pool, as the main process sees them.

Owns the processes, one ``SOCK_SEQPACKET`` socket pair each, and their pidfds. Knows nothing of
batches: it moves bytes, and it says who died.

Guarantees:
    * A send never blocks. What a socket refuses waits here, in order.
    * Everything that a worker sent before it died is received before its death is told.
    * ``close`` ends every worker within a bounded time, stopped or hung ones too, reaps it,
      and leaves no descriptor. Called again, or in a forked child, it ends no process.

Assumes that one thread at a time calls the methods.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import multiprocessing.forkserver
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
from typing import Any

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.payload import (
    PICKLE_ERRORS,
    ForkedPayload,
    Payload,
    unimportable_main_hidden,
)
from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.insight.measurements import Readings, Usage
from shmloader.memory.admission import MemoryConfig
from shmloader.memory.lease import is_debugging
from shmloader.memory.limits import control_groups, oom_kills
from shmloader.memory.slot import close_inherited_slots
from shmloader.pools.child import WorkerStart, worker_main
from shmloader.pools.cores import usable_cores
from shmloader.pools.fork_server import preload
from shmloader.pools.handle import KILL_S, WorkerHandle, end_all
from shmloader.pools.parent_death import ParentDeathPipe
from shmloader.pools.starting import check_descriptors, raise_what_lacks, sigint_held_back
from shmloader.pools.startup_semaphore import StartupSemaphore, get_ready
from shmloader.pools.status_page import AtWork, StatusPage, measure_memory
from shmloader.pools.waker import Waker
from shmloader.process_state import PROCESS
from shmloader.threads.fork_safety import all_parked
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import SIGNAL_S

# How long close() waits for a worker to end by itself: it may be inside a sample.
_GRACE_S = 1.0

_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


def _read_usage(group: "weakref.ref[WorkerProcesses]", thoroughly: bool) -> list[Usage] | None:
    """What its workers have used; None if it is gone, or closed meanwhile."""
    found = group()
    try:
        return None if found is None else found.usage(thoroughly=thoroughly)
    except ValueError:  # the status page is closed
        return None


class WorkerProcesses:
    """A fixed number of worker processes, some of which may be replaced.

    Attributes:
        processes: The ``multiprocessing`` processes, by worker number.
        is_inherited: Whether this is a forked child of the process that has the workers.
        is_waiting: Whether ``wait`` waits, or was left by an exception while it waited: no message
            has been taken from a worker that was not returned.
    """

    def __init__(
        self,
        context: BaseContext | None,
        worker_count: int,
        objects: object,
        plan: FetchConfig,
        base_seed: int,
        demand: MemoryConfig | None = None,
        *,
        may_replace: bool = False,
        grace_s: float = _GRACE_S,
        started: int | None = None,
    ) -> None:
        """Start the workers.

        Args:
            context: The user's multiprocessing context; None for the default one.
            worker_count: How many.
            objects: (dataset, collate_fn, worker_init_fn, on_error).
            plan: How batches are made.
            base_seed: For the workers' random streams.
            may_replace: Whether ``replace`` will be called; keeps what it takes to start a worker.
            grace_s: How long ``close`` waits for workers to end by themselves.
            started: How many are started now; the others by ``start``. None: all.
            demand: What the workers may ask of memory.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If ``objects`` cannot be pickled for
                a start method that needs it.
            OSError: If there are no descriptors or processes left.
        """
        self._pid = os.getpid()
        self._context: Any = context or multiprocessing.get_context()
        self._workers: list[WorkerHandle] = []
        self._starts: list[WorkerStart] = []
        self._payload: Payload | ForkedPayload | None = None
        self._starting: socket.socket | None = None
        self._is_closed = False
        self._is_exiting = False
        self._grace_s = grace_s
        self.is_waiting = self.is_inherited = False
        self._groups = control_groups(Path("/" if demand is None else demand.root))
        self._oom_kills_before = oom_kills(self._groups)
        self._waker: Waker | None = None
        self._is_woken = False
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        #: What the workers use.
        self.readings = Readings()
        # Of each worker number, what those used that were replaced.
        self._used_before: dict[int, Usage] = {}
        self._parent_death: ParentDeathPipe | None = None
        self._startup: StartupSemaphore | None = None
        # A fork server that imports nothing of ours.
        self._has_bare_server = False
        self._status_page: StatusPage | None = None
        # At the interpreter's exit multiprocessing waits for ever for a daemon that is stopped;
        # this comes first, whatever was registered when.
        self._at_exit = multiprocessing.util.Finalize(
            None, _close_at_exit, args=(weakref.ref(self),), exitpriority=100
        )
        # Last: another thread may fork a worker at any time, which then abandons what is here.
        PROCESS.worker_groups.add(self)
        try:
            method = self._context.get_start_method()
            if method == "spawn":
                cores = usable_cores(Path("/" if demand is None else demand.root))
                self._startup = StartupSemaphore(cores) if worker_count > cores else None
            elif method == "forkserver":
                self._has_bare_server = not preload(self._context)
                self._ensure_server()
            parent_death = self._parent_death = ParentDeathPipe()
            status_page = self._status_page = StatusPage(worker_count)
            for worker_id in range(worker_count):
                start = WorkerStart(
                    worker_id, worker_count, base_seed, plan, parent_death, status_page, demand,
                    is_debugging(), self._startup, is_fresh=method != "fork",
                )  # fmt: skip
                self._starts.append(start)
            payload = self._start_workers(worker_count if started is None else started, objects)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise_what_lacks(error)
            raise
        self.readings.open(functools.partial(_read_usage, weakref.ref(self)))
        if not may_replace:
            payload.close()
            self._payload = None
            parent_death.close_read()
            status_page.close_for_start()

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes, by number."""
        return [worker.process for worker in self._workers]

    def _start_workers(self, count: int, objects: object) -> "Payload | ForkedPayload":
        """Start the first workers, and pickle what they get."""
        is_early = self._context.get_start_method() == "spawn" and count > 0
        if is_early:
            # It imports torch while we pickle, and has the batch that is wanted first. Without
            # this, in five rounds in turns with a dataset of many strings, the first batch came 1.4
            # times as late with four workers (1.0–1.6), and 1.1 times with eight (1.1–1.3).
            environment = dict(os.environ)
            self._workers.append(self._start_worker(0))
        try:
            payload = self._payload = self._make_payload(objects)
        except BaseException:
            self._grace_s = 0.0  # it has nothing to finish
            raise
        if self._is_closed:  # at the interpreter's exit
            payload.close()
            self._check_open()
        if is_early and isinstance(payload, Payload):
            # Something may have set what the others will have: a __getstate__, an import.
            is_alike = dict(os.environ) == environment
            if not (is_alike and self._hand_over(payload)):
                self._end(0, grace_s=0.0)
                self._forget(0)
                self._workers[0] = self._start_worker(0)
        for worker_id in range(len(self._workers), count):
            self._workers.append(self._start_worker(worker_id))
        return payload

    def _hand_over(self, payload: Payload) -> bool:
        """Send a payload to worker 0; whether it all was. What waits might outlive the payload."""
        for data, descriptors in payload.messages():
            self.send(0, data, *descriptors)
        return not self._workers[0].outbox

    def _make_payload(self, objects: object) -> "Payload | ForkedPayload":
        method = self._context.get_start_method()
        if method == "fork":
            return ForkedPayload(objects)
        try:
            return Payload(objects)
        except PICKLE_ERRORS:
            warnings.warn(_PICKLE_WARNING, stacklevel=2)
            raise

    def _ensure_server(self) -> None:
        """Start multiprocessing's fork server, if there is none. It need not be up on return."""
        # With Ctrl-C blocked, one that imports nothing of ours would hand that on to whatever its
        # user has it fork.
        blocked = nullcontext() if self._has_bare_server else sigint_held_back(is_fresh=True)
        with blocked, unimportable_main_hidden():
            multiprocessing.forkserver.ensure_running()

    def _start_worker(self, worker_id: int) -> WorkerHandle:
        """Start a worker; without a payload, it waits for that."""
        assert self._status_page is not None
        assert self._parent_death is not None
        self._status_page.clear(worker_id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(True)  # whatever socket.setdefaulttimeout() says
        closer = close_inherited if isinstance(self._payload, ForkedPayload) else None
        process = self._context.Process(
            target=worker_main,
            args=(self._payload, theirs, self._starts[worker_id], closer),
            daemon=True,
        )
        is_fresh = self._starts[worker_id].is_fresh
        if is_fresh:
            get_ready(process, self._startup)
        self._starting = ours
        try:
            if self._context.get_start_method() == "forkserver":
                self._ensure_server()
            with (
                theirs,
                sigint_held_back(is_fresh=is_fresh),
                self._others_parked(),
                unimportable_main_hidden(),
            ):
                check_descriptors(ours)
                process.start()
            self._parent_death.tie(process.pid or 0)
            if FAULTS is not None:
                FAULTS.reach("main.start")
            ours.setblocking(False)
            worker = WorkerHandle(process, ours)
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
            ClosedLoaderError: If another thread ends them meanwhile.
        """
        self._forget(worker_id)
        try:
            self._check_open()
            new = self._workers[worker_id] = self._start_worker(worker_id)
        except Exception as error:
            self._check_open(error)
            if isinstance(error, OSError):
                raise_what_lacks(error)
            raise
        self._end_if_closed(new)

    def _forget(self, worker_id: int) -> None:
        """Close what is left of a lost worker, and note what it has used."""
        old = self._workers[worker_id]
        assert old.is_lost
        self._by_fd.pop(old.channel.fileno(), None)
        self._by_fd.pop(old.pidfd, None)
        old.channel.close()
        old.close_pidfd()
        self._used_before[worker_id] = self._usage_of(worker_id, thoroughly=False)

    def start(self, worker_id: int) -> None:
        """Start a worker that was not there yet, or was retired.

        Raises:
            OSError: If there are no descriptors or processes left.
            ClosedLoaderError: If another thread ends them meanwhile.
        """
        if worker_id < len(self._workers):
            self.replace(worker_id)
            return
        assert worker_id == len(self._workers)
        self._check_open()
        try:
            new = self._start_worker(worker_id)
        except OSError as error:
            self._check_open(error)
            raise_what_lacks(error)
            raise
        self._workers.append(new)
        self._end_if_closed(new)

    def _end_if_closed(self, new: WorkerHandle) -> None:
        """Whoever closes may not have seen a worker that has come meanwhile."""
        try:
            self._check_open()
        except ClosedLoaderError:
            new.hang_up()
            end_all([new], 0)
            raise

    def retire(self, worker_id: int) -> None:
        """End a worker that has nothing to do, and reap it; ``start`` starts another one."""
        self._end(worker_id, self._grace_s)

    def _end(self, worker_id: int, grace_s: float) -> None:
        worker = self._workers[worker_id]
        if worker.is_lost or self._is_closed:
            return
        worker.is_lost = True
        for fd in (worker.channel.fileno(), worker.pidfd):
            self._by_fd.pop(fd, None)
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(fd)
        worker.outbox.clear()
        worker.hang_up()
        end_all([worker], grace_s)
        if self._startup is not None:
            self._startup.go_on()

    def _check_open(self, cause: Exception | None = None) -> None:
        if self._is_closed:
            raise ClosedLoaderError("the workers have been ended") from cause

    def send(self, worker_id: int, data: bytes, *descriptors: int) -> None:
        """Send a message to a worker; never blocks. A dead worker's message is dropped.

        Args:
            worker_id: To whom.
            data: The packed message.
            descriptors: Go with it; must stay open until it is sent, that is, as long as the
                worker lives.
        """
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        if worker.outbox or not worker.try_send(data, descriptors):
            worker.outbox.append((data, descriptors))
            self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)

    def receive(self, worker_id: int) -> bytes | None:
        """The next message from a worker, if one is there or about to come. Does not sleep."""
        return self._workers[worker_id].receive_soon()

    def enable_wake(self) -> None:
        """Make the wakes below work. Before any other thread uses this."""
        self._waker = Waker()
        self._waker.register(self._poll)

    def wake(self) -> None:
        """Let ``wait`` return, now or the next time. From any thread; nothing after ``close``."""
        waker = self._waker
        self._is_woken = True
        # Looked at in the other order by `wait`: one of the two sees what the other has set.
        if waker is not None and self.is_waiting:
            waker.now()

    def wake_soon(self) -> None:
        """The same, but a wait that goes on returns in a moment. From one thread."""
        waker = self._waker
        self._is_woken = True
        if waker is not None and self.is_waiting:
            waker.soon()

    def hurry(self) -> None:
        """Let ``wait`` return now if it will soon. From the thread of :meth:`wake_soon`."""
        waker = self._waker
        if waker is not None and waker.is_due:
            self.wake()

    def wait(self, timeout_s: float | None) -> list[tuple[int, bytes | None]]:
        """Wait until something has happened.

        Args:
            timeout_s: At most so long; None: no such limit.

        Returns:
            Pairs of a worker's number and its message; None instead of a message: the worker
            is dead, and reaped. Empty when the time is over, and now and then before: for
            signals.
        """
        waker = self._waker  # stays open for as long as we look at it
        if self._is_closed:
            return []
        self.is_waiting = True
        left_s = SIGNAL_S if timeout_s is None else min(timeout_s, SIGNAL_S)
        if self._is_woken:
            left_s = 0
        events = self._poll.poll(max(0, math.ceil(left_s * 1000)))
        self.is_waiting = self._is_woken = False
        if waker is not None:
            waker.begin()
        if self._has_been_closed():  # by another thread, meanwhile
            if self._is_exiting and threading.current_thread().daemon:
                # The interpreter ends. Such a thread is not to be told anything any more.
                threading.Event().wait()
            return []
        happened: list[tuple[int, bytes | None]] = []
        for fd, event in events:
            if waker is not None and waker.take(fd):
                continue
            worker_id = self._by_fd[fd]
            worker = self._workers[worker_id]
            if fd == worker.pidfd:
                happened.extend(self._lose(worker_id))
            elif not worker.is_lost:
                if event & select.POLLOUT and worker.flush():
                    self._poll.modify(worker.channel, select.POLLIN)
                data = worker.receive()
                if data is not None:
                    happened.append((worker_id, data))
                elif event & (select.POLLHUP | select.POLLERR):
                    # The socket has ended; the pidfd will say more in a moment.
                    self._poll.unregister(worker.channel)
        return happened

    def _has_been_closed(self) -> bool:
        return self._is_closed

    def _lose(self, worker_id: int) -> Iterator[tuple[int, bytes | None]]:
        """Take a dead worker's last messages, reap it, and say that it is lost."""
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        while (data := worker.receive()) is not None:
            yield worker_id, data
        worker.is_lost = True
        if self._startup is not None:
            self._startup.go_on()
        worker.outbox.clear()
        with contextlib.suppress(KeyError):
            self._poll.unregister(worker.channel)
        self._poll.unregister(worker.pidfd)
        worker.reap(time.monotonic() + KILL_S)
        yield worker_id, None

    def exit_code(self, worker_id: int) -> int | None:
        """Exit code of a lost worker, negative for a signal; None if somebody else reaped it."""
        code: int | None = self._workers[worker_id].process.exitcode
        return code

    def oom_kills(self, worker_id: int) -> int:
        """Where a worker was killed by SIGKILL: how often the out-of-memory killer was at work.

        Returns:
            Processes of our control group that it has ended since these were made; 0 if this is
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
        assert self._status_page is not None
        return self._status_page.read(worker_id)

    def usage(self, *, thoroughly: bool) -> list[Usage]:
        """What each worker has used, with those before it in its place. From any thread.

        Args:
            thoroughly: Whether to measure their memory, which takes milliseconds for each.

        Raises:
            ValueError: If they are ended.
        """
        return [
            self._usage_of(worker_id, thoroughly=thoroughly)
            for worker_id in range(len(self._workers))
        ]

    def _usage_of(self, worker_id: int, *, thoroughly: bool) -> Usage:
        assert self._status_page is not None
        pid = self.pid(worker_id)
        usage = self._status_page.usage(worker_id, pid)
        if thoroughly and not self._workers[worker_id].is_lost:
            usage = dataclasses.replace(usage, pss_bytes=measure_memory(pid) or usage.pss_bytes)
        before = self._used_before.get(worker_id)
        if before is None:
            return usage
        stalled_ns = usage.stalled_ns
        if stalled_ns is not None:
            stalled_ns += before.stalled_ns or 0
        return dataclasses.replace(
            usage, cpu_ns=usage.cpu_ns + before.cpu_ns, stalled_ns=stalled_ns
        )

    def ask(self, worker_id: int) -> AtWork:
        """What a worker is at, with its Python stack. Takes up to a third of a second."""
        assert self._status_page is not None
        return self._status_page.ask(worker_id, self.pid(worker_id))

    def close(self) -> None:
        """End and reap all workers. May be called again; from any thread."""
        if self._is_closed:
            return
        if os.getpid() != self._pid:
            self._abandon()
            return
        uninterruptible(self._end_all)

    def _end_all(self) -> None:
        # In here, since an interruption before would leave the workers alone for good.
        self._is_closed = True
        self._at_exit.cancel()
        # Who presses Ctrl-C meanwhile does not want to wait for workers that are busy.
        grace_s, self._grace_s = self._grace_s, 0.0
        for worker in self._workers:
            worker.hang_up()
        if FAULTS is not None:
            FAULTS.reach("main.close")
        end_all(self._workers, grace_s)
        self.readings.close()
        self._close_shared()

    def _close_shared(self) -> None:
        self._waker = None
        for part in (self._payload, self._parent_death, self._status_page, self._startup):
            if part is not None:
                part.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the workers are not its own.

        ``multiprocessing`` takes them for its children, and would end them at its exit.
        """
        self.is_inherited = True
        for worker in self._workers:
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]

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


def _close_at_exit(reference: "weakref.ref[WorkerProcesses]") -> None:
    group = reference()
    if group is not None:
        group._is_exiting = True
        if FAULTS is not None:
            FAULTS.reach("main.exit")
        group.close()


def close_inherited() -> None:
    """Close, in a forked worker, what the fork gave it of this and of other loaders."""
    for group in list(PROCESS.worker_groups):
        group._abandon()
    close_inherited_slots()
