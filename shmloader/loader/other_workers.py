"""Iterators whose workers are threads (``thread_pool=True``), or an executor's (``executor=``)."""

import secrets
import weakref

from shmloader.batch.arrays import LocalArrays
from shmloader.batch.explain import explain_unpicklable, find_unpicklable
from shmloader.batch.payload import PortablePayload
from shmloader.engine.engine import Engine
from shmloader.interruptions import Caught, attempt
from shmloader.loader.config import LoaderConfig
from shmloader.loader.iterator import EngineIterator
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.process_numbers import ProcessNumbers
from shmloader.pools.slot_memory import PageLocker
from shmloader.pools.thread import ThreadConfig, ThreadPool

_NAMES = ("dataset", "collate_fn", "worker_init_fn", "on_error")


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


class ExecutorIterator(EngineIterator):
    """Delivers batches that tasks of the user's executor make."""

    _pool: ExecutorPool

    def _open(self, locker: PageLocker | None) -> None:  # noqa: ARG002 - there are no slots
        config, parts = self._config, self._parts
        assert config.executor is not None
        if parts.process_numbers is None:
            parts.process_numbers = ProcessNumbers()
            parts.executor_key = secrets.token_bytes(16)
        self._pool = ExecutorPool(
            config.executor,
            _make_payload(config),
            loader=parts.executor_key,
            numbers=parts.process_numbers,
            base_seed=int(self._base_seed),
        )
        self._engine = Engine(
            self._pool,
            worker_count=config.most_window,  # to the engine, each batch in flight is a worker
            window=config.most_window,
            lend_limit=0,
            in_order=config.in_order,
            timeout_s=config.timeout_s,
            worker_restarts=config.worker_restarts,
            is_iterable=False,
            is_seeded=config.fetch.seed is not None,
            watch=config.watch_failures(self._parts),
        )

    def _begin_draws(self) -> None:
        self._pool.dataset_epoch = self._parts.dataset_epoch.told
        super()._begin_draws()


def _make_payload(config: LoaderConfig) -> PortablePayload:
    """Pickle the parts of the loader that the executor's processes get.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If a part cannot be pickled; names it.
    """
    objects = (config.dataset, config.collate_fn, config.worker_init_fn, config.on_error)
    parts = (*objects, tuple(config.fetch), config.num_workers)
    payload = attempt(PortablePayload, parts)
    if not isinstance(payload, Caught):
        return payload
    remedy = (
        "Make it in each process: on first use, or in worker_init_fn. What lies in shared "
        "memory of this machine, such as a lock or a queue, cannot be used by an executor."
    )
    found = find_unpicklable(objects, _NAMES)
    explained = explain_unpicklable(payload.error, found, "the executor's processes", remedy)
    if explained is payload.error:
        raise explained
    raise explained from payload.error
