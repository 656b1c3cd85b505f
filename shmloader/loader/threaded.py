"""The iterator of a loader whose workers are threads (``thread_pool=True``)."""

import weakref

from shmloader.batch.arrays import LocalArrays
from shmloader.engine.engine import Engine
from shmloader.loader.iterator import EngineIterator
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.thread import ThreadConfig, ThreadPool


class ThreadIterator(EngineIterator):
    """Delivers batches of threads in this process, without copies or shared memory."""

    _pool: ThreadPool

    def _open(self, locker: PageLocker | None) -> None:  # noqa: ARG002 - there are no slots
        config = self._config
        self._arrays = LocalArrays(config.dataset)
        self._thread_config = ThreadConfig(
            config.fetch,
            config.dataset,
            config.collate_fn,
            config.on_error,
            config.worker_init_fn,
            self._arrays.find_gatherer,
        )
        self._pool = ThreadPool(config.num_workers, weakref.ref(self._thread_config))
        self._engine = Engine(
            self._pool,
            worker_count=config.num_workers,
            window=config.window,
            lend_limit=0,
            in_order=config.in_order,
            timeout_s=config.timeout_s,
            sample_timeout_s=config.fetch.sample_timeout_s,
            watch=config.watch_failures(self._parts),
        )

    def _begin_draws(self) -> None:
        self._arrays.begin_epoch()
        super()._begin_draws()
