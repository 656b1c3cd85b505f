"""The iterator of a loader whose batches are made by an executor (``executor=``)."""

from pathlib import Path

from shmloader.batch.portable import PortablePayload
from shmloader.batch.unpicklable import explain, find_unpicklable
from shmloader.engine.engine import Engine
from shmloader.interruptions import is_interruption
from shmloader.loader.config import LoaderConfig
from shmloader.loader.iterator import EngineIterator
from shmloader.memory.admission import MemoryAdmission, MemoryConfig
from shmloader.memory.limits import control_groups, free_memory
from shmloader.memory.slot import uncapped_slot_bytes
from shmloader.pools.arena import PageLocker
from shmloader.pools.executor import ExecutorPool, ProcessNumbers

_NAMES = ("dataset", "collate_fn", "worker_init_fn", "on_error")


class ExecutorIterator(EngineIterator):
    """Delivers batches that tasks of the user's executor make, through slots of this process."""

    _pool: ExecutorPool

    def _open(self, locker: PageLocker | None) -> None:
        config, lent = self._config, self._config.lend_limit
        slot_bytes = config.slot_bytes
        most_bytes = uncapped_slot_bytes() if slot_bytes is None else slot_bytes
        root = Path(config.root)
        memory = MemoryConfig(
            1,  # this process alone writes to the slots
            config.prefetch_factor,
            config.loop_holds,
            self._plan.order.count_batches(),
            free_memory(root, control_groups(root)),
            config.root,
            config.window,
            share_count=None if slot_bytes is None else config.window + lent,
        )
        assert config.executor is not None
        parts = self._parts
        if parts.process_numbers is None:
            parts.process_numbers = ProcessNumbers()
        self._pool = ExecutorPool(
            config.executor,
            _make_payload(config, most_bytes),
            loader=parts.executor_key,
            numbers=parts.process_numbers,
            base_seed=int(self._base_seed),
            slot_bytes=most_bytes,
            slot_count=config.window + lent,
            locker=locker,
            admission=MemoryAdmission(memory),
        )
        self._engine = Engine(
            self._pool,
            worker_count=config.window,  # one for each batch in flight
            window=config.window,
            lend_limit=lent,
            in_order=config.in_order,
            timeout_s=config.timeout_s,
            worker_restarts=config.worker_restarts,
            is_seeded=config.fetch.seed is not None,
            watch=config.watch_failures(parts.failures),
        )
        if slot_bytes is not None:
            self._engine.counts.share_bytes = slot_bytes


def _make_payload(config: LoaderConfig, slot_bytes: int) -> PortablePayload:
    """Pickle what the executor's processes get.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: If it cannot be pickled; names the part.
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
