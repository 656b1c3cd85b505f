"""The iterator of a loader whose workers are threads (``thread_pool=True``)."""

import weakref
from typing import Any

from shmloader.engine.engine import Engine
from shmloader.fronts.iterator import EngineIterator
from shmloader.fronts.recipe import plan_and_watch, takes_arrays
from shmloader.options import Options
from shmloader.pools.arena import PageLocker
from shmloader.pools.thread_task import Recipe
from shmloader.pools.threads import ThreadPool
from shmloader.workers.array_fetch import ArraysHere


class ThreadIterator(EngineIterator):
    """Batches out of threads of this process; nothing is shared, nothing copied."""

    _pool: ThreadPool

    def _open(
        self,
        loader: Any,
        options: Options,  # noqa: ARG002 - those are about memory and processes
        window: int,
        locker: PageLocker | None,  # noqa: ARG002 - there are no slots to be locked
    ) -> None:
        plan, watch = plan_and_watch(self, loader)
        self._arrays = ArraysHere(loader.dataset) if takes_arrays(self, loader) else None
        self._recipe = Recipe(
            plan, loader.dataset, loader.collate_fn, loader.on_error, self._arrays
        )
        self._pool = ThreadPool(
            loader.num_workers, loader.worker_init_fn, weakref.ref(self._recipe)
        )
        self._engine = Engine(
            self._pool,
            worker_count=loader.num_workers,
            window=window,
            lend_limit=0,
            in_order=loader.in_order,
            timeout_s=loader.timeout,
            watch=watch,
        )

    def _begin_draws(self, loader: Any) -> None:
        if self._arrays is not None:
            self._arrays.begin_epoch()
        super()._begin_draws(loader)
