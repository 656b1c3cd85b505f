"""The worker processes of a pool, as the main process sees them.

Owns one ``SOCK_SEQPACKET`` socket pair for each worker, and a descriptor of its process. What
starts and ends the workers is :class:`~shmloader.pools.starting.OwnWorkers`, or, if the ranks of a
host share them, :class:`~shmloader.pools.host_pool.SharedWorkers`. ``worker_channels`` sends and
receives.

Guarantees:
    * ``close`` ends every worker within a bounded time, even a stopped or hung one, reaps it,
      and leaves no descriptor. It only leaves workers that other ranks share. Called again, or in
      a forked child, it ends no process.

Assumes that one thread at a time calls the methods, except ``close``.
"""

import contextlib
import multiprocessing.process
import select
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.pools.answers import Death
from shmloader.pools.handle import KILL_S, WorkerHandle, end_unused
from shmloader.pools.starting import raise_with_remedy
from shmloader.pools.status_page import Phase, StatusPage
from shmloader.pools.task_server import TaskConfig
from shmloader.pools.waker import SHARED_LOOKS
from shmloader.pools.worker_channels import WorkerChannels

# How long close() waits for a worker to end by itself: the worker may be loading a sample.
_GRACE_S = 1.0


class WorkerProcesses(WorkerChannels[WorkerHandle]):
    """Worker processes, of which the first ``count`` are started at once.

    Args:
        starter: Starts and ends the workers. This object owns it from now on.
        tasks: How tasks are served.
        count: How many workers are started now; ``start`` starts the others.
        may_replace: Whether ``start`` or ``replace`` will be called. If so, everything that
            starting a worker needs is kept.
        grace_s: How long ``close`` waits for workers to end by themselves.

    Raises:
        Exception: What ``starter.open()`` and ``starter.start()`` raise.
    """

    def __init__(
        self,
        starter: Any,
        tasks: TaskConfig,
        count: int,
        *,
        may_replace: bool = True,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._starter = starter
        if starter.is_shared:
            self.looks = SHARED_LOOKS
        self._grace_s = grace_s
        # Worker numbers by the descriptors of their processes.
        self._by_pidfd: dict[int, int] = {}
        # From here on, a child that another thread forks abandons this.
        super().__init__(tasks.own_queue)
        try:
            starter.open()
            if self._is_closed:  # at the interpreter's exit
                starter.close()
            for worker_id in range(count):
                self._check_open()
                self._workers.append(self._start_worker(worker_id))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise_with_remedy(error)
            raise
        self._open_readings()
        if not may_replace:
            starter.finish()

    @property
    def _status_page(self) -> StatusPage:
        page: StatusPage = self._starter.page
        return page

    @property
    def nursery(self) -> Any:
        """The process that forks the workers; None if this process starts each of them."""
        return self._starter.nursery

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes that this process has started, by number."""
        return [worker.process for worker in self._workers if worker.process is not None]

    # Start -------------------------------------------------------------------------------

    def _start_worker(self, worker_id: int) -> WorkerHandle:
        worker: WorkerHandle = self._starter.start(worker_id)
        self._by_fd[worker.channel.fileno()] = self._by_pidfd[worker.pidfd] = worker_id
        for fd in (worker.channel.fileno(), worker.pidfd):
            self._poll.register(fd, select.POLLIN)
        return worker

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of a lost one. The new worker has been sent nothing yet.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If torch's random generator is locked in each worker that is forked, or
                if the process that owns shared workers has ended.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        for old in self._workers[worker_id : worker_id + 1]:
            old.channel.close()
            old.close_pidfd()
        try:
            self._check_open()
            new = self._start_worker(worker_id)
        except Exception as error:
            self._check_open(error)
            if isinstance(error, OSError):
                raise_with_remedy(error)
            raise
        self._workers[worker_id : worker_id + 1] = [new]
        if self._is_closed:  # a close on another thread may have missed it
            end_unused(new)
            self._check_open()

    #: Starts a worker for the first time, or after ``retire``. Raises as :meth:`replace`.
    start = replace

    def _check_open(self, cause: Exception | None = None) -> None:
        if self._is_closed:
            raise ClosedLoaderError("the workers have been ended") from cause

    def kill(self, worker_id: int) -> None:
        """Kill a worker. ``wait`` will report its death."""
        worker = self._workers[worker_id]
        if not worker.is_lost:
            worker.send_signal(signal.SIGKILL)

    def retire(self, worker_id: int) -> None:
        """End or leave an idle worker. ``start`` can start it again."""
        worker = self._workers[worker_id]
        if not (worker.is_lost or self._is_closed):
            self._lose(worker)
            worker.hang_up()
            self._starter.end([worker], self._grace_s)

    def _lose(self, worker: WorkerHandle) -> None:
        """Stop using a worker."""
        worker.is_lost = True
        worker.outbox.clear()
        self._by_fd.pop(worker.channel.fileno(), None)
        self._by_pidfd.pop(worker.pidfd, None)
        for fd in (worker.channel.fileno(), worker.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(fd)

    def _take_notice(self, fd: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield a dead worker's last messages, reap it, and yield None for its loss."""
        worker_id = self._by_pidfd.get(fd)
        if worker_id is None:  # it was lost meanwhile
            return
        worker = self._workers[worker_id]
        while (data := worker.receive()) is not None:
            yield worker_id, data
        self._lose(worker)
        worker.reap(time.monotonic() + KILL_S)
        yield worker_id, None

    # What the workers do ------------------------------------------------------------------

    def death(self, worker_id: int) -> Death:
        """Return how a lost worker ended.

        Its exit code is not known if, for instance, a SIGCHLD handler of the user's has reaped it.
        """
        worker, starter = self._workers[worker_id], self._starter
        code = worker.exit_code
        # One that was idle for this rank was loading a batch of another one, or was ended outside.
        was_elsewhere = starter.is_shared and self.was_at(worker_id).phase is Phase.IDLE
        return Death(
            worker.pid,
            code,
            was_elsewhere=was_elsewhere,
            because=starter.lost,
        )

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker."""
        return self._workers[worker_id].pid

    # End ---------------------------------------------------------------------------------

    def _end_all(self) -> None:
        # Set here, not in close(): an interruption between the two would leak the workers.
        self._is_closed = True
        self._at_exit.cancel()
        # After a Ctrl-C, the second try does not wait for busy workers.
        grace_s, self._grace_s = self._grace_s, 0.0
        if self.queue is not None:
            self.queue.recall()  # a worker that is busy begins no further task
        for worker in self._workers:
            worker.hang_up()
        if FAULTS is not None:
            FAULTS.reach("main.close")
        self._starter.end(self._workers, grace_s)
        self.readings.close()
        self._waker = None
        if self.queue is not None:
            self.queue.close()
        self._starter.close()

    def leave_to_parent(self) -> None:
        """Forget the workers in a forked child, which is not their parent.

        ``multiprocessing`` takes them for children of this child, and would end them at its exit.
        Shared workers would take the child's copies of the sockets for living ranks.
        """
        super().leave_to_parent()
        for worker in self._workers:
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
            if self._starter.is_shared:
                worker.channel.close()

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child, which is not the workers' parent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            # Other files may have the numbers of these descriptors by now.
            return
        for worker in self._workers:
            worker.channel.close()
            with contextlib.suppress(OSError):
                worker.close_pidfd()
        self._waker = None
        if self.queue is not None:
            self.queue.close()
        self._starter.close()
