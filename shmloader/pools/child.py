"""The program of a worker process.

It loops: it receives a message, makes the batch, and answers. A worker shares no lock with its
siblings, and once it is ready, it waits only for its own socket and, where any worker may make any
batch, for the queue of tasks. It ends when its socket is closed or shut down, and at once when the
main process dies.
"""

import contextlib
import functools
import gc
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import signal_handling

from shmloader.batch.failures import RemoteError, add_note
from shmloader.batch.sample_rng import seed_worker
from shmloader.errors import InternalError
from shmloader.faults import FAULTS
from shmloader.forked_child import end_if_forked
from shmloader.messages import RECEIVE_BYTES
from shmloader.pools.generator_locks import report_unlocked, unlock_numpy
from shmloader.pools.parent_death import ParentDeathPipe, WorkerParentDeathPipe
from shmloader.pools.status_page import (
    MEMORY_IDLE_MS,
    NO_TASK,
    RECEIVING,
    Line,
    StatusPage,
    WorkerStatusPage,
)
from shmloader.pools.task_queue import LOOK_S, watch_queue
from shmloader.pools.task_server import TaskConfig, TaskServer
from shmloader.pools.waker import LOOKS, let_others_run
from shmloader.pools.worker_dataset import introduce


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The values that a worker gets when it starts.

    Attributes:
        worker_id: Number of the worker, from 0.
        worker_count: The most workers there may be.
        base_seed: Seeds the worker's random generators, together with its number.
        tasks: How tasks are served.
        parent_death: Ends this process with the main process.
        status_page: Where the worker writes what it is doing.
        reports: Whether the worker first reports that torch's generator is not locked.
    """

    worker_id: int
    worker_count: int
    base_seed: int
    tasks: TaskConfig
    parent_death: ParentDeathPipe | WorkerParentDeathPipe
    status_page: StatusPage | WorkerStatusPage
    reports: bool = False


def worker_main(
    payload: Any,
    channel: socket.socket,
    start: WorkerStart,
    close_inherited: Callable[[], None] | None,
) -> None:
    """Run a worker. The target of its process.

    Args:
        payload: Its ``load()`` returns (dataset, collate_fn, worker_init_fn, on_error).
        channel: The worker's end of its socket pair.
        start: What the worker gets.
        close_inherited: In a forked worker, closes what other workers and loaders use; else None.
    """
    channel.setblocking(True)  # whatever socket.setdefaulttimeout() says here
    # Before inherited queues are closed.
    queue = None if start.tasks.queue is None else start.tasks.queue.receiver()
    line = enter_worker(start.worker_id, start.parent_death, start.status_page, close_inherited)
    if close_inherited is not None:
        unlock_numpy()
    if start.reports:
        try:
            report_unlocked(channel)
        except (BrokenPipeError, ConnectionResetError):
            return  # the main process no longer waits
    run_until_closed(channel, functools.partial(_Worker(channel, queue, start, line).run, payload))


def enter_worker(
    worker_id: int,
    parent_death: ParentDeathPipe | WorkerParentDeathPipe,
    status_page: StatusPage | WorkerStatusPage,
    close_inherited: Callable[[], None] | None,
) -> Line:
    """Make this process a worker. Returns its line of the status page."""
    if os.getpid() == parent_death.main_pid:  # a context's Process may be anything
        raise InternalError("the code of a worker process was called in the main process")
    # The garbage collector writes into the headers of objects. The first full collection would
    # write to the pages of all containers that this process shares with the main process, or with
    # the fork server, and the kernel would copy these pages. The collector leaves frozen objects
    # alone; garbage among them stays. The main process does not freeze before the fork, since
    # unfreezing there would also unfreeze what the user, or Python 3.12, has frozen.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if FAULTS is not None:
        FAULTS.worker_id = worker_id
        FAULTS.reach("worker.start")
    parent_death.hold()
    line = status_page.open_line(worker_id)
    if close_inherited is not None:
        close_inherited()
    # Writing to a closed socket must raise, whatever the user's process does about SIGPIPE.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal_handling._set_worker_signal_handlers()  # type: ignore[attr-defined]
    torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    return line


def run_until_closed(channel: socket.socket, run: Callable[[], None]) -> None:
    """Run a worker until its channel is closed. An exception ends the process."""
    # These two mean that the main process is gone or has closed the loader.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), channel:
        try:
            run()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException:  # noqa: BLE001 - a worker's outermost line
            # At once, whatever threads the user's code has: the main process waits for this end.
            traceback.print_exc()
            os._exit(1)


class _Worker:
    """State of a worker between its messages."""

    def __init__(
        self,
        channel: socket.socket,
        queue: socket.socket | None,
        start: WorkerStart,
        line: Line,
    ) -> None:
        self._channel = channel
        self._start = start
        self._line = line
        self._tasks = TaskServer(channel, start.worker_id, start.tasks, line)
        self._poll = select.epoll()
        self._poll.register(channel, select.EPOLLIN)
        self._queue, self._watches_queue = queue, False

    def run(self, payload: Any) -> None:
        """Get ready, then serve until the socket is closed."""
        pid = os.getpid()
        self._prepare(payload)
        del payload
        line, tasks, queue = self._line, self._tasks, self._queue
        while True:
            if os.getpid() != pid:
                end_if_forked(pid)
            line.idle()
            if FAULTS is not None:
                FAULTS.reach("worker.idle")
            receive, data = self._channel.recv, None
            if queue is not None and tasks.uses_queue:
                if line.usage_is_due:  # sometimes, so that the channel is read in a busy worker
                    with contextlib.suppress(BlockingIOError):
                        data = receive(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                receive = queue.recv
            line.held[0] = RECEIVING
            for _ in range(LOOKS if data is None else 0):
                try:
                    data = receive(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                    break
                except BlockingIOError:
                    let_others_run()
            if line.usage_is_due:
                line.note_use(has_task=data is not None)
            if data is None:
                data = self._wait()
            if not data:
                line.note_usage()
                if FAULTS is not None:
                    FAULTS.reach("worker.stop")
                return
            tasks.take(data)
            if tasks.uses_queue is not self._watches_queue:
                self._watch_queue(is_on=tasks.uses_queue)

    def _watch_queue(self, *, is_on: bool) -> None:
        """Receive tasks from the queue from now on, or no longer."""
        assert self._queue is not None
        self._watches_queue = is_on
        if is_on:
            watch_queue(self._poll, self._queue)
        else:
            self._poll.unregister(self._queue)

    def _wait(self) -> bytes:
        """Wait for the next message."""
        line, queue = self._line, self._queue
        line.held[0] = NO_TASK
        if line.memory_is_due and not self._poll.poll(MEMORY_IDLE_MS / 1000):
            line.note_memory()
        while True:
            ready = self._poll.poll(LOOK_S)
            if queue is not None and self._watches_queue:
                line.held[0] = RECEIVING
                with contextlib.suppress(BlockingIOError):
                    return queue.recv(RECEIVE_BYTES)
                line.held[0] = NO_TASK
            if any(fd == self._channel.fileno() for fd, _ in ready):
                return self._channel.recv(RECEIVE_BYTES)

    def _prepare(self, payload: Any) -> None:
        """Load the dataset and the functions, and call ``worker_init_fn``."""
        start, pid = self._start, os.getpid()
        self._tasks.install()
        try:
            try:
                dataset, collate_fn, init_fn, on_error = load(payload)
            finally:
                # After loading, since modules that it imports may seed the generators or draw.
                seed = seed_worker(start.base_seed, start.worker_id)
            introduce(start.worker_id, start.worker_count, seed, dataset, init_fn)
            self._tasks.open(dataset, collate_fn, on_error, by_value=payload.by_value)
        except BaseException:  # noqa: BLE001 - it answers every task
            end_if_forked(pid)
            self._tasks.fail(RemoteError.caught(self._tasks.where))


def load(payload: Any) -> Any:
    """Unpickle the dataset and the functions."""
    try:
        return payload.load()
    except AttributeError as error:
        if str(error).startswith("Can't get attribute"):
            add_note(
                error,
                "The worker has imported the program's main file, but classes and functions under "
                "its main guard are not defined there. Define what the dataset uses above the "
                "guard, or in a module of its own.",
            )
        raise
