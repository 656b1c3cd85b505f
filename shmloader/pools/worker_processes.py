"""The worker processes of a pool, as the main process sees them.

Owns the processes, one ``SOCK_SEQPACKET`` socket pair for each, and their pidfds.
``worker_channels`` sends and receives.

Guarantees:
    * ``close`` ends every worker within a bounded time, even a stopped or hung one, reaps it,
      and leaves no descriptor. Called again, or in a forked child, it ends no process.

Assumes that one thread at a time calls the methods, except ``close``.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import select
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.memory.limits import OomKills
from shmloader.pools.answers import Death
from shmloader.pools.handle import KILL_S, WorkerHandle, end_all, end_unused
from shmloader.pools.nursery import Nursery
from shmloader.pools.starting import OBJECT_NAMES, WorkerStarter, raise_with_remedy
from shmloader.pools.status_page import StatusPage
from shmloader.pools.task_server import TaskConfig
from shmloader.pools.worker_channels import WorkerChannels

# How long close() waits for a worker to end by itself: the worker may be loading a sample.
_GRACE_S = 1.0


class WorkerProcesses(WorkerChannels[WorkerHandle]):
    """Worker processes that this process starts, at most ``worker_count`` at a time."""

    def __init__(
        self,
        context: BaseContext | None,
        worker_count: int,
        objects: tuple[object, ...],
        tasks: TaskConfig,
        base_seed: int,
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
            tasks: How tasks are served.
            base_seed: Seeds the workers' random generators.
            may_replace: Whether ``start`` or ``replace`` will be called. If so, everything that
                starting a worker needs is kept.
            grace_s: How long ``close`` waits for workers to end by themselves.
            started: How many workers are started now; ``start`` starts the others. None for all.
            names: What the user calls each of the objects, for the text of an error.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If ``objects`` cannot be pickled for
                a start method that needs it.
            OSError: If there are no descriptors or processes left.
            RuntimeError: If this process is importing the program's main file, or torch's random
                generator is locked in each worker that is forked.
        """
        self._starter = WorkerStarter(context or multiprocessing.get_context())
        self._grace_s = grace_s
        self._oom_kills = OomKills(Path("/" if tasks.memory is None else tasks.memory.root))
        # Worker numbers by pidfd, which is readable when the worker has ended.
        self._by_pidfd: dict[int, int] = {}
        # Last: from here on, a child that another thread forks abandons this.
        super().__init__(tasks.own_queue)
        try:
            self._starter.open(worker_count, tasks, base_seed)
            self._start_first(worker_count if started is None else started, objects, names)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise_with_remedy(error)
            raise
        self._open_readings()
        if not may_replace:
            self._starter.finish()

    @property
    def _status_page(self) -> StatusPage:
        return self._starter.status_page

    @property
    def nursery(self) -> Nursery | None:
        """The process that forks the workers; None if this process starts each of them."""
        return self._starter.nursery

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes, by number."""
        return [worker.process for worker in self._workers]

    # Start -------------------------------------------------------------------------------

    def _start_first(self, count: int, objects: tuple[object, ...], names: Sequence[str]) -> None:
        """Pickle the objects for the workers, and start the first ``count`` of them."""
        self._starter.make_payload(objects, names)
        if self._is_closed:  # at the interpreter's exit
            self._starter.close()
            self._check_open()
        for worker_id in range(count):
            self._workers.append(self._start_worker(worker_id))

    def _start_worker(self, worker_id: int) -> WorkerHandle:
        worker = self._starter.start(worker_id)
        self._by_fd[worker.channel.fileno()] = self._by_pidfd[worker.pidfd] = worker_id
        for fd in (worker.channel.fileno(), worker.pidfd):
            self._poll.register(fd, select.POLLIN)
        return worker

    def replace(self, worker_id: int) -> None:
        """Start a worker in place of a lost one. The new worker has been sent nothing yet.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If torch's random generator is locked in each worker that is forked.
            ClosedLoaderError: If another thread closes this meanwhile.
        """
        if worker_id < len(self._workers):
            self._forget(worker_id)
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

    def _forget(self, worker_id: int) -> None:
        """Close what is left of a lost worker."""
        old = self._workers[worker_id]
        assert old.is_lost
        self._by_fd.pop(old.channel.fileno(), None)
        self._by_pidfd.pop(old.pidfd, None)
        old.channel.close()
        old.close_pidfd()

    def kill(self, worker_id: int) -> None:
        """Kill a worker. ``wait`` will report its death."""
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
        self._by_fd.pop(worker.channel.fileno(), None)
        self._by_pidfd.pop(worker.pidfd, None)
        worker.hang_up()
        end_all([worker], grace_s)

    def _note_lost(self, worker: WorkerHandle) -> None:
        """Stop using a worker."""
        worker.is_lost = True
        worker.outbox.clear()
        for fd in (worker.channel.fileno(), worker.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._poll.unregister(fd)

    def _take_notice(self, fd: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield a dead worker's last messages, reap it, and yield None for its loss."""
        worker_id = self._by_pidfd[fd]
        worker = self._workers[worker_id]
        if worker.is_lost:
            return
        while (data := worker.receive()) is not None:
            yield worker_id, data
        self._note_lost(worker)
        worker.reap(time.monotonic() + KILL_S)
        yield worker_id, None

    # What the workers do ------------------------------------------------------------------

    def death(self, worker_id: int) -> Death:
        """Return how a lost worker ended.

        Its exit code is not known if, for instance, a SIGCHLD handler of the user's has reaped it.
        """
        code = self._workers[worker_id].process.exitcode
        return Death(self.pid(worker_id), code, self._oom_kills.since(code))

    def pid(self, worker_id: int) -> int:
        """Return the process id of a worker."""
        return self._workers[worker_id].process.pid or 0

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
        end_all(self._workers, grace_s)
        self.readings.close()
        self._waker = None
        if self.queue is not None:
            self.queue.close()
        self._starter.close()

    def leave_to_parent(self) -> None:
        """Forget the workers in a forked child, which is not their parent.

        ``multiprocessing`` takes them for children of this child, and would end them at its exit.
        """
        super().leave_to_parent()
        for worker in self._workers:
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]

    def abandon(self) -> None:
        """Close this object's descriptors in a forked child, which is not the workers' parent."""
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            # Other files may have the numbers of these descriptors by now.
            return
        for worker in self._workers:
            worker.channel.close()
            with contextlib.suppress(OSError):
                os.close(worker.pidfd)
        self._waker = None
        if self.queue is not None:
            self.queue.close()
        self._starter.abandon()
