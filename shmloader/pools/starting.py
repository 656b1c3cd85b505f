"""Starts a loader's own worker processes, and keeps what starting another one needs.

With "fork" this process forks each worker. With "spawn" and "forkserver" the nursery does it, if it
may (:mod:`shmloader.pools.nursery`).
"""

import contextlib
import errno
import functools
import logging
import multiprocessing
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import context
from multiprocessing.context import BaseContext
from typing import Any

import torch

from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.payload import ForkedPayload, Payload, unimportable_main_hidden
from shmloader.memory.arena import Arena
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.forking import (
    ForkedProcess,
    ParentDeathPipe,
    is_readable,
    name_of,
    sigint_blocked,
)
from shmloader.pools.handle import WorkerHandle, end_unused
from shmloader.pools.nursery import Nursery, nursery_of_process
from shmloader.pools.worker import WorkerStart, worker_main
from shmloader.process_state import PROCESS
from shmloader.threads import all_parked

_log = logging.getLogger("shmloader")

# How the processes of multiprocessing's own contexts are started.
_KINDS = context.ForkProcess, context.SpawnProcess, context.ForkServerProcess

#: What the user calls the objects that the workers of a loader get.
OBJECT_NAMES = ("dataset", "worker_init_fn", "collate_fn", "on_error")

# A thread that draws holds the lock of torch's generator without the GIL. In a child that is forked
# meanwhile it stays locked, and the child waits for ever as soon as it seeds the generator. So a
# worker that is forked from a process with several threads first takes the lock, and reports that.
# One that does not in this time, which doubles with each try, is killed, and another one is forked.
_FIRST_WAIT_S = 1.0
_TRIES = 7

_LOCKED = (
    "no worker could be forked: another thread draws from torch's random generator all the time, "
    "so its lock is held in each child. Give multiprocessing_context='forkserver'."
)

# It begins with torch's own text, but leaves out torch's advice to use fork.
_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "The error that follows says which part is not."
)

_REMEDIES = {
    errno.EMFILE: "increase the limit using `ulimit -n` in the shell",
    errno.ENFILE: "close files of other programs (the limit is the whole machine's)",
    errno.EAGAIN: "increase the limit on processes (`ulimit -u`, or pids.max of the container)",
    errno.ENOMEM: "make more memory available",
}

_OPEN_IN_WORKER = (
    "Open it in the worker: set it to None in __init__, and create it when it is first used. "
    "worker_init_fn can do that, too: torch.utils.data.get_worker_info().dataset is the worker's "
    "own copy."
)


