"""The base of iterators whose batches lie in slots."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from shmloader.engine.engine import Engine
from shmloader.loader.iterator import EngineIterator
from shmloader.memory.admission import MemoryConfig
from shmloader.memory.limits import control_groups, free_memory
from shmloader.pools import Pool
from shmloader.pools.slot_reader import SlotReader


class SlotIterator(EngineIterator):
    """Delivers batches that lie in slots of this process.

    When it ends, it frees its slots, except those under batches that the user holds.
    """

    def _begin_draws(self) -> None:
        cast("SlotReader", self._pool).dataset_epoch = self._parts.dataset_epoch.told
        super()._begin_draws()

    def _memory_config(self, writer_count: int, window: int | None) -> MemoryConfig:
        """Return the figures by which writers check that there is memory for the slots.

        Args:
            writer_count: How many processes write to the slots.
            window: Batches in flight; None for ``prefetch_factor`` for each writer.
        """
        config, root = self._config, Path(self._config.root)
        return MemoryConfig(
            writer_count,
            config.prefetch_factor,
            config.loop_holds,
            self._order.count_batches(),
            free_memory(root, control_groups(root)),
            config.root,
            window,
        )

    def _make_engine(
        self,
        pool: Pool,
        worker_count: int,
        *,
        is_dynamic: bool = False,
        present: int | None = None,
        first_worker: int = 0,
        sharers: int = 1,
        read_loads: Callable[[], Sequence[int] | None] | None = None,
    ) -> Engine:
        """Return the engine of a pool with slots. See :class:`Engine` for the arguments."""
        config = self._config
        engine = Engine(
            pool,
            worker_count=worker_count,
            window=config.most_window,
            lend_limit=config.lend_limit,
            in_order=config.in_order,
            timeout_s=config.timeout_s,
            sample_timeout_s=config.fetch.sample_timeout_s,
            worker_restarts=config.worker_restarts,
            checkpoints=self._checkpoints,
            is_iterable=config.fetch.is_iterable,
            is_dynamic=is_dynamic,
            is_seeded=config.fetch.seed is not None,
            watch=config.watch_failures(self._parts),
            present=present,
            first_worker=first_worker,
            sharers=sharers,
            read_loads=read_loads,
        )
        if config.slot_bytes is not None:
            engine.counts.share_bytes = config.slot_bytes
        return engine
