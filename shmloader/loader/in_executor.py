"""The iterator of a loader whose batches are made by an executor (``executor=``)."""

import secrets

from shmloader.batch.portable import PortablePayload
from shmloader.batch.unpicklable import explain, find_unpicklable
from shmloader.engine.engine import Engine
from shmloader.interruptions import Caught, attempt
from shmloader.loader.config import LoaderConfig
from shmloader.loader.iterator import EngineIterator
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.process_numbers import ProcessNumbers
from shmloader.pools.slot_memory import PageLocker

_NAMES = ("dataset", "collate_fn", "worker_init_fn", "on_error")


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
    explained = explain(payload.error, found, "the executor's processes", remedy)
    if explained is payload.error:
        raise explained
    raise explained from payload.error
