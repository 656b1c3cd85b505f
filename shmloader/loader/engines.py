"""Starts the workers of an iterator and makes their engine: processes, threads or an executor.

The iterator imports this module when it has workers, since that takes as long as importing the rest
of the package.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmloader.batch.arrays import Arrays
from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.portable_payload import PortablePayload
from shmloader.device.backend import current_index
from shmloader.device.device import DevicesStage, DeviceStage
from shmloader.device.stage import PinStage, Stage
from shmloader.device.thread import StagedEngine
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.engine.engine import Engine
from shmloader.engine.scheduler import Scheduler
from shmloader.grammar import warn_user
from shmloader.interruptions import Caught, Suppressed, attempt
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.loader.inline import do_nothing
from shmloader.memory.arena import Arena, uncapped_slot_bytes
from shmloader.memory.flat import is_debugging
from shmloader.memory.limits import MemoryConfig
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.process import ProcessPool
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.starting import OwnWorkers
from shmloader.pools.task_queue import TaskQueue
from shmloader.pools.thread import ThreadConfig, ThreadPool
from shmloader.shared.sharing import describe_many


@dataclass(slots=True)
class Opened:
    """An engine with workers, and what its iterator does with it besides asking for batches.

    Attributes:
        engine: The engine.
        source: The engine, or a stage on another thread that is behind it.
        pool: The engine's workers.
        end: Ends all. It refers neither to the sampler nor to the iterator.
        begin_epoch: Called before the epoch's first index batch is drawn.
        set_window: Sets how many index batches are drawn when the next epoch begins.
        adapter: Decides how many workers there are, with ``num_workers="auto"``.
        is_on_device: Whether the source has called the ``device_transform``.
        keeps: An object that the pool refers to only weakly.
    """

    engine: Any
    source: Any
    pool: Any
    end: Callable[[], object]
    begin_epoch: Callable[[], object]
    set_window: Callable[[int], object] = do_nothing
    adapter: Any = None
    is_on_device: bool = False
    keeps: object = None


def open_workers(
    config: LoaderConfig,
    parts: LoaderParts,
    *,
    base_seed: int,
    checkpoints: DatasetCheckpoints | None,
    pin: tuple[bool, str | None],
) -> Opened:
    """Start the workers of an iterator, and return their engine.

    Args:
        config: The loader's arguments.
        parts: The objects that all iterators of the loader share.
        base_seed: Seeds the workers' random generators.
        checkpoints: Where the workers' datasets begin; None if they are not tracked.
        pin: Whether batches are copied to page-locked memory, and the type of the accelerator.

    Raises:
        Exception: What starting a worker or pickling the dataset raises.
    """
    if not config.prefetch_factor:
        raise AssertionError(
            "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
        )
    stage, locker = _make_stage(config, parts, *pin)
    if config.kind == "threads":
        opened = _open_threads(config, parts)
    elif config.kind == "executor":
        opened = _open_executor(config, parts, base_seed)
    else:
        opened = _open_processes(config, parts, base_seed, checkpoints, locker)
    if stage is not None:
        with contextlib.ExitStack() as stack:
            stack.callback(opened.end)
            opened.pool.enable_wake()
            source = StagedEngine(opened.engine, stage, config.window, config.timeout)
            stack.pop_all()
        opened.source, opened.end = source, source.owner.end
        opened.set_window = functools.partial(setattr, source, "window")
        opened.is_on_device = not isinstance(stage, PinStage)
    return opened


def _make_stage(
    config: LoaderConfig, parts: LoaderParts, pins: bool, pin_device: str | None
) -> tuple[Stage | None, PageLocker | None]:
    """Return the stage that pins batches or copies them to devices, and its locker of pages."""
    destination = parts.open_destination(config)
    if destination is None:
        # As torch has it, no accelerator means CUDA.
        pin = PinStage(pin_device, current_index(pin_device or "cuda")) if pins else None
        return pin, None
    locks, backends = destination.locks, destination.backends
    ahead, transform = config.device_prefetch, config.device_transform
    if config.has_steps:
        return DevicesStage(backends, locks, ahead, transform), locks
    assert backends[0] is not None  # the only device
    return DeviceStage(backends[0], locks, ahead, transform), locks


def _make_engine(
    pool: Any,
    config: LoaderConfig,
    parts: LoaderParts,
    checkpoints: DatasetCheckpoints | None = None,
    **given: Any,
) -> Engine:
    scheduler = Scheduler(
        in_order=config.in_order,
        restart_limit=config.worker_restarts,
        first_worker=0 if checkpoints is None else checkpoints.next_worker,
        beginnings=None if checkpoints is None else checkpoints.checkpoints,
        is_iterable=config.fetch.is_iterable,
        has_queue=pool.has_queue,
        has_slots=pool.memory is not None,
        **given,
    )
    return Engine(
        pool,
        scheduler,
        timeout_s=config.timeout,
        sample_timeout_s=config.sample_timeout,
        base_seed=None if checkpoints is None else checkpoints.base_seed,
        watch=config.watch_failures(parts),
    )


def _open_threads(config: LoaderConfig, parts: LoaderParts) -> Opened:
    """Start threads of this process, which make batches without copies or shared memory."""
    arrays = Arrays(config.dataset) if config.fetch.takes_arrays else None
    thread_config = ThreadConfig(
        config.fetch,
        config.dataset,
        config.collate_fn,
        config.on_error,
        config.worker_init_fn,
        arrays,
    )
    pool = ThreadPool(config.num_workers, weakref.ref(thread_config))
    engine = _make_engine(
        pool,
        config,
        parts,
        worker_count=config.num_workers,
        window=config.window,
        lend_limit=0,
    )
    begin = do_nothing if arrays is None else arrays.begin_epoch
    return Opened(engine, engine, pool, pool.close, begin, keeps=thread_config)


def _open_executor(config: LoaderConfig, parts: LoaderParts, base_seed: int) -> Opened:
    """Return an engine whose batches are made by tasks of the user's executor."""
    assert config.executor is not None
    objects = (config.dataset, config.collate_fn, config.worker_init_fn, config.on_error)
    payload = attempt(PortablePayload, (*objects, tuple(config.fetch), config.num_workers))
    if isinstance(payload, Caught):
        names = ("dataset", "collate_fn", "worker_init_fn", "on_error")
        remedy = (
            "Make it in each process: on first use, or in worker_init_fn. What lies in shared "
            "memory of this machine, such as a lock or a queue, cannot be used by an executor."
        )
        found = find_unpicklable(objects, names)
        raise explain_unpicklable(payload.error, found, "the executor's processes", remedy)
    pool = ExecutorPool(
        config.executor,
        payload,
        loader=parts.executor_key,
        numbers=parts.task_numbers,
        base_seed=base_seed,
    )
    window = config.most_window  # to the engine, each batch in flight is a worker
    engine = _make_engine(pool, config, parts, worker_count=window, window=window, lend_limit=0)
    return Opened(engine, engine, pool, pool.close, _telling_epoch(pool, parts))


