"""Starts worker processes, and keeps what starting another one needs. Runs in the main process.

With "fork" this process forks each worker. With "spawn" and "forkserver" the nursery does it, if it
may (:mod:`shmloader.pools.nursery`).

A start for which there are too few descriptors fails before it opens any.
"""

import dataclasses
import errno
import functools
import logging
import os
import socket
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing import context
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.payload import ForkedPayload, Payload, unimportable_main_hidden
from shmloader.faults import FAULTS
from shmloader.interruptions import is_interruption
from shmloader.memory.arena import Arena
from shmloader.pools.child import WorkerStart, worker_main
from shmloader.pools.generator_locks import FIRST_WAIT_S, TRIES, await_torch, has_reported
from shmloader.pools.handle import WorkerHandle, end_unused
from shmloader.pools.main_guard import name_of, refuse_during_import, sigint_held_back
from shmloader.pools.nursery import Nursery, nursery_of_process, start_in
from shmloader.pools.parent_death import ParentDeathPipe
from shmloader.pools.status_page import StatusPage
from shmloader.pools.task_server import TaskConfig
from shmloader.process_state import PROCESS
from shmloader.threads.background import all_parked

_log = logging.getLogger("shmloader")

_LOCKED = (
    "no worker could be forked: another thread draws from torch's random generator all the time, "
    "so its lock is held in each child; give multiprocessing_context='forkserver'"
)

# How many descriptors a start needs. multiprocessing opens up to six for a moment: two pipes, and a
# pipe or a socket to the process that forks. The seventh is the worker's pidfd.
_START_DESCRIPTORS = 7

# How the processes of multiprocessing's own contexts are started.
_POPENS = (context.SpawnProcess._Popen, context.ForkServerProcess._Popen)

#: What the user calls the objects that the workers of a loader get.
OBJECT_NAMES = ("dataset", "collate_fn", "worker_init_fn", "on_error")

# It begins with torch's own text, but leaves out torch's advice to use fork.
_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "The error that follows says which part is not."
)