class OwnWorkers:
    """Starts the workers of one pool, and owns the objects that all of them get.

    Attributes:
        nursery: The process that forks the workers; None if this process starts each of them.
        lost: Why all workers have ended at once. Always "" here.

    Args:
        chosen: The user's multiprocessing context; None for the default one.
        worker_count: The most workers there may be.
        objects: (dataset, worker_init_fn, collate_fn, on_error).
        tasks: How tasks are served.
        base_seed: Seeds the workers' random generators.
        names: What the user calls each of the objects, for the text of an error.
    """

    nursery: Nursery | None = None
    is_shared, lost = False, ""

    def __init__(
        self,
        chosen: BaseContext | None,
        worker_count: int,
        objects: tuple[object, ...],
        tasks: TaskConfig,
        base_seed: int,
        names: Sequence[str] = OBJECT_NAMES,
    ) -> None:
        context: Any = chosen or multiprocessing.get_context()
        self._context, self._method = context, str(context.get_start_method())
        # Whether its processes are multiprocessing's own, and not those of a user's class.
        popen = getattr(self._context.Process, "_Popen", None)
        self._is_plain = popen in [kind._Popen for kind in _KINDS]
        self._objects, self._names = objects, names
        self._worker_count, self._base_seed, self._tasks = worker_count, base_seed, tasks
        self._payload: Payload | ForkedPayload | None = None
        # The main process's end of the socket pair of the worker that is being started.
        self._channel: socket.socket | None = None
        self._parent_death: Any = None

    def open(self) -> None:
        """Make what the workers get, before the first of them is started.

        Raises:
            Exception: If an object cannot be pickled for a start method that needs it.
            OSError: If there are no descriptors or processes left.
        """
        self._parent_death = ParentDeathPipe()
        if self._method == "fork":
            self._payload = ForkedPayload(self._objects)
        else:
            self.nursery = self._find_nursery()  # it imports torch while the dataset is pickled
            self._payload = pickle_for_workers(self._objects, self._names, self._method)
        self._objects = ()

    def start(self, worker_id: int) -> WorkerHandle:
        """Start a worker.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If torch's random generator is locked in each worker that is forked.
        """
        if self._method != "fork" or threading.active_count() == 1:
            return self._start_one(worker_id)
        for tries in range(_TRIES):
            worker = self._start_one(worker_id, reports=True)
            with contextlib.ExitStack() as stack:
                stack.callback(end_unused, worker)
                if is_readable(worker.channel.fileno(), _FIRST_WAIT_S * 2**tries):
                    worker.receive()
                    stack.pop_all()
                    return worker
                _log.warning("worker %s cannot seed torch's generator, and is replaced", worker_id)
        raise RuntimeError(_LOCKED)

    def _start_one(self, worker_id: int, *, reports: bool = False) -> WorkerHandle:
        """Start a worker. With ``reports``, it first reports that torch's generator is free."""
        self._tasks.page.clear(worker_id)
        is_fork = self._method == "fork"
        if not is_fork:
            self.nursery = self._find_nursery(is_awaited=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        shared = self._worker_count, self._base_seed, self._parent_death
        start = WorkerStart(worker_id, *shared, self._tasks, reports)
        closer = functools.partial(close_inherited, self._tasks.arena) if is_fork else None
        arguments = self._payload, theirs, start, closer
        process = self._context.Process(
            target=worker_main, name=name_of(worker_id), args=arguments, daemon=True
        )
        if self._is_plain and (is_fork or self.nursery):
            process._Popen = functools.partial(ForkedProcess, nursery=self.nursery)
        try:
            with (
                theirs,
                sigint_blocked(is_fresh=not is_fork),
                # The other methods copy no threads.
                all_parked() if is_fork else contextlib.nullcontext(),
                unimportable_main_hidden(),
            ):
                if reports:
                    torch.default_generator.get_state()  # waits while it is locked
                process.start()
            ours.setblocking(False)
            return WorkerHandle(ours, process)
        except BaseException:
            ours.close()
            if process.pid is not None:
                process.kill()
                process.join()
            raise
        finally:
            self._channel = None

    def _find_nursery(self, *, is_awaited: bool = False) -> Nursery | None:
        """Return the nursery; None if it must not fork, or if the user's class starts processes."""
        if not self._is_plain or (self._method == "spawn" and PROCESS.imports_threads):
            return None
        nursery = nursery_of_process()
        if is_awaited and nursery.await_facts().has_threads and self._method == "spawn":
            PROCESS.imports_threads = True
            return None
        return nursery

    def finish(self) -> None:
        """Close what only new workers need. No worker may be started afterwards."""
        if self._payload is not None:
            self._payload.close()
        self._payload = None
        if self._parent_death is not None:
            self._parent_death.read.close_all()
        self._tasks.page.close_for_start()

    def close(self) -> None:
        """Close everything. May be called again, and in a forked child."""
        self.nursery = None
        self.finish()
        for resource in (self._channel, self._parent_death, self._tasks.page):
            if resource is not None:
                resource.close()


def pickle_for_workers(objects: tuple[object, ...], names: Sequence[str], method: str) -> Payload:
    """Pickle objects for workers that are started by ``method``.

    Raises:
        Exception: Of the class of the error. Its text names the part that cannot be pickled.
    """
    try:
        return Payload(objects)
    except Exception as error:
        receiver = f"worker processes that are started by {method!r}"
        explained = explain_unpicklable(
            error, find_unpicklable(objects, names), receiver, _OPEN_IN_WORKER
        )
        if explained is not error:
            warnings.warn(_PICKLE_WARNING, stacklevel=2)
            raise explained from error
        raise


def close_inherited(own: Arena | None = None) -> None:
    """Close, in a forked worker, what it inherited of this loader and of others, but its slots."""
    for group in list(PROCESS.worker_groups):
        group.abandon()
    for arena in PROCESS.all_arenas():
        if arena is not own:
            arena.close()
    if own is not None:
        own.leave_to_parent()


@contextlib.contextmanager
def remedied() -> Iterator[None]:
    """Add a remedy to an OSError of a worker's start, if a limit has caused it.

    Raises:
        OSError: With the same number, and the error as its cause.
    """
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        text = f"{error.strerror}: no worker process could be started. Please {remedy}, or lower "
        raise OSError(error.errno, f"{text}num_workers.") from error
