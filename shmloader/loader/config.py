"""What an iterator gets from its loader: the arguments, and the parts that its iterators share.

Users may set the attributes of a loader between epochs. So :func:`config_of` makes a
:class:`LoaderConfig` of them when an iterator begins. Worker processes get the settings
about batches (``FetchConfig``) and those about memory (``MemoryConfig``).
"""

import functools
import itertools
import os
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shmloader.batch.arrays import is_plain_data, may_be_columns
from shmloader.batch.fetch import FetchConfig, list_getter
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.engine.failures import FailedSample, FailureList, FailureWatch
from shmloader.grammar import counted, warn_user
from shmloader.insight.record import Statistics
from shmloader.interruptions import Suppressed
from shmloader.loader.options import DEFAULTS, read_options, slot_share
from shmloader.memory.writer import is_plain
from shmloader.pools.adapting import Adapter
from shmloader.sampling.hooks import is_planned
from shmloader.sampling.sampler_state import chain, is_known
from shmloader.streams.stream import Stream

if TYPE_CHECKING:  # imported where they are used: most loaders have none of these
    from shmloader.device.device import Destination
    from shmloader.pools.host_pool import HostPool

# Batches that may be lent to the user, uncopied, at the same time. A plain loop holds two at the
# moment of ``next()``, and two more are for a prefetcher of the user's own. Batches kept beyond the
# limit are copied out, so the limit decides how much shared memory may be used, never whether the
# loader continues.
_LEND_LIMIT = 4

# A warning says so if at least this many workers have no batch.
_MANY_IDLE = 16


