"""Loaders of ours that stand in for loaders of torch's; see :mod:`shmloader.installing`."""

import weakref
from collections.abc import Callable, Sized
from fractions import Fraction
from typing import Any, TypedDict

import torch
import torch.utils.data
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from shmloader.batch.failures import OnError
from shmloader.loader.dataloader import DataLoader
from shmloader.loader.options import DEFAULTS, OPTIONS, SnapshotInterval
from shmloader.sampling.progress import EpochCounter
from shmloader.sampling.seeded_order import SeededOrder

#: The attributes of a loader that torch's constructor sets and torch's iterators read.
_TORCHS = (
    "dataset",
    "batch_size",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
    "_dataset_kind",
    "_IterableDataset_len_called",
    "_DataLoader__multiprocessing_context",
)

#: The attribute in which a loader keeps the number of its next epoch, with ``seed``. It is a plain
#: int, so copies and pickles of the loader keep it.
_EPOCH = "_shmloader_epoch"


class InstallOptions(TypedDict, total=False):
    """The arguments of :func:`install`; :class:`shmloader.DataLoader` describes them."""

    seed: int | None
    on_error: OnError
    max_failures: int | float | Fraction | None
    sample_timeout: float | None
    worker_restarts: int
    thread_pool: bool
    fetch_concurrency: int | None
    shm_size: int | str | None
    device: str | int | torch.device | None
    device_transform: Callable[[Any], Any] | None
    device_prefetch: int
    snapshot_every_n_steps: SnapshotInterval


# No state of these loaders is ever saved.
_DEFAULTS = DEFAULTS | {"snapshot_every_n_steps": 0}


class StandIn(DataLoader[Any]):
    """A loader of ours that has the attributes of a loader of torch's.

    Attributes:
        kind: The class of torch's loader.
        left_out: The arguments of :func:`install` that do not fit the loader, and why; "" if all
            fit.

    Args:
        loader: The loader of torch's.
        options: The arguments of :func:`install`.
    """

    # What the loader's class may override: _auto_collation and _index_sampler.
    _read_properties: tuple[Any, Any]
    _passes_epochs = False  # torch's loader passes none, and has no set_epoch()

    def __init__(self, loader: Any, options: InstallOptions) -> None:
        # torch's constructor has checked its arguments for the loader. It is not called again,
        # since it would repeat its warnings.
        self._read(loader)
        own = self.__dict__
        own["_DataLoader__initialized"] = True
        self.kind = type(loader)
        unfit = _unfit(loader, options)
        self.left_out = "; ".join(f"without {name}: {why}" for name, why in unfit.items())
        fit = {name: value for name, value in options.items() if name not in unfit}
        own.update(_DEFAULTS, **fit)
        self._iterator = None
        self._owner = weakref.ref(loader)
        self._sample_seed = own["seed"]
        self._set_plan(EpochCounter())
        plan = self._present_plan
        plan.counter.next = vars(loader).get(_EPOCH, 0)
        if isinstance(plan.order, SeededOrder):
            plan.order.expect_epoch(plan.counter.next)

    def begin(self, loader: Any, iterator: Any) -> Any:
        """Begin an epoch of the loader, and return its iterator.

        Args:
            loader: The loader.
            iterator: The iterator whose persistent workers load; None to start new workers.
        """
        self._read(loader)
        self._iterator = iterator
        try:
            begun = iter(self)
        finally:
            # The loader keeps the iterator. With a reference here, too, there would be a cycle, and
            # only the garbage collector would end the workers.
            self._iterator = None
        if self._sample_seed is not None:
            vars(loader)[_EPOCH] = self._present_plan.counter.next
        return begun

    @property
    def as_torch_sees_it(self) -> Any:
        """The loader for which this one stands in."""
        return self._owner()

    def _read(self, loader: Any) -> None:
        """Take over the attributes that the loader has now."""
        own = self.__dict__
        own.update({name: getattr(loader, name) for name in _TORCHS})
        own["_read_properties"] = loader._auto_collation, loader._index_sampler

    @property
    def _auto_collation(self) -> Any:
        return self._read_properties[0]

    @property
    def _index_sampler(self) -> Any:
        return self._read_properties[1]

    def _source_of(self, sampler: Any) -> Sized | None:
        """Return the source of a sampler that torch made for ``shuffle``, which ``seed`` replaces.

        A sampler of the user's that is equal to one of torch's counts as torch's.
        """
        is_default = type(sampler) is SequentialSampler or (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler._num_samples is None
            and sampler.generator is None
        )
        return sampler.data_source if is_default else None

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as the loader itself does."""
        owner = self._owner()
        if not self.thread_pool and owner is not None:
            owner.check_worker_number_rationality()


def _unfit(loader: Any, options: InstallOptions) -> dict[str, str]:
    """Return which arguments of :func:`install` do not fit a loader, and why, by their names.

    Without workers, an argument that simply has no effect counts as fitting, such as ``shm_size``.
    """
    unfit = {}
    for name, value in options.items():
        option = OPTIONS[name]
        if value == _DEFAULTS[name]:
            continue
        if option.indices and isinstance(loader.dataset, IterableDataset):
            unfit[name] = "the dataset is iterable"
        elif option.workers is not None and loader.num_workers == 0:
            unfit[name] = "the loader has no workers"
        elif "multiprocessing_context" in option.excludes and loader.multiprocessing_context:
            unfit[name] = "the loader has a multiprocessing_context"
        elif name == "seed" and loader.generator is not None:
            unfit[name] = "the loader has a generator"
    return unfit
