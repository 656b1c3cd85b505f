"""What an iterator gets from its loader: the arguments, and the parts that its iterators share.

Users may set the attributes of a loader between epochs. So each iterator makes a
:class:`LoaderConfig` of them when it begins, and passes it on. Worker processes get the settings
about batches (``FetchConfig``) and those about memory (``MemoryConfig``).
"""

import concurrent.futures
import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shmloader.batch.failures import OnError
from shmloader.batch.fetch import FetchConfig
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints, StateCost
from shmloader.engine.failures import FailedSample, FailureList, FailureWatch
from shmloader.insight.record import Statistics
from shmloader.loader.options import LEND_LIMIT, LOOP_HOLDS, WorkerScope, slot_share
from shmloader.pools.adapting import Adapter
from shmloader.sampling.dataset_epoch import DatasetEpoch

if TYPE_CHECKING:  # imported where they are used: most loaders have none of these
    from shmloader.device.device import Destination
    from shmloader.loader.local_checkpoint import LocalCheckpoint
    from shmloader.pools.host_pool import HostPool
    from shmloader.pools.process_numbers import ProcessNumbers


class LoaderConfig(NamedTuple):
    """The arguments of a loader, checked, in the form in which its parts use them.

    Those from ``num_workers`` on are set only with workers.

    Attributes:
        fetch: How a batch is fetched and collated; sent to the workers.
        dataset: The dataset.
        collate_fn: Makes a batch of samples.
        on_error: How a sample that fails is handled.
        max_failures: How many samples may fail in an epoch; None for any number.
        saves_dataset: Whether states of the loader contain states of the dataset.
        devices: Where each batch of a step arrives; None for the CPU. Only one, unless
            ``has_steps``.
        has_steps: Whether each step is a list of batches, one for each device.
        device_transform: Called with each batch on the device; None for no call.
        num_workers: Number of workers to begin with.
        most_workers: Maximum number of workers; more than ``num_workers`` only with "auto".
        prefetch_factor: Batches in flight per worker; 0 without workers.
        fixed_window: Batches in flight, if that does not depend on the workers; otherwise None.
        in_order: Whether batches are delivered in the sampler's order.
        is_dynamic: Whether a batch may come from any worker (dynamic dispatch).
        timeout_s: Seconds to wait for a batch; 0 waits forever.
        worker_init_fn: Called in each worker with its number.
        worker_restarts: Number of dead workers that are replaced in an epoch.
        multiprocessing_context: A multiprocessing context; None for the default one.
        executor: The executor whose tasks make the batches; None for workers of our own.
        shm_bytes: Maximum shared memory of one iterator, in bytes; None for no maximum.
        device_prefetch: Number of batches that may be ready on the device.
        root: Directory that contains ``proc`` and ``sys``.
        worker_scope: Whether the workers are this rank's own, or shared by the ranks of its host.
        rank: Number of this rank, where ranks share the workers.
        host_rank: Number of this rank on its host.
        host_ranks: How many ranks share the workers; 1 unless those are the host's.
    """

    fetch: FetchConfig
    dataset: Any
    collate_fn: Callable[[Any], Any]
    on_error: OnError
    max_failures: int | Fraction | None
    saves_dataset: bool
    devices: tuple[torch.device | None, ...]
    has_steps: bool
    device_transform: Callable[[Any], Any] | None
    num_workers: int = 0
    most_workers: int = 0
    prefetch_factor: int = 0
    fixed_window: int | None = None
    in_order: bool = True
    is_dynamic: bool = False
    timeout_s: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    worker_restarts: int = 0
    multiprocessing_context: Any = None
    executor: concurrent.futures.Executor | None = None
    shm_bytes: int | None = None
    device_prefetch: int = 0
    root: str = "/"
    worker_scope: WorkerScope = "rank"
    rank: int = 0
    host_rank: int = 0
    host_ranks: int = 1

    @property
    def kind(self) -> str:
        """The kind of workers, by its name in the statistics."""
        if self.executor is not None:
            return "executor"
        return "threads" if self.fetch.is_threaded else "processes"

    @property
    def has_device(self) -> bool:
        """Whether a batch is copied to a device."""
        return self.devices.count(None) < len(self.devices)

    @property
    def may_replace_workers(self) -> bool:
        """Whether worker processes may be started while an epoch runs."""
        is_auto = self.most_workers > self.num_workers
        return self.worker_restarts > 0 or is_auto or self.fetch.sample_timeout_s is not None

    def window_of(self, worker_count: int) -> int:
        """Return how many batches are in flight with ``worker_count`` workers.

        If ranks share the workers, each rank has as many batches in flight as its share of the
        workers would have, so that the ranks together do not take much more memory. A rank has one
        more if that is fewer than the workers. With it, a rank whose samples are five times as
        expensive needs 0.58 or less of the time that its share of the workers alone would need;
        without it, 0.6 or more (8 of 64 workers, ``prefetch_factor=2``).
        """
        if self.fixed_window:
            return self.fixed_window
        own_count = -(-worker_count // self.host_ranks)
        window = own_count * self.prefetch_factor
        return window + 1 if self.host_ranks > 1 and window < worker_count else window

    @property
    def window(self) -> int:
        """Batches in flight at the beginning."""
        return self.window_of(self.num_workers)

    @property
    def most_window(self) -> int:
        """Maximum number of batches in flight."""
        return self.window_of(self.most_workers)

    @property
    def lend_limit(self) -> int:
        """Batches that may be lent to the user, uncopied, at the same time."""
        return max(LEND_LIMIT, self.device_prefetch + 2) if self.has_device else LEND_LIMIT

    @property
    def loop_holds(self) -> int:
        """Batches that are lent at the same time in a plain loop."""
        return self.device_prefetch + 2 if self.has_device else LOOP_HOLDS

    @property
    def slot_bytes(self) -> int | None:
        """Each slot's share of ``shm_bytes``; None without a maximum."""
        if self.shm_bytes is None:
            return None
        return slot_share(self.shm_bytes, self.most_window + self.lend_limit)

    def watch_failures(self, parts: "LoaderParts") -> FailureWatch | None:
        """Return the watch that records in ``failures``; None if the first failure is raised."""
        if self.on_error == "raise" or self.fetch.is_iterable:
            return None
        return FailureWatch(
            parts.failures,
            self.max_failures,
            keep_size=self.fetch.keep_size,
            replaces=callable(self.on_error),
        )


class BeginLock:
    """Lock that a thread holds while it begins an epoch. In a forked child it is free again."""

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()

    def present(self) -> threading.RLock:
        """Return the lock of this process."""
        if self._pid != os.getpid():  # it may be held by a thread that the child does not have
            self._pid, self._lock = os.getpid(), threading.RLock()
        return self._lock


class LoaderParts:
    """The parts that all iterators of a loader share. A copy or a pickle of the loader has its own.

    Attributes:
        adapter: Decides how many workers there are, with ``num_workers="auto"``.
        begin_lock: Held by the thread that begins an epoch.
        host_pool: The workers that the ranks of this host share; None if the loader has its own.
        nursery: The process that forks the workers. Kept, so that the next epoch need not start it.
        statistics: The records of all epochs.
        destination: The opened devices; None before the first iterator that copies to a device.
        checkpoints: Positions or states of the workers' datasets in the newest epoch.
        resumed_checkpoints: Those from which the next new iterator resumes; None to begin anew.
        loaded_generators: The states of the process's global generators that the dataset's
            ``load_state_dict()`` has set for the epoch that begins, without workers.
        executor_key: Identifies the loader in processes of an executor; empty before the first
            epoch.
        process_numbers: The worker numbers of those processes; None before the first epoch.
        has_counted_objects: Whether the objects of the dataset were counted already.
    """

    # Most loaders change few of these, so they are attributes of the class.
    host_pool: "HostPool | None" = None
    nursery: Any = None
    destination: "Destination | None" = None
    checkpoints: "DatasetCheckpoints | LocalCheckpoint | None" = None
    resumed_checkpoints: DatasetCheckpoints | None = None
    loaded_generators: Mapping[str, Any] = MappingProxyType({})
    executor_key: bytes = b""
    process_numbers: "ProcessNumbers | None" = None
    has_counted_objects: bool = False

    def __init__(self, adapter: Adapter | None = None) -> None:
        self.adapter = adapter
        self.begin_lock = BeginLock()
        self.statistics = Statistics()
        self._iterators: tuple[weakref.ref[Any], ...] = ()

    @functools.cached_property
    def state_cost(self) -> StateCost:
        """Warns if states of the dataset cost much."""
        return StateCost()

    @functools.cached_property
    def dataset_epoch(self) -> DatasetEpoch:
        """Decides which number of an epoch the dataset is told."""
        return DatasetEpoch()

    @functools.cached_property
    def failures(self) -> FailureList[FailedSample]:
        """The samples that failed."""
        return FailureList()

    def add(self, iterator: object) -> None:
        """Add an iterator."""
        alive = [reference for reference in self._iterators if reference() is not None]
        self._iterators = (*alive, weakref.ref(iterator))

    def open_iterators(self) -> list[Any]:
        """Return the iterators that are not garbage."""
        alive = (reference() for reference in self._iterators)
        return [iterator for iterator in alive if iterator is not None]

    def pop_resumed(self) -> DatasetCheckpoints | None:
        """Return what a new iterator's datasets resume from, once; None for the beginning."""
        resumed = self.resumed_checkpoints
        self.checkpoints = self.resumed_checkpoints = None
        return resumed

    def open_destination(self, config: LoaderConfig) -> "Destination | None":
        """Return the devices that batches are copied to; None for the CPU."""
        if not config.has_device:
            return None
        from shmloader.device.device import Destination  # noqa: PLC0415 - few loaders need it

        if self.destination is None or not self.destination.is_of(config.devices):
            self.destination = Destination(config.devices)
        return self.destination
