"""The worker processes of a pool, as the main process sees them.

Owns the processes, one ``SOCK_SEQPACKET`` socket pair for each, and their pidfds. It knows nothing
of batches: it moves bytes, and reports which workers died.

Guarantees:
    * A send never blocks. What a socket refuses waits here, in order.
    * Everything that a worker sent before it died is received before its death is reported.
    * ``close`` ends every worker within a bounded time, stopped or hung ones too, reaps it,
      and leaves no descriptor. Called again, or in a forked child, it ends no process.

Assumes that one thread at a time calls the methods.

The module is long because sending, receiving, waking and ending share one selector and one list of
workers.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from shmloader.batch.fetch import FetchConfig
from shmloader.batch.payload import Payload
from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.insight.measurements import Readings, Usage
from shmloader.memory.admission import MemoryConfig
from shmloader.memory.limits import control_groups, oom_kills
from shmloader.pools.handle import KILL_S, WorkerHandle, end_all
from shmloader.pools.starting import OBJECT_NAMES, WorkerStarter, raise_with_remedy
from shmloader.pools.status_page import AtWork, measure_memory
from shmloader.pools.waker import Waker
from shmloader.process_state import PROCESS
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import SIGNAL_S

# How long close() waits for a worker to end by itself: the worker may be loading a sample.
_GRACE_S = 1.0


class WorkerProcesses:
    """A fixed number of worker processes, some of which may be replaced.

    Attributes:
        processes: The ``multiprocessing`` processes, by worker number.
        readings: Memory and CPU time of the workers.
        is_inherited: Whether this is a forked child of the process that has the workers.
        is_waiting: Whether ``wait`` waits, or was left by an exception while it waited: no message
            has been taken from a worker that was not returned.
    """

    def __init__(
        self,
        context: BaseContext | None,
        worker_count: int,
        objects: tuple[object, ...],
        config: FetchConfig,
        base_seed: int,
        memory: MemoryConfig | None = None,
        *,
        may_replace: bool = False,
        grace_s: float = _GRACE_S,
        started: int | None = None,
        names: Sequence[str] = OBJECT_NAMES,
    ) -> None:
        """Start the workers.

        Args:
            context: The user's multiprocessing context; None for the default one.
            worker_count: The most workers there may be.
            objects: (dataset, collate_fn, worker_init_fn, on_error).
            config: How batches are made.
            base_seed: Seeds the workers' random generators.
            memory: The memory that the workers may take; None if memory is not checked.
            may_replace: Whether ``start`` or ``replace`` will be called: then what it takes to
                start a worker is kept.
            grace_s: How long ``close`` waits for workers to end by themselves.
            started: How many workers are started now; ``start`` starts the others. None for all.
            names: What the user calls each of the objects, for the text of an error.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If ``objects`` cannot be pickled for
                a start method that needs it.
            OSError: If there are no descriptors or processes left.
        """
        self._pid = os.getpid()
        self._workers: list[WorkerHandle] = []
        self._starter = WorkerStarter(context or multiprocessing.get_context())
        self._is_closed = False
        self._is_exiting = False
        self._grace_s = grace_s
        self.is_waiting = self.is_inherited = False
        self._groups = control_groups(Path("/" if memory is None else memory.root))
        self._oom_kills_before = oom_kills(self._groups)
        self._waker: Waker | None = None
        self._is_woken = False
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self.readings = Readings()
        # At the interpreter's exit multiprocessing waits for ever for a daemon that is stopped.
        # This comes first, regardless of the order of registration.
        self._at_exit = multiprocessing.util.Finalize(
            None, _close_at_exit, args=(weakref.ref(self),), exitpriority=100
        )
        # From here on another thread may fork a worker, which then abandons what is here.
        PROCESS.worker_groups.add(self)
        try:
            self._starter.open(worker_count, config, base_seed, memory)
            self._start_first(worker_count if started is None else started, objects, names)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise_with_remedy(error)
            raise
        self.readings.open(functools.partial(_read_usage, weakref.ref(self)))
        if not may_replace:
            self._starter.finish()

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes, by number."""
        return [worker.process for worker in self._workers]

    # Start -------------------------------------------------------------------------------

    def _start_first(self, count: int, objects: tuple[object, ...], names: Sequence[str]) -> None:
        """Start the first ``count`` workers, and pickle what they get."""
        is_early = self._starter.method == "spawn" and count > 0
        if is_early:
            # Worker 0 imports torch during the pickling, and loads the batch that is wanted first.
            # Without this, in five rounds in turns with a dataset of many strings, the first batch
            # came 1.4 times as late with four workers (1.0–1.6), and 1.1 times with eight
            # (1.1–1.3).
            environment = dict(os.environ)
            self._workers.append(self._start_worker(0))
        try:
            self._starter.make_payload(objects, names)
        except BaseException:
            self._grace_s = 0.0  # the worker has nothing to finish
            raise
        if self._is_closed:  # at the interpreter's exit
            self._starter.close()
            self._check_open()
        if is_early:
            # Pickling may have changed the environment of the workers to come: a __getstate__ or
            # an import can set variables.
            is_alike = dict(os.environ) == environment
            if not (is_alike and self._hand_over_payload()):
                self._end(0, grace_s=0.0)
                self._forget(0)
                self._workers[0] = self._start_worker(0)
        for worker_id in range(len(self._workers), count):
            self._workers.append(self._start_worker(worker_id))

    def _hand_over_payload(self) -> bool:
        """Send the payload to worker 0. Returns whether the kernel took all of it at once.

        What waits to be sent might outlive the payload.
        """
        payload = self._starter.payload
        assert isinstance(payload, Payload)
        for data, descriptors in payload.messages():
            self.send(0, data, *descriptors)
        return not self._workers[0].outbox

    def _start_worker(self, worker_id: int) -> WorkerHandle:
        worker = self._starter.start(worker_id)
        for fd in (worker.channel.fileno(), worker.pidfd):
            self._by_fd[fd] = worker_id
            self._poll.register(fd, select.POLLIN)
        return worker

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of a lost one, which has been sent nothing yet.

        Raises:
            OSError: If there are no descriptors or processes left.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        self._forget(worker_id)
        new = self._workers[worker_id] = self._start_if_open(worker_id)
        self._end_if_closed(new)

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, or after ``retire``. Raises as :meth:`replace`."""
        if worker_id < len(self._workers):
            self.replace(worker_id)
            return
        assert worker_id == len(self._workers)
        new = self._start_if_open(worker_id)
        self._workers.append(new)
        self._end_if_closed(new)

    def _start_if_open(self, worker_id: int) -> WorkerHandle:
        try:
            self._check_open()
            return self._start_worker(worker_id)
        except Exception as error:
            self._check_open(error)
            if isinstance(error, OSError):
                raise_with_remedy(error)
            raise

    def _check_open(self, cause: Exception | None = None) -> None:
        if self._is_closed:
            raise ClosedLoaderError("the workers have been ended") from cause

    def _forget(self, worker_id: int) -> None:
        """Close what is left of a lost worker."""
        old = self._workers[worker_id]
        assert old.is_lost
        self._by_fd.pop(old.channel.fileno(), None)
        self._by_fd.pop(old.pidfd, None)
        old.channel.close()
        old.close_pidfd()

    def _end_if_closed(self, new: WorkerHandle) -> None:
        """End a new worker that a ``close`` on another thread may have missed."""
        try:
            self._check_open()
        except ClosedLoaderError:
            new.hang_up()
            end_all([new], 0)
            raise

    def kill(self, worker_id: int) -> None:
        """Kill a worker, which ``wait`` will report."""
        worker = self._workers[worker_id]
        if not worker.is_lost:
            worker.process.kill()

    def retire(self, worker_id: int) -> None:
        """End an idle worker, and reap it. ``start`` can start it again."""
        self._end(worker_id, self._grace_s)

    def _end(self, worker_id: int, grace_s: float) -> None:
        worker = self._workers[worker_id]
        if worker.is_lost or self._is_closed:
            return
        self._note_lost(worker)
        for fd in (worker.channel.fileno(), worker.pidfd):
            self._by_fd.pop(fd, None)
        worker.hang_up()
        end_all([worker], grace_s)

    def _note_lost(self, worker: WorkerHandle) -> None:
        """Stop talking to a worker, and let another one start up in its place."""
        worker.is_lost = True
        worker.outbox.clear()
        for fd in (worker.channel.fileno(), worker.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(fd)
        if self._starter.startup is not None:
            self._starter.startup.release()

    # Messages ----------------------------------------------------------------------------

    def send(self, worker_id: int, data: bytes, *descriptors: int) -> None:
        """Send a message to a worker, without blocking. A message to a dead worker is dropped.

        Args:
            worker_id: Number of the worker.
            data: The packed message.
            descriptors: Sent with the message. They must stay open until it is sent, that is, as
                long as the worker lives.
        """
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        if worker.outbox or not worker.try_send(data, descriptors):
            worker.outbox.append((data, descriptors))
            self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)

    def receive(self, worker_id: int) -> bytes | None:
        """Return a worker's next message, if one is there or about to arrive. Does not sleep."""
        return self._workers[worker_id].receive(soon=True)

    def enable_wake(self) -> None:
        """Enable the three methods below. Called before another thread uses this."""
        self._waker = Waker()
        self._waker.register(self._poll)

    def wake(self) -> None:
        """Make the present or the next ``wait`` return. Called from any thread.

        Does nothing after ``close``.
        """
        waker = self._waker
        self._is_woken = True
        # `wait` accesses the two flags in the opposite order, so one side sees the other's.
        if waker is not None and self.is_waiting:
            waker.now()

    def wake_soon(self) -> None:
        """Do as :meth:`wake`, but end the present wait a moment later. Called from one thread."""
        waker = self._waker
        self._is_woken = True
        if waker is not None and self.is_waiting:
            waker.soon()

    def hurry(self) -> None:
        """Make a pending :meth:`wake_soon` take effect now. Called from the same thread."""
        waker = self._waker
        if waker is not None and waker.is_due:
            self.wake()

    def wait(self, timeout_s: float | None) -> list[tuple[int, bytes | None]]:
        """Wait until something happens.

        Args:
            timeout_s: Longest wait in seconds; None waits without a limit.

        Returns:
            Pairs of a worker's number and its message, or None in place of a message if the worker
            is dead and reaped. Empty after the timeout, and sometimes earlier, so that signal
            handlers can run.
        """
        waker = self._waker  # this reference keeps it open
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
                # The interpreter exits. Such a thread must not return to its caller any more.
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
                    # The socket is closed; the pidfd will soon show why.
                    self._poll.unregister(worker.channel)
        return happened

    def _has_been_closed(self) -> bool:
        return self._is_closed

    def _lose(self, worker_id: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield a dead worker's last messages, reap it, and yield that it is lost."""
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        while (data := worker.receive()) is not None:
            yield worker_id, data
        self._note_lost(worker)
        worker.reap(time.monotonic() + KILL_S)
        yield worker_id, None

    # What the workers do ------------------------------------------------------------------

    def exit_code(self, worker_id: int) -> int | None:
        """Return a lost worker's exit code, negative for a signal; None if it was reaped by others.

        A SIGCHLD handler of the user's may have reaped it.
        """
        code: int | None = self._workers[worker_id].process.exitcode
        return code

    def oom_kills(self, worker_id: int) -> int:
        """Count the out-of-memory kills, if a worker was killed by SIGKILL.

        Returns:
            How many processes of our control group the kernel's out-of-memory killer has ended
            since the workers were made; 0 if that is not known, or if the worker ended otherwise.
        """
        if self.exit_code(worker_id) != -signal.SIGKILL or self._oom_kills_before is None:
            return 0
        return (oom_kills(self._groups) or 0) - self._oom_kills_before

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker."""
        return self._workers[worker_id].process.pid or 0

    def was_at(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, or was doing when it died, without its stack."""
        return self._starter.status_page.read(worker_id)

    def usage(self, *, thoroughly: bool) -> list[Usage]:
        """Return what each worker has used, including the workers that it replaced.

        Called from any thread.

        Args:
            thoroughly: Whether to measure the memory, which takes milliseconds for each worker.

        Raises:
            ValueError: If this is closed.
        """
        used = []
        for worker_id, worker in enumerate(self._workers):
            pid = self.pid(worker_id)
            usage = self._starter.status_page.usage(worker_id, pid)
            if thoroughly and not worker.is_lost:
                usage = dataclasses.replace(usage, pss_bytes=measure_memory(pid) or usage.pss_bytes)
            used.append(usage)
        return used

    def ask(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, with its stack. Takes up to a third of a second."""
        return self._starter.status_page.ask(worker_id, self.pid(worker_id))

    # End ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End and reap all workers. May be called again, and from any thread."""
        if self._is_closed:
            return
        if os.getpid() != self._pid:
            self.abandon()
            return
        uninterruptible(self._end_all)

    def _end_all(self) -> None:
        # Set here: an interruption between this and what follows would leak the workers.
        self._is_closed = True
        self._at_exit.cancel()
        # After a Ctrl-C, the second try does not wait for busy workers.
        grace_s, self._grace_s = self._grace_s, 0.0
        for worker in self._workers:
            worker.hang_up()
        if FAULTS is not None:
            FAULTS.reach("main.close")
        end_all(self._workers, grace_s)
        self.readings.close()
        self._waker = None
        self._starter.close()

    def leave_to_parent(self) -> None:
        """Forget the workers in a forked child, which is not their parent.

        ``multiprocessing`` takes them for the child's own, and would end them at its exit.
        """
        self.is_inherited = True
        for worker in self._workers:
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child, which is not the workers' parent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            # Other files may have these numbers by now.
            return
        for worker in self._workers:
            worker.channel.close()
            with contextlib.suppress(OSError):
                os.close(worker.pidfd)
        self._waker = None
        self._starter.abandon()


def _read_usage(reference: "weakref.ref[WorkerProcesses]", thoroughly: bool) -> list[Usage] | None:
    """Return what the workers have used; None if they are gone, or are closed meanwhile."""
    group = reference()
    try:
        return None if group is None else group.usage(thoroughly=thoroughly)
    except ValueError:  # the status page is closed
        return None


def _close_at_exit(reference: "weakref.ref[WorkerProcesses]") -> None:
    group = reference()
    if group is not None:
        group._is_exiting = True
        if FAULTS is not None:
            FAULTS.reach("main.exit")
        group.close()