class LoaderConfig(SimpleNamespace):
    """The arguments of a loader as an epoch uses them, checked and parsed. An iterator keeps them.

    Besides, there are the following attributes.

    Attributes:
        fetch: How a batch is fetched and collated; sent to the workers.
        keeps_size: Whether other ranks expect as many batches: none is left out.
        saves_dataset: Whether states of the loader contain states of the dataset.
        device: Where batches arrive; None for the CPU.
        most_workers: Maximum number of workers; more than ``num_workers`` only with "auto".
        start_count: How many worker processes start at first; None for all.
        is_dynamic: Whether a batch may come from any worker.
        root: Directory that contains ``proc`` and ``sys``.
        hear: Called with what workers found of a stream's readers, on the engine's thread; None for
            any other dataset.
        rank: Number of this rank among the ``host_ranks`` that share the workers.
    """

    fetch: FetchConfig
    prefetch_factor: int | None = None
    device: Any = None
    most_workers = 0
    start_count: int | None = None
    host_ranks = 1
    hear: Any = None

    @property
    def kind(self) -> str:
        """The kind of workers, by its name in the statistics."""
        if not self.num_workers:
            return "in-process"
        if self.executor is not None:
            return "executor"
        return "threads" if self.thread_pool else "processes"

    @property
    def samples_at_once(self) -> int:
        """Samples of a batch that a worker loads at once; 0 if ``fetch_concurrency`` is no help."""
        fetch, is_one_call = self.fetch, False
        if fetch.concurrency is None and fetch.seed is None:
            with Suppressed(Exception):  # of the user's dataset, which does without in the workers
                is_one_call = list_getter(self.dataset) is not None
        no_samples = fetch.is_iterable or fetch.reads or not fetch.auto_collation
        return 0 if no_samples or fetch.takes_arrays or is_one_call else fetch.concurrency or 1

    @property
    def may_replace_workers(self) -> bool:
        """Whether worker processes may be started while an epoch runs."""
        is_short = self.most_workers > (self.start_count or self.num_workers)
        return self.worker_restarts > 0 or is_short or self.sample_timeout is not None

    def window_of(self, worker_count: int) -> int:
        """Return how many batches are in flight with ``worker_count`` workers.

        If ranks share the workers, each rank has as many batches in flight as its share of the
        workers would have, so that the ranks together do not take much more memory. A rank has one
        more if that is fewer than the workers. With it, a rank whose samples are five times as
        expensive needs 0.58 or less of the time that its share of the workers alone would need;
        without it, 0.6 or more (8 of 64 workers, ``prefetch_factor=2``).
        """
        window: int = -(-worker_count // self.host_ranks) * (self.prefetch_factor or 0)
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
        ahead = 0 if self.device is None else self.device_prefetch
        return max(_LEND_LIMIT, ahead + 2)

    @property
    def slot_count(self) -> int:
        """Maximum number of slots for batches, with the present number of workers."""
        return self.window + self.lend_limit

    @property
    def slot_bytes(self) -> int | None:
        """Each slot's share of ``shm_size``; None without a maximum."""
        if self.shm_size is None:
            return None
        return slot_share(self.shm_size, self.most_window + self.lend_limit)

    def watch_failures(self, parts: "LoaderParts") -> FailureWatch | None:
        """Return the watch that records in ``failures``; None if there is nothing to count."""
        is_raised = self.on_error == "raise" or self.fetch.is_iterable
        if is_raised and self.hear is None:
            return None
        return FailureWatch(
            parts.failures,
            None if is_raised else self.max_failures,
            keep_size=self.keeps_size and not is_raised,
            replaces=is_raised or callable(self.on_error),
            copies=self.fetch.copies_good,
            hear=self.hear,
        )


for _name, _default in DEFAULTS.items():
    setattr(LoaderConfig, _name, _default)


def config_of(loader: Any) -> LoaderConfig:
    """Return the arguments of a loader as its attributes are now, for an iterator that begins.

    Raises:
        TypeError, ValueError: If one is wrong, or cannot be combined with another one.
    """
    values, parts, saves_dataset = read_options(loader), loader._parts, loader._saves_dataset
    count, dataset = loader.num_workers, loader.dataset
    # Loaders may be made for short epochs, so the property is called only if it has a value.
    stream = loader._stream if Stream in type(dataset).__mro__ else None
    collate_fn, collates, hear = loader.collate_fn, loader._auto_collation, None
    is_host, is_map = loader.worker_scope == "host", not loader._is_iterable
    if stream is not None:
        plan = loader._present_plan
        plan.newest.timeout_s = loader.timeout
        plan.newest.check_workers(count)
        # The order of a later epoch may be another one.
        hear = lambda found: plan.newest.hear(found, is_told_now=not count)  # noqa: E731
        dataset, collates = stream, stream.is_batched
        collate_fn = stream.collate or collate_fn
    seed, on_error = loader._sample_seed, values.get("on_error", "raise")
    keeps_size = on_error == "skip" and loader._is_in_ranks
    # Where batches have a budget of tokens, a copy might exceed it.
    has_budget = keeps_size and any(map(is_planned, loader._all_samplers))
    # Batches are gathered from a dataset that consists of arrays only.
    takes_arrays = (
        on_error == "raise"
        and is_map
        and stream is None
        and collates
        and may_be_columns(dataset)
        and (is_plain(collate_fn) or may_be_columns(dataset, are_collated=False))
    )
    fetch = FetchConfig(
        not is_map,
        collates,
        loader.drop_last,
        copies_good=keeps_size and not has_budget and stream is None,
        seed=None if seed is None else loader._seed_of_samples(seed),
        snapshot_every=loader._snapshot_interval if saves_dataset else 0,
        is_persistent=bool(loader.persistent_workers),
        concurrency=values.get("fetch_concurrency"),
        sample_timeout_s=values.get("sample_timeout"),
        is_threaded=loader.thread_pool,
        takes_arrays=takes_arrays,
        told_epoch=parts.told_epoch if count and not is_host else None,
        reads=stream is not None,
    )
    config = LoaderConfig(
        **values,
        fetch=fetch,
        dataset=dataset,
        collate_fn=collate_fn,
        hear=hear,
        keeps_size=keeps_size,
        saves_dataset=saves_dataset,
        num_workers=count,
        in_order=loader.in_order or not count,
    )
    if not count:
        return config
    if is_host:
        from shmloader.host import ranks_of_host  # noqa: PLC0415 - few loaders share

        config.rank, world_size = loader._ranks.find()
        config.host_ranks = ranks_of_host(world_size)
    init, adapter = loader.worker_init_fn, loader._adapter
    is_same = takes_arrays and is_plain(collate_fn) and init is None and is_plain_data(dataset)
    # Ranks that share workers have queues, even if there is one worker.
    is_free = (seed is not None or not loader.in_order or is_same) and (count > 1 or is_host)
    vars(config).update(
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout,
        worker_init_fn=init,
        multiprocessing_context=loader.multiprocessing_context,
        most_workers=max(count, 0 if adapter is None else adapter.most),
        is_dynamic=is_map and stream is None and (is_free or adapter is not None),
        root=loader._root,
        worker_scope=loader.worker_scope,
    )
    return config


def start_count(loader: Any, config: LoaderConfig) -> int | None:
    """Return how many worker processes the epoch that begins needs; None for all.

    A sampler of the user's is not asked for its length, which may be slow or draw numbers.
    """
    batches, count, order = config.num_workers, config.num_workers, loader._plan.newest
    is_fixed = config.kind == "processes" and loader._adapter is None
    is_map = not (config.fetch.is_iterable or config.fetch.reads)
    if not (is_fixed and is_map) or config.worker_scope == "host":
        return None
    if not all(map(is_known, chain(order.index_sampler))):
        return None
    with Suppressed(Exception):  # without a length, or drawing raises the same
        batches = len(order)
    if batches >= count:
        return None
    starts_all = loader.persistent_workers or config.saves_dataset
    parts, idle_count = loader._parts, count - batches
    if idle_count >= _MANY_IDLE and not parts.has_warned_of_idle:
        parts.has_warned_of_idle = True
        rest = "have nothing to do" if starts_all else "would have no batch, and do not start"
        warn_user(
            f"num_workers={count}, but an epoch has {counted(batches, 'batch', 'batches')}: "
            f"{idle_count} workers {rest}. Lower num_workers to {max(1, batches)} or less."
        )
    return None if starts_all else max(1, batches)


class LoaderParts:
    """The parts that all iterators of a loader share. A copy or a pickle of the loader has its own.

    The statistics are the records of all epochs, and the failures the samples that failed.

    Attributes:
        adapter: Decides how many workers there are, with ``num_workers="auto"``.
        executor_key: Identifies the loader in processes of an executor.
        host_pool: The workers that the ranks of this host share; None if the loader has its own.
        nursery: The process that forks the workers. Kept, so that the next epoch need not start it.
        destination: The opened device; None before the first iterator that copies to one.
        checkpoints: Positions or states of the workers' datasets in the newest epoch.
        resumed_checkpoints: Those from which the next new iterator resumes; None to begin anew.
        loaded_generators: Names of the process's global generators that the dataset's
            ``load_state_dict()`` has set for the epoch that begins, without workers.
        told_epoch: The number that the dataset was told for the newest epoch; None for no call.
        has_looked_for_lists: Whether very long lists in the dataset were looked for already.
        has_warned_of_idle: Whether a warning of workers without a batch was given.
    """

    host_pool: "HostPool | None" = None
    nursery: Any = None
    destination: "Destination | None" = None
    checkpoints: DatasetCheckpoints | None = None
    resumed_checkpoints: DatasetCheckpoints | None = None
    loaded_generators: tuple[str, ...] = ()
    told_epoch: int | None = None
    has_looked_for_lists: bool = False
    has_warned_of_idle: bool = False

    # Made when they are needed: a program may have very many loaders.
    failures = functools.cached_property[FailureList[FailedSample]](lambda _: FailureList())
    executor_key = functools.cached_property(lambda _: os.urandom(16))
    task_numbers = functools.cached_property(lambda _: itertools.count())

    def __init__(self, adapter: Adapter | None = None) -> None:
        self.adapter = adapter
        # A tuple, which one thread replaces while another one reads.
        self._iterators: tuple[weakref.ref[Any], ...] = ()
        self.statistics = Statistics()
        self._lock = os.getpid(), threading.RLock()

    @property
    def begin_lock(self) -> threading.RLock:
        """The lock of this process: a child may inherit one that no thread of its own releases."""
        if self._lock[0] != os.getpid():
            self._lock = os.getpid(), threading.RLock()
        return self._lock[1]

    def add(self, iterator: object) -> None:
        """Add an iterator."""
        alive = [each for each in self._iterators if each() is not None] if self._iterators else ()
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
        """Return the device that batches are copied to; None for the CPU."""
        if config.device is None:
            return None
        from shmloader.device.device import Destination  # noqa: PLC0415 - few loaders need it

        if self.destination is None or not self.destination.is_of(config.device):
            self.destination = Destination(config.device)
        return self.destination
