"""Starts the workers of an iterator and makes their engine: processes, threads or an executor."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from shmloader.batch.arrays import Arrays
from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.payload import PortablePayload
from shmloader.device.backend import current_index
from shmloader.device.device import DeviceStage
from shmloader.device.stage import PinStage, Stage
from shmloader.device.thread import StagedEngine
from shmloader.engine.delivery import DatasetCheckpoints
from shmloader.engine.engine import Engine
from shmloader.engine.scheduler import Scheduler
from shmloader.grammar import warn_user
from shmloader.interruptions import Caught, attempt
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.memory.arena import Arena
from shmloader.memory.limits import MemoryConfig
from shmloader.pools.batch_server import TaskConfig
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.process import ProcessPool
from shmloader.pools.starting import OwnWorkers, remedied
from shmloader.pools.status_page import StatusPage
from shmloader.pools.task_queue import TaskQueue
from shmloader.pools.thread import ThreadConfig, ThreadPool
from shmloader.shared.sharing import describe_long


class Workers:
    """The workers of an iterator, their engine, and what the iterator does besides taking batches.

    The constructor starts the workers. It raises what that raises, or what pickling the dataset
    raises.

    Attributes:
        source: The engine, or a stage on another thread that is behind it.
        end: Ends all. It refers neither to the sampler nor to the iterator.

    Args:
        config: The loader's arguments.
        parts: The objects that all iterators of the loader share.
        base_seed: Seeds the workers' random generators.
        checkpoints: Where the workers' datasets begin; None if they are not tracked.
        pin: Whether batches are copied to page-locked memory, and the type of the accelerator.
    """

    engine: Engine
    pool: Any
    _arrays: Arrays | None = None

    def __init__(
        self,
        config: LoaderConfig,
        parts: LoaderParts,
        *,
        base_seed: int,
        checkpoints: DatasetCheckpoints | None,
        pin: tuple[bool, str | None],
    ) -> None:
        if not config.prefetch_factor:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._config, self._parts = config, parts
        self._base_seed, self._checkpoints = base_seed, checkpoints
        destination, (pins, pin_device) = parts.open_destination(config), pin
        stage: Stage | None = None
        if destination is not None:
            stage = DeviceStage(destination, config.device_prefetch, config.device_transform)
        elif pins:  # as torch has it, no accelerator means CUDA
            stage = PinStage(pin_device, current_index(pin_device or "cuda"))
        if config.kind == "threads":
            self._open_threads()
        elif config.kind == "executor":
            self._open_executor()
        else:
            self._open_processes(None if destination is None else destination.locks)
        self.end: Callable[[], object] = self.pool.close
        self.source: Any = self.engine
        if stage is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(self.end)
                self.pool.enable_wake()
                self.source = StagedEngine(self.engine, stage, config.timeout)
                stack.pop_all()
            self.end = self.source.owner.end

    def begin_epoch(self) -> None:
        """Prepare for an epoch whose first index batch is drawn next."""
        self.pool.dataset_epoch = self._parts.told_epoch
        if self._arrays is not None:
            self._arrays.begin_epoch()

    def _make_engine(self, **given: Any) -> None:
        config, checkpoints = self._config, self._checkpoints
        scheduler = Scheduler(
            in_order=config.in_order,
            restart_limit=config.worker_restarts,
            first_worker=0 if checkpoints is None else checkpoints.next_worker,
            beginnings=None if checkpoints is None else checkpoints.checkpoints,
            is_iterable=config.fetch.is_iterable,
            has_queue=self.pool.has_queue,
            has_slots=self.pool.memory is not None,
            has_routes=config.fetch.reads and self.pool.memory is not None,
            **given,
        )
        self.engine = Engine(
            self.pool,
            scheduler,
            timeout_s=config.timeout,
            sample_timeout_s=config.sample_timeout,
            base_seed=None if checkpoints is None else checkpoints.base_seed,
            watch=config.watch_failures(self._parts),
        )

    def _open_threads(self) -> None:
        """Start threads of this process, which make batches without copies or shared memory."""
        config = self._config
        self._arrays = Arrays(config.dataset) if config.fetch.takes_arrays else None
        functions = config.collate_fn, config.on_error, config.worker_init_fn
        thread_config = ThreadConfig(config.fetch, config.dataset, *functions, self._arrays, {})
        self._keeps = thread_config  # the pool refers to it only weakly
        count = config.num_workers
        self.pool = ThreadPool(count, weakref.ref(thread_config))
        self._make_engine(worker_count=count, window=config.window, lend_limit=0)

    def _open_executor(self) -> None:
        """Have tasks of the user's executor make the batches."""
        config = self._config
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
        self.pool = ExecutorPool(
            config.executor,
            payload,
            loader=self._parts.executor_key,
            numbers=self._parts.task_numbers,
            base_seed=self._base_seed,
        )
        window = config.most_window  # to the engine, each batch in flight is a worker
        self._make_engine(worker_count=window, window=window, lend_limit=0)

    def _open_processes(self, locker: Any) -> None:
        """Start worker processes, or attach to those that the ranks of this host share."""
        config, parts, base_seed = self._config, self._parts, self._base_seed
        if not parts.has_looked_for_lists:
            parts.has_looked_for_lists = True
            text = describe_long(config.dataset)
            if text is not None:
                warn_user(text)
        is_shared = config.worker_scope == "host"
        with contextlib.ExitStack() as stack:  # after a Ctrl-C no other code closes them
            starter: Any
            if is_shared:
                # Few loaders share workers.
                from shmloader.pools import host_pool  # noqa: PLC0415

                pool_of_host = parts.host_pool = host_pool.open_host_pool(
                    config.dataset,
                    config.worker_init_fn,
                    config.num_workers,
                    base_seed,
                    rank=config.rank,
                    is_alone=config.host_ranks == 1,
                )
            with remedied():
                tasks = _make_tasks(config)
            stack.callback(tasks.close)
            if is_shared:
                functions = (config.collate_fn, config.on_error)
                starter = host_pool.SharedWorkers(pool_of_host, functions, tasks)
            else:
                starter = OwnWorkers(
                    config.multiprocessing_context,
                    config.most_workers,
                    (config.dataset, config.worker_init_fn, config.collate_fn, config.on_error),
                    tasks,
                    base_seed,
                )
            may_replace = config.may_replace_workers or is_shared
            count = config.start_count or config.num_workers
            pool = ProcessPool(starter, tasks, count, locker, may_replace=may_replace)
            self.pool, parts.nursery = pool, pool.nursery
            stack.callback(pool.end_workers)
            self._make_engine(
                worker_count=config.most_workers,
                window=config.most_window,
                lend_limit=config.lend_limit,
                present=count,
            )
            self.engine.resume()
            stack.pop_all()


def _make_tasks(config: LoaderConfig) -> TaskConfig:
    """Return how tasks are served, with a new arena."""
    # The figures by which workers check that there is memory for the slots.
    memory = MemoryConfig(config.num_workers, config.slot_count, config.root)
    arena = Arena.create(config.slot_bytes, config.most_window + config.lend_limit)
    page = StatusPage(config.most_workers)
    queue = TaskQueue() if config.is_dynamic else None  # last: as garbage, its sockets would warn
    return TaskConfig(config.fetch, arena, page, queue, memory)
