"""The sockets of a pool's workers, and their queue of tasks, as the main process uses them.

One selector waits for all of them. This module only moves bytes: it knows neither batches nor how
workers start, which ``worker_processes`` adds.

Guarantees:
    * A send never blocks. What a socket refuses waits here, in order.
    * Everything that a worker sent before it died is received before its death is reported.

Assumes that one thread at a time calls the methods, except those that say otherwise.
"""

import dataclasses
import functools
import math
import multiprocessing.util
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from shmloader.faults import FAULTS
from shmloader.insight.measurements import Readings, Usage
from shmloader.pools.answers import Death
from shmloader.pools.handle import WorkerChannel
from shmloader.pools.status_page import (
    FIRST_TASK,
    RECEIVING,
    AtWork,
    StatusPage,
    measure_memory,
)
from shmloader.pools.task_queue import TaskQueue
from shmloader.pools.waker import LOOKS, Waker, let_others_run
from shmloader.process_state import PROCESS
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.threads.wakeup import SIGNAL_S

# A worker receives in some microseconds. One that takes this long is stopped.
_RECEIVING_S = 2.0
_LOOK_S = 0.0002

_Channel = TypeVar("_Channel", bound=WorkerChannel)


class WorkerChannels(Generic[_Channel]):
    """The sockets of workers, some of which may be replaced, added or retired.

    Attributes:
        readings: Memory and CPU time of the workers.
        is_inherited: Whether this is a forked child of the process that uses the workers.
        is_waiting: Whether ``wait`` waits, or was left by an exception while it waited. In that
            state every message that was taken from a worker has been returned.
        channels: The workers, by number.
        looks: How often :meth:`look` looks.
        queue: The queue from which the workers receive their tasks; None if each task is sent to
            one worker's socket. Closed with this object.

    Args:
        queue: The queue, or None.
    """

    looks = LOOKS

    def __init__(self, queue: TaskQueue | None) -> None:
        self.queue = queue
        self._pid = os.getpid()
        self._workers: list[_Channel] = []
        self.channels = self._workers
        self._is_closed = False
        self._is_exiting = False
        self.is_waiting = self.is_inherited = False
        self._waker: Waker | None = None
        self._is_woken = False
        self._poll = select.poll()
        # Worker numbers by socket descriptor.
        self._by_fd: dict[int, int] = {}
        self.readings = Readings()
        # At the interpreter's exit multiprocessing waits for ever for a daemonic process that is
        # stopped. This finalizer runs first, regardless of the order of registration.
        self._at_exit = multiprocessing.util.Finalize(
            None, _close_at_exit, args=(weakref.ref(self),), exitpriority=100
        )
        # From here on another thread may fork a worker, which then abandons this object.
        PROCESS.worker_groups.add(self)

    def _open_readings(self) -> None:
        self.readings.open(functools.partial(_read_usage, weakref.ref(self)))

    # What depends on who started the workers ------------------------------------------------

    @property
    def _status_page(self) -> StatusPage:
        """The page on which the workers show this process what they are doing."""
        raise NotImplementedError

    def _take_notice(self, fd: int) -> Iterable[tuple[int, bytes | None]]:
        """Handle an event of a descriptor that is no worker's socket. Returns as :meth:`wait`."""
        raise NotImplementedError

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes that this process started, by number."""
        return []

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker; 0 if it is not known yet."""
        raise NotImplementedError

    def death(self, worker_id: int) -> Death:
        """Return how a lost worker ended."""
        raise NotImplementedError

    def kill(self, worker_id: int) -> None:
        """Kill a worker. ``wait`` will report its death."""
        raise NotImplementedError

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of a lost one. The new worker has been sent nothing yet.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If torch's random generator is locked in each worker that is forked, or
                if the process that owns shared workers has ended.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        raise NotImplementedError

    def start(self, worker_id: int) -> None:
        """Start a worker for the first time, or after ``retire``. Raises as :meth:`replace`."""
        raise NotImplementedError

    def retire(self, worker_id: int) -> None:
        """End an idle worker, and reap it. ``start`` can start it again."""
        raise NotImplementedError

    def _end_all(self) -> None:
        """End everything. :meth:`close` runs it again if a signal handler interrupts it."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child, which does not use the workers."""
        raise NotImplementedError

    def leave_to_parent(self) -> None:
        """Forget the workers in a forked child, which does not use them."""
        self.is_inherited = True

    # Messages ----------------------------------------------------------------------------

    def send(self, worker_id: int, data: bytes) -> None:
        """Send a message to a worker, without blocking. A message to a dead worker is dropped."""
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        if not worker.outbox:
            try:
                worker.channel.send(data)
            except BlockingIOError:
                pass
            except ConnectionError:
                return  # the worker is dying, as its pidfd will show
            else:
                return
        worker.outbox.append(data)
        self._poll.modify(worker.channel, select.POLLIN | select.POLLOUT)

    def put(self, data: bytes) -> None:
        """Send a task to the queue, without blocking."""
        assert self.queue is not None
        if not self.queue.send(data):
            self._poll.register(self.queue.sender, select.POLLOUT)

    def enable_wake(self) -> None:
        """Enable :meth:`wake`. Called before another thread uses this."""
        self._waker = Waker()
        self._poll.register(self._waker.fd, select.POLLIN)

    def wake(self) -> None:
        """Make the present or the next ``wait`` return. Called from any thread.

        Does nothing after ``close``.
        """
        waker = self._waker
        self._is_woken = True
        # `wait` accesses the two flags in the opposite order, so one side sees the other's.
        if waker is not None and self.is_waiting:
            waker.wake()

    def look(self) -> list[tuple[int, bytes | None]]:
        """Return what has come or is about to come, as :meth:`wait` does. Never sleeps."""
        for _ in range(self.looks):
            if self._is_closed:
                break
            if events := self._poll.poll(0):
                return self._receive(events, self._waker)
            let_others_run()
        return []

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
        if self._has_been_closed():  # by another thread, meanwhile
            if self._is_exiting and threading.current_thread().daemon:
                # The interpreter exits. A daemon thread must not return to its caller any more.
                threading.Event().wait()
            return []
        return self._receive(events, waker)

    def _receive(
        self, events: list[tuple[int, int]], waker: Waker | None
    ) -> list[tuple[int, bytes | None]]:
        """Receive a message from each worker that has sent one, and then the news of deaths."""
        happened: list[tuple[int, bytes | None]] = []
        notices: list[tuple[int, bytes | None]] = []
        queue = self.queue
        for fd, event in events:
            worker_id = self._by_fd.get(fd)
            if worker_id is None:
                if waker is not None and fd == waker.fd:
                    waker.reset()
                elif queue is not None and fd == queue.sender.fileno():
                    if queue.flush():
                        self._poll.unregister(fd)
                else:
                    notices.extend(self._take_notice(fd))
                continue
            worker = self._workers[worker_id]
            if not worker.is_lost:
                if event & select.POLLOUT and worker.flush():
                    self._poll.modify(worker.channel, select.POLLIN)
                data = worker.receive()
                if data is not None:
                    happened.append((worker_id, data))
                elif event & (select.POLLHUP | select.POLLERR):
                    # The socket is closed. An event of another descriptor will soon say why.
                    self._poll.unregister(worker.channel)
        return happened + notices

    def _has_been_closed(self) -> bool:
        return self._is_closed

    def receive_all(self) -> list[tuple[int, bytes]]:
        """Return all messages that living workers have sent."""
        happened = []
        for worker_id, worker in enumerate(self._workers):
            while not worker.is_lost and (data := worker.receive()) is not None:
                happened.append((worker_id, data))
        return happened

    def held(self) -> set[int]:
        """Return the numbers of the tasks that living workers have received from the queue.

        Called when the queue is empty. Waits for workers that may be receiving. One that does not
        leave that state, since it is stopped, is killed.
        """
        held = set()
        for worker_id, worker in enumerate(self._workers):
            deadline = time.monotonic() + _RECEIVING_S
            page = self._status_page
            while (
                not worker.is_lost
                and (found := page.held(worker_id)) == RECEIVING
                and not worker.has_ended
            ):
                if time.monotonic() > deadline:
                    self.kill(worker_id)
                    deadline = math.inf
                time.sleep(_LOOK_S)
            if not worker.is_lost and found >= FIRST_TASK:
                held.add(found - FIRST_TASK)
        return held

    # What the workers do ------------------------------------------------------------------

    def was_at(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, or was doing when it died, without its stack."""
        return self._status_page.read(worker_id)

    def usage(self, *, thoroughly: bool) -> list[Usage]:
        """Return the memory and time that each worker, with those it replaced, has used.

        Called from any thread.

        Args:
            thoroughly: Whether to measure the memory, which takes milliseconds for each worker.

        Raises:
            ValueError: If this is closed.
        """
        used = []
        for worker_id, worker in enumerate(self._workers):
            pid = self.pid(worker_id)
            usage = self._status_page.usage(worker_id, pid)
            if thoroughly and pid and not worker.is_lost:
                usage = dataclasses.replace(usage, pss_bytes=measure_memory(pid) or usage.pss_bytes)
            used.append(usage)
        return used

    def ask(self, worker_id: int) -> AtWork:
        """Return what a worker is doing, with its stack. Takes up to a third of a second."""
        pid = self.pid(worker_id)
        return self._status_page.ask(worker_id, pid) if pid else self.was_at(worker_id)

    # End ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers, or stop using them. May be called again, and from any thread."""
        if self._is_closed:
            return
        if os.getpid() != self._pid:
            self.abandon()
            return
        uninterruptible(self._end_all)


def _read_usage(
    reference: "weakref.ref[WorkerChannels[Any]]", thoroughly: bool
) -> list[Usage] | None:
    """Return what the workers have used; None if they are gone, or closed meanwhile."""
    group = reference()
    try:
        return None if group is None else group.usage(thoroughly=thoroughly)
    except ValueError:  # the status page is closed
        return None


def _close_at_exit(reference: "weakref.ref[WorkerChannels[Any]]") -> None:
    group = reference()
    if group is not None:
        group._is_exiting = True
        if FAULTS is not None:
            FAULTS.reach("main.exit")
        group.close()