def _telling_epoch(pool: Any, parts: LoaderParts) -> Callable[[], object]:
    """Return a function that tells the pool which epoch the datasets of workers are told."""
    return lambda: setattr(pool, "dataset_epoch", parts.dataset_epoch.told)


# Worker processes ------------------------------------------------------------------------------


def _open_processes(
    config: LoaderConfig,
    parts: LoaderParts,
    base_seed: int,
    checkpoints: DatasetCheckpoints | None,
    locker: PageLocker | None,
) -> Opened:
    """Start worker processes, or attach to those that the ranks of this host share."""
    _warn_of_many_objects(config, parts)
    adapter = parts.adapter
    with contextlib.ExitStack() as stack:  # after a Ctrl-C no other code closes them
        starter: Any
        if config.worker_scope == "host":
            # Few loaders share workers.
            from shmloader.pools import host_pool  # noqa: PLC0415

            pool_of_host = parts.host_pool = host_pool.open_host_pool(
                config.dataset,
                config.worker_init_fn,
                config.most_workers,
                base_seed,
                None if adapter is None else config.num_workers,
                rank=config.rank,
                is_alone=config.host_ranks == 1,
            )
            if adapter is not None:
                # The rank that began the pool decides the maximum; the pool adapts the number.
                adapter = host_pool.SharedAdapter(pool_of_host)
                config = config.replace(num_workers=adapter.count, most_workers=adapter.most)
            tasks = _make_tasks(config)
            functions = (config.collate_fn, config.on_error)
            starter = host_pool.SharedWorkers(pool_of_host, functions, tasks)
        else:
            tasks = _make_tasks(config)
            starter = OwnWorkers(
                config.multiprocessing_context,
                config.most_workers,
                (config.dataset, config.worker_init_fn, config.collate_fn, config.on_error),
                tasks,
                base_seed,
            )
        stack.callback(tasks.close)
        may_replace = config.may_replace_workers or config.worker_scope == "host"
        pool = ProcessPool(starter, tasks, config.num_workers, locker, may_replace=may_replace)
        parts.nursery = pool.nursery
        stack.callback(pool.end_workers)
        engine = _make_engine(
            pool,
            config,
            parts,
            worker_count=config.most_workers,
            window=config.most_window,
            lend_limit=config.lend_limit,
            checkpoints=checkpoints,
            present=config.num_workers,
            sharers=config.host_ranks,
            tickets_each=0 if config.fixed_window else config.prefetch_factor,
        )
        engine.counts.share_bytes = config.slot_bytes or 0
        engine.resume()
        stack.pop_all()
    begin = _telling_epoch(pool, parts)
    return Opened(engine, engine, pool, pool.close, begin, adapter=adapter)


def _make_tasks(config: LoaderConfig) -> TaskConfig:
    """Return how tasks are served, with a new arena."""
    is_free = config.fixed_window is None and config.host_ranks == 1
    # The figures by which workers check that there is memory for the slots.
    window = config.prefetch_factor * config.num_workers if is_free else config.window
    memory = MemoryConfig(config.num_workers, window + config.loop_holds, config.root)
    slot_bytes = config.slot_bytes
    queue = TaskQueue() if config.is_dynamic else None
    arena = Arena.create(
        uncapped_slot_bytes() if slot_bytes is None else slot_bytes,
        config.most_window + config.lend_limit,
        config.state_slot_count,
    )
    return TaskConfig(config.fetch, arena, queue, memory, is_debugging())


def _warn_of_many_objects(config: LoaderConfig, parts: LoaderParts) -> None:
    """Warn once of the memory that a dataset of very many Python objects takes in workers."""
    if not parts.has_counted_objects:
        parts.has_counted_objects = True
        text = None
        with Suppressed(Exception):  # for example if another thread changes the objects
            text = describe_many(config.dataset, config.num_workers)
        if text is not None:
            warn_user(text)
