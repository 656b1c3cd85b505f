"""The iterator of a loader whose batches are made by an executor (``executor=``)."""

import secrets

from shmloader.batch.portable import PortablePayload
from shmloader.batch.unpicklable import explain, find_unpicklable
from shmloader.interruptions import is_interruption
from shmloader.loader.config import LoaderConfig
from shmloader.loader.slot_iterator import SlotIterator
from shmloader.memory.admission import MemoryAdmission
from shmloader.memory.arena import uncapped_slot_bytes
from shmloader.pools.executor import ExecutorPool
from shmloader.pools.process_numbers import ProcessNumbers
from shmloader.pools.slot_memory import PageLocker

_NAMES = ("dataset", "collate_fn", "worker_init_fn", "on_error")


class ExecutorIterator(SlotIterator):
    """Delivers batches that tasks of the user's executor make, through slots of this process."""

    _pool: ExecutorPool

    def _open(self, locker: PageLocker | None) -> None:
        config, slot_bytes = self._config, self._config.slot_bytes
        most_bytes = uncapped_slot_bytes() if slot_bytes is None else slot_bytes
        assert config.executor is not None
        parts = self._parts
        if parts.process_numbers is None:
            parts.process_numbers = ProcessNumbers()
            parts.executor_key = secrets.token_bytes(16)
        # This process alone writes to the slots.
        memory = self._memory_config(1, config.most_window)
        self._pool = ExecutorPool(
            config.executor,
            _make_payload(config, most_bytes),
            loader=parts.executor_key,
            numbers=parts.process_numbers,
            base_seed=int(self._base_seed),
            slot_bytes=most_bytes,
            slot_count=config.most_window + config.lend_limit,
            locker=locker,
            admission=MemoryAdmission(memory),
        )
        # To the engine, each batch in flight is a worker.
        self._engine = self._make_engine(self._pool, config.most_window)


def _make_payload(config: LoaderConfig, slot_bytes: int) -> PortablePayload:
    """Pickle the parts of the loader that the executor's processes get.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If a part cannot be pickled; names it.
    """
    objects = (config.dataset, config.collate_fn, config.worker_init_fn, config.on_error)
    try:
        return PortablePayload((*objects, tuple(config.fetch), config.num_workers, slot_bytes))
    except Exception as error:
        if is_interruption(error):
            raise
        remedy = (
            "Make it in each process: on first use, or in worker_init_fn. What lies in shared "
            "memory of this machine, such as a lock or a queue, cannot be used by an executor."
        )
        found = find_unpicklable(objects, _NAMES)
        explained = explain(error, found, "the executor's processes", remedy)
        if explained is error:
            raise
        raise explained from error