class WorkerStarter:
    """Starts the workers of one pool, and owns the objects that all of them get.

    Attributes:
        method: The start method: "fork", "spawn" or "forkserver".
        payload: The pickled dataset and functions, or the objects themselves under fork; None
            before :meth:`make_payload` and after :meth:`finish`.
        status_page: Tells what each worker is doing; made by :meth:`open`.
        nursery: The process that forks the workers; None if this process starts each of them.

    Args:
        chosen: The multiprocessing context.
    """

    status_page: StatusPage
    _parent_death: ParentDeathPipe
    _start: WorkerStart

    def __init__(self, chosen: BaseContext) -> None:
        self._context: Any = chosen
        self.method: str = chosen.get_start_method()
        self.payload: Payload | ForkedPayload | None = None
        self.nursery: Nursery | None = None
        # What close() closes.
        self._resources: list[Any] = []
        # The main process's end of the socket pair of the worker that is being started.
        self._channel: socket.socket | None = None

    def open(
        self,
        worker_count: int,
        tasks: TaskConfig,
        base_seed: int,
    ) -> None:
        """Make what the workers share, before the first of them is started.

        Raises:
            OSError: If there are no descriptors left.
            RuntimeError: If this process is importing the program's main file.
        """
        if self.method != "fork":
            # It imports torch while the dataset is pickled.
            self.nursery = self._find_nursery()
        self._parent_death = ParentDeathPipe()
        self._resources.append(self._parent_death)
        self.status_page = StatusPage(worker_count)
        self._resources.append(self.status_page)
        self._start = WorkerStart(
            0, worker_count, base_seed, tasks, self._parent_death, self.status_page,
        )  # fmt: skip

    def make_payload(self, objects: tuple[object, ...], names: Sequence[str]) -> None:
        """Pickle what the workers get, unless they are forked.

        Args:
            objects: What the workers get.
            names: What the user calls each of the objects.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If an object cannot be pickled. The
                text says which part of it.
            Exception: What the objects' own methods raise.
        """
        if self.method == "fork":
            self.payload = ForkedPayload(objects)
            return
        payload = self.payload = pickle_for_workers(objects, names, self.method)
        self._resources.append(payload)

    def start(self, worker_id: int) -> WorkerHandle:
        """Start a worker. Without a payload, the worker waits for one.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If torch's random generator is locked in each worker that is forked.
        """
        if self.method != "fork" or threading.active_count() == 1:
            return self._start_one(worker_id)
        for tries in range(TRIES):
            worker = self._start_one(worker_id, reports=True)
            self._channel = worker.channel  # a child that another thread forks closes it
            try:
                if has_reported(worker, FIRST_WAIT_S * 2**tries):
                    return worker
                _log.warning("worker %s cannot seed torch's generator, and is replaced", worker_id)
            except BaseException:
                end_unused(worker)
                raise
            finally:
                self._channel = None
            end_unused(worker)
        raise RuntimeError(_LOCKED)

    def _start_one(self, worker_id: int, *, reports: bool = False) -> WorkerHandle:
        """Start a worker. With ``reports``, it first reports that torch's generator is free."""
        self.status_page.clear(worker_id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(True)  # whatever socket.setdefaulttimeout() says
        start = dataclasses.replace(self._start, worker_id=worker_id, reports=reports)
        closer = None
        if self.method == "fork":
            closer = functools.partial(close_inherited, start.tasks.arena)
        process = self._context.Process(
            target=worker_main,
            name=name_of(worker_id),
            args=(self.payload, theirs, start, closer),
            daemon=True,
        )
        if self.method != "fork":
            self.nursery = self._find_nursery(is_awaited=True)
        self._channel = ours
        try:
            with (
                theirs,
                sigint_held_back(is_fresh=self.method != "fork"),
                # The other methods copy no threads.
                all_parked() if self.method == "fork" else nullcontext(),
                unimportable_main_hidden(),
            ):
                _check_descriptors(ours)
                if reports:
                    await_torch()
                if self.nursery is None:
                    process.start()
                else:
                    start_in(self.nursery, process)
            self._parent_death.tie(process.pid or 0)
            if FAULTS is not None:
                FAULTS.reach("main.start")
            ours.setblocking(False)
            return WorkerHandle(process, ours)
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
        refuse_during_import()
        has_own = getattr(self._context.Process, "_Popen", None) not in _POPENS
        if has_own or (self.method == "spawn" and PROCESS.imports_threads):
            return None
        nursery = nursery_of_process(keep=self.method == "forkserver")
        if is_awaited and nursery.await_threads() and self.method == "spawn":
            PROCESS.imports_threads = True
            return None
        return nursery

    def finish(self) -> None:
        """Close what only new workers need. No worker may be started afterwards."""
        if self.payload is not None:
            self.payload.close()
        self.payload = None
        self._parent_death.close_read()
        self.status_page.close_for_start()

    def close(self) -> None:
        """Close everything. May be called again."""
        self.nursery = None
        for resource in self._resources:
            resource.close()

    def abandon(self) -> None:
        """Close everything in a forked child, which another thread may have forked at any time."""
        if self._channel is not None:
            self._channel.close()
        self.close()


_OPEN_IN_WORKER = (
    "Open it in the worker: set it to None in __init__, and create it when it is first used, or in "
    "worker_init_fn (torch.utils.data.get_worker_info().dataset is the worker's own copy)."
)


def pickle_for_workers(objects: tuple[object, ...], names: Sequence[str], method: str) -> Payload:
    """Pickle the objects for workers that ``method`` starts; see ``make_payload``."""
    try:
        return Payload(objects)
    except Exception as error:
        if is_interruption(error):
            raise
        _raise_explained(error, objects, names, method)


def _raise_explained(
    error: Exception, objects: tuple[object, ...], names: Sequence[str], method: str
) -> NoReturn:
    """Raise an error of pickling again, with a text that names the part that cannot be pickled.

    Raises:
        Exception: An exception of the same class as ``error``.
    """
    receiver = f"worker processes that are started by {method!r}"
    explained = explain_unpicklable(
        error, find_unpicklable(objects, names), receiver, _OPEN_IN_WORKER
    )
    if explained is error:
        raise error
    try:
        raise explained from error
    except Exception:
        warnings.warn(_PICKLE_WARNING, stacklevel=2)
        raise
    finally:
        del error, explained  # their tracebacks hold this frame


def close_inherited(own: Arena | None = None) -> None:
    """Close, in a forked worker, what it inherited of this loader and of others, but its slots."""
    for group in list(PROCESS.worker_groups):
        group.abandon()
    for arena in PROCESS.all_arenas():
        if arena is not own:
            arena.close()
    if own is not None:
        own.leave_to_parent()


def _check_descriptors(any_socket: socket.socket) -> None:
    """Make sure that a start does not fail halfway for want of descriptors.

    multiprocessing leaves its first pipe open when there is no descriptor for the second.

    Args:
        any_socket: A socket whose descriptor is duplicated as a trial.

    Raises:
        OSError: EMFILE or ENFILE, if there are too few descriptors left.
    """
    spare: list[int] = []
    try:
        while len(spare) < _START_DESCRIPTORS:
            spare.append(os.dup(any_socket.fileno()))
    finally:
        for descriptor in spare:
            os.close(descriptor)


def raise_with_remedy(error: OSError) -> None:
    """Raise an error of a worker's start again, with a remedy, if a limit has caused it.

    Returns if the error has another cause.

    Raises:
        OSError: With the same number, a text that names the remedy, and ``error`` as its cause.
    """
    remedy = {
        errno.EMFILE: "increase the limit using `ulimit -n` in the shell",
        errno.ENFILE: "close files of other programs (the limit is the whole machine's)",
        errno.EAGAIN: "increase the limit on processes (`ulimit -u`, or pids.max of the container)",
        errno.ENOMEM: "make more memory available",
    }.get(error.errno or 0)
    if remedy is not None:
        text = f"{error.strerror}: no worker process could be started. Please {remedy}, or lower "
        raise OSError(error.errno, f"{text}num_workers.") from error
