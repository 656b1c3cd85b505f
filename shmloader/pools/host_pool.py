"""Workers that all ranks of a host share, as one rank uses them (``worker_scope="host"``).

::

    rank 0 ─┐ HostPool: one connection, held while a loader uses the pool   ┌─ nursery
    rank 1 ─┤ ──────────────────────────────────────────────────────────────┤   starts and reaps
    …       │                                                               └──┬──────┬──────
            ├── one queue for each iterator ── tasks ────────────────────────▶ any worker
            └── one socket pair for each iterator and worker ◀── batches ───── worker 0, worker 1, …

The ranks find each other as those of ``share_on_host`` do (:mod:`shmloader.host`). The rank that
comes first starts the nursery; after that, all ranks are equal. Each rank has a descriptor of each
worker's process, so it sees a worker's death as that of a worker of its own.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.fingerprint import fingerprint, fingerprints_of
from shmloader.batch.payload import Payload
from shmloader.errors import WorkerDiedError
from shmloader.host import Meeting
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.handle import WorkerHandle
from shmloader.pools.nursery import Nursery, start_nursery
from shmloader.pools.nursery_process import Facts, HostStart
from shmloader.pools.starting import pickle_for_workers, remedied
from shmloader.process_state import PROCESS


@dataclass(eq=False)
class HostPool:
    """This rank's part in a pool, which lasts while a loader refers to this object.

    Attributes:
        nursery: The process that owns the workers.
        number: Tells the pools of a run apart, and is the same in all ranks.
        name: The name at which the ranks meet.
        objects: Dataset and ``worker_init_fn``, which are kept alive.
    """

    nursery: Nursery
    number: int
    name: str
    objects: object


def open_host_pool(
    dataset: object,
    worker_init_fn: Callable[[int], None] | None,
    worker_count: int,
    base_seed: int,
    *,
    rank: int = 0,
    is_alone: bool = False,
) -> HostPool:
    """Return this process's pool for a dataset: the one in use, or a new one.

    Args:
        dataset: The dataset. Loaders of one process that have the same object share a pool.
        worker_init_fn: Called in each worker with the worker's number.
        worker_count: The number of workers of the host.
        base_seed: Seeds the workers' random generators, if this rank starts the nursery.
        rank: Number of this rank.
        is_alone: Whether this host has no other rank.

    Raises:
        ValueError: If another rank has begun the pool with other arguments or another dataset.
        RuntimeError: If there are other ranks, and no process group.
        Exception: What pickling the dataset or starting a process raises.
    """
    key = (id(dataset), id(worker_init_fn), worker_count)
    old: HostPool | None = PROCESS.host_pools.get(key)
    if old is not None and old.nursery.is_alive:
        return old
    # A pool whose nursery has ended is replaced under the same number, so that this rank meets the
    # other ranks that have lost the pool, and those that have not opened it yet.
    number = PROCESS.pools_on_host if old is None else old.number
    facts = Facts(
        rank=f"rank {rank} (process {os.getpid()})",
        common={
            "num_workers": worker_count,
            "worker_init_fn": fingerprint(worker_init_fn),
            **fingerprints_of(dataset),
        },
    )
    objects = (dataset, worker_init_fn)
    while True:
        meeting = Meeting(f"workers {number}", "worker_scope='host'", is_alone=is_alone)
        about = meeting, objects, base_seed, facts
        nursery = _start(*about) if meeting.is_host else Nursery(meeting.detach())
        # If the rank that should have started the nursery has failed with an error, this one tries.
        with contextlib.suppress(ConnectionError):
            found = nursery.await_facts()
            break
    _check(facts, found)
    pool = HostPool(nursery, number, meeting.name, objects)
    PROCESS.host_pools[key] = pool
    if old is None and not is_alone:
        PROCESS.pools_on_host = number + 1
    return pool


def _start(meeting: Meeting, objects: tuple[object, ...], *about: Any) -> Nursery:
    """Start the nursery, at which the other ranks will arrive."""
    names = ("dataset", "worker_init_fn")
    with (
        contextlib.closing(meeting),
        remedied(),
        contextlib.closing(pickle_for_workers(objects, names, "spawn")) as payload,
    ):
        return start_nursery(HostStart(meeting.detach(), payload, *about))


def _check(ours: Facts, theirs: Facts) -> None:
    """Check that this rank has the arguments of the rank that began the pool."""
    differing = sorted({name for name, _ in ours.common.items() ^ theirs.common.items()})
    if differing:
        raise ValueError(
            "ranks that share workers (worker_scope='host') should have the same dataset and "
            f"num_workers, and make their loaders in the same order. {ours.rank} differs from "
            f"{theirs.rank} in {', '.join(differing)}. All ranks would get samples of one rank's "
            "dataset. Build it once with share_on_host(), leave what depends on the rank out of "
            "pickling (__getstate__), or use worker_scope='rank'"
        )


class SharedWorkers:
    """Attaches an iterator to the workers of a host, and leaves them.

    Has the methods of :class:`~shmloader.pools.starting.OwnWorkers` but ``finish``: a worker that
    another rank loses is replaced here, too. ``functions`` are (collate_fn, on_error).
    """

    is_shared = True

    def __init__(self, pool: HostPool, functions: tuple[object, object], tasks: TaskConfig) -> None:
        # None once closed: the pool, and the process that owns the workers.
        self._pool: Any = pool
        self.nursery: Any = pool.nursery
        self._functions, self._tasks = functions, tasks
        self._payloads: list[Payload] = []
        self._channel: socket.socket | None = None

    @property
    def lost(self) -> str:
        """Why all workers have ended at once; "" unless they have."""
        if self.nursery is None or self.nursery.is_alive:
            return ""
        return (
            f"Process {self.nursery.pid}, which owns the workers of this host "
            "(worker_scope='host'), has ended, and all workers with it. The next epoch starts new "
            "ones."
        )

    def open(self) -> None:
        """Make what the workers get."""
        self._payloads.append(Payload(self._tasks))
        names = ("collate_fn", "on_error")
        self._payloads.append(pickle_for_workers(self._functions, names, "spawn"))

    def start(self, worker_id: int) -> WorkerHandle:
        """Attach to a worker, which is started unless it runs.

        Raises:
            OSError: If there are no descriptors or processes left.
            RuntimeError: If the nursery has ended.
        """
        self._tasks.page.clear(worker_id)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        try:
            with theirs:
                for payload in self._payloads:
                    payload.send(ours)
                pid, owned = self.nursery.attach(worker_id, theirs.fileno())
            ours.setblocking(False)
            return WorkerHandle(ours, shared=(pid, owned, self.nursery.exit_code))
        except BaseException as error:
            ours.close()
            if isinstance(error, ConnectionError | WorkerDiedError):
                raise RuntimeError(self.lost) from error
            raise
        finally:
            self._channel = None

    def close(self) -> None:
        """Close everything. May be called again, and in a forked child."""
        if self._channel is not None:
            self._channel.close()
        for payload in self._payloads:
            payload.close()
        self._tasks.page.close()
        self._pool = self.nursery = None
