"""The iterator over batches of worker processes: its own, or those that a host's ranks share."""

from pathlib import Path
from typing import Any

from shmloader.engine.engine import Engine
from shmloader.interruptions import is_interruption
from shmloader.loader.calls import warn_of_many_objects
from shmloader.loader.iterator import EngineIterator
from shmloader.memory.admission import MemoryAdmission, MemoryConfig
from shmloader.memory.arena import Arena, uncapped_slot_bytes
from shmloader.memory.layout import is_debugging
from shmloader.memory.limits import free_memory
from shmloader.pools.adapting import Adapter, AutoCount
from shmloader.pools.host_demand import DemandReporter
from shmloader.pools.process import ProcessPool
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.task_queue import TaskQueue
from shmloader.pools.task_server import TaskConfig
from shmloader.pools.worker_channels import WorkerChannels
from shmloader.pools.worker_processes import WorkerProcesses


class WorkerIterator(EngineIterator):
    """Delivers batches of worker processes, which lie in slots of this process.

    When it ends, it frees its slots, except those under batches that the user holds.
    """

    _pool: ProcessPool

    def _open(self, locker: PageLocker | None) -> None:
        self._reporter: DemandReporter | None = None
        warn_of_many_objects(self._config, self._parts)
        workers, tasks = self._join() if self._config.worker_scope == "host" else self._start()
        config = self._config
        # The worker count that the engine was last told in this epoch; None if it was told none.
        self._wanted: int | None = None
        try:
            assert tasks.memory is not None
            self._pool = ProcessPool(workers, tasks.arena, locker, MemoryAdmission(tasks.memory))
        except BaseException:
            workers.close()  # after a Ctrl-C no other code closes them
            tasks.close()
            raise
        self._engine = Engine(
            self._pool,
            worker_count=config.most_workers,
            window=config.most_window,
            lend_limit=config.lend_limit,
            in_order=config.in_order,
            timeout_s=config.timeout_s,
            sample_timeout_s=config.fetch.sample_timeout_s,
            worker_restarts=config.worker_restarts,
            checkpoints=self._checkpoints,
            is_iterable=config.fetch.is_iterable,
            is_seeded=config.fetch.seed is not None,
            watch=config.watch_failures(self._parts),
            present=config.num_workers,
            sharers=config.host_ranks,
            tickets_each=0 if config.fixed_window else config.prefetch_factor,
        )
        if config.slot_bytes is not None:
            self._engine.counts.share_bytes = config.slot_bytes
        self._engine.resume()

    def _begin_draws(self) -> None:
        self._pool.dataset_epoch = self._parts.dataset_epoch.told
        super()._begin_draws()

    def _make_tasks(self) -> TaskConfig:
        """Return how tasks are served, with a new arena."""
        config, root = self._config, Path(self._config.root)
        is_free = config.fixed_window is None and config.host_ranks == 1
        # The figures by which workers check that there is memory for the slots.
        memory = MemoryConfig(
            config.num_workers,
            config.prefetch_factor,
            config.loop_holds,
            self._order.count_batches(),
            free_memory(root),
            config.root,
            None if is_free else config.window,
        )
        slot_bytes = config.slot_bytes
        arena = Arena.create(
            uncapped_slot_bytes() if slot_bytes is None else slot_bytes,
            config.most_window + config.lend_limit,
            config.most_workers if config.fetch.snapshot_every and slot_bytes is None else 0,
        )
        try:
            queue = TaskQueue() if config.is_dynamic else None
        except OSError:
            arena.close()
            raise
        return TaskConfig(config.fetch, arena, queue, memory, is_debugging())

    def _start(self) -> tuple[WorkerChannels[Any], TaskConfig]:
        """Start worker processes of this iterator's own."""
        config, tasks = self._config, self._make_tasks()
        try:
            workers = WorkerProcesses(
                config.multiprocessing_context,
                config.most_workers,
                (config.dataset, config.collate_fn, config.worker_init_fn, config.on_error),
                tasks,
                int(self._base_seed),
                may_replace=config.may_replace_workers,
                started=config.num_workers,
            )
        except BaseException:
            tasks.close()
            raise
        self._parts.nursery = workers.nursery
        return workers, tasks

    def _join(self) -> tuple[WorkerChannels[Any], TaskConfig]:
        """Attach to the workers that the ranks of this host share."""
        # Few loaders share workers.
        from shmloader.pools.host_pool import open_host_pool  # noqa: PLC0415
        from shmloader.pools.host_workers import HostWorkers  # noqa: PLC0415

        config = self._config
        functions = (config.collate_fn, config.on_error)
        is_auto = self._adapter is not None
        while True:
            pool = self._parts.host_pool = open_host_pool(
                config.dataset,
                config.worker_init_fn,
                config.most_workers,
                int(self._base_seed),
                config.num_workers if is_auto else None,
                rank=config.rank,
                is_alone=config.host_ranks == 1,
            )
            pool.note_kept()
            wanted = pool.wanted_count  # another iterator's thread may change it
            if wanted is not None:
                # The rank that began the pool decides the maximum; the pool adapts the number.
                self._config = config._replace(num_workers=wanted, most_workers=pool.worker_count)
            tasks = self._make_tasks()
            try:
                workers = HostWorkers(pool, functions, tasks, self._config.num_workers)
            except BaseException as error:
                tasks.close()
                if not isinstance(error, ConnectionError) or is_interruption(error):
                    raise
                pool.close()  # its owner has just ended; a new one takes its place
                continue
            self._reporter = DemandReporter(workers.report) if is_auto else None
            return workers, tasks

    def _begin_adapting(self, adapter: Adapter) -> None:
        if self._reporter is None:
            adapter.begin()
            self._wanted = None  # workers that were leaving stay when an epoch is left
        else:
            self._reporter.begin()

    def _adapt(self, adapter: Adapter, now_ns: int, wait_ns: int, busy_ns: int) -> None:
        if self._reporter is not None:
            # The owner of the workers decides, and tells the engine.
            self._reporter.note(now_ns, wait_ns, busy_ns)
        else:
            wanted = adapter.note(now_ns, wait_ns, busy_ns)
            if wanted != self._wanted:
                self._wanted = wanted
                self._engine.want_workers(wanted)
        loader, present = self._loader(), self._engine.present_workers
        if loader is not None and loader.num_workers != present:
            self._record.worker_count = present
            loader.num_workers = AutoCount(present)

    @property
    def _workers(self) -> list[Any]:
        """The worker processes, for tools that read this attribute of torch's iterator."""
        return self._pool.processes
