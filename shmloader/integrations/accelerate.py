"""accelerate: a ``prepare`` that keeps the class and the arguments of a loader.

``Accelerator.prepare`` reads the attributes of a loader and builds one of torch's class. All that
shmloader's loader has beyond torch's is lost. The functions here let accelerate decide which
samples each process loads, and then replace torch's loader by one of shmloader's.
"""

import inspect
from typing import Any

import accelerate
from accelerate import Accelerator
from accelerate.data_loader import SkipBatchSampler
from torch.utils.data import BatchSampler, IterableDataset

from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader

# Arguments that say which samples are in which batch.
_OF_ORDER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class _State:
    """The state of a prepared loader, as ``Accelerator.save_state`` and ``load_state`` need it."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the batch that the user has: accelerate is one batch ahead."""
        prepared = self._prepared
        state = prepared.state_dict() if hasattr(prepared, "dl_state_dict") else None
        if state is None or state.get("_iterator_finished"):
            return dict(prepared.base_dataloader.state_dict())
        return {key: value for key, value in state.items() if not key.startswith("_")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the loader, and set accelerate's number of the epoch, which would be 0."""
        self._prepared.iteration = state["epoch"]
        self._prepared.base_dataloader.load_state_dict(state)


def prepare(accelerator: Accelerator, loader: DataLoader[Any]) -> Any:
    """Prepare a loader as ``accelerator.prepare`` does, keeping its class and arguments.

    ``dispatch_batches``, ``split_batches`` and ``even_batches`` of the accelerator apply, and
    ``gather_for_metrics`` knows which samples were added to the last batch.
    ``accelerator.save_state`` saves the loader's state and ``load_state`` resumes it, in the middle
    of an epoch, too. They do not with ``dispatch_batches`` on several processes, where accelerate
    takes several batches ahead.

    Args:
        accelerator: The accelerator, with which the loader's state is registered.
        loader: A :class:`shmloader.DataLoader`.

    Returns:
        accelerate's loader. Its ``base_dataloader`` is of the class of ``loader``.

    Raises:
        TypeError: If ``loader`` is of another class, or a ``ShardedDataLoader``, which divides
            itself among the ranks.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"prepare() needs a shmloader.DataLoader, but got {type(loader).__name__}")
    if isinstance(loader, ShardedDataLoader):
        raise TypeError(
            "prepare() would divide the batches of a ShardedDataLoader again. Give a DataLoader, "
            "or use the ShardedDataLoader as it is."
        )
    prepared = accelerator.prepare_data_loader(loader)
    _put_back(prepared, loader)
    if not (hasattr(prepared, "split_batches") and accelerator.num_processes > 1):
        accelerator.register_for_checkpointing(_State(prepared))
    return prepared


def skip_first_batches(prepared: Any, num_batches: int = 0) -> Any:
    """Return a loader of the same samples without the first batches.

    The first batches are not loaded. (Those of an iterable dataset are loaded, and dropped.)
    With ``seed``, the random numbers of the other samples are as if all batches were loaded, and
    the length of the loader is that of the whole epoch.

    Args:
        prepared: What :func:`prepare` returned.
        num_batches: Number of batches to leave out, counted on this process.

    Returns:
        A loader for the rest of one epoch, as ``accelerate.skip_first_batches`` returns.
    """
    skipping = accelerate.skip_first_batches(prepared, num_batches)
    loader, batches = prepared.base_dataloader, skipping.base_dataloader.batch_sampler
    if loader.seed is None or not isinstance(batches, SkipBatchSampler):
        _put_back(skipping, loader)
        return skipping
    rest = _rebuild(loader, loader.dataset, **_order_of(batches.batch_sampler))
    rest.set_epoch(prepared.iteration)
    rest._present_plan.tells_dataset = loader._present_plan.tells_dataset
    rest.load_state_dict({**rest.state_dict(), "position": num_batches})
    skipping.base_dataloader = rest
    return skipping


def _put_back(prepared: Any, loader: DataLoader[Any]) -> None:
    """Replace the loader of torch's class inside accelerate's by one rebuilt from ``loader``."""
    base = prepared.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        order = {"batch_size": base.batch_size, "drop_last": base.drop_last}
    elif isinstance(base.sampler, BatchSampler):
        order = {"sampler": base.sampler, "batch_size": base.batch_size}
    else:
        order = _order_of(base.batch_sampler)
    prepared.base_dataloader = _rebuild(loader, base.dataset, **order)


def _order_of(batches: Any) -> dict[str, Any]:
    """Return the arguments that give a loader the batches of a batch sampler.

    With ``seed``, a sample's random numbers depend on its position in a ``sampler``, or in a batch
    of a ``batch_sampler``. So torch's own batch sampler is replaced by its arguments.
    """
    if type(batches) is BatchSampler:
        return {name: getattr(batches, name) for name in ("sampler", "batch_size", "drop_last")}
    return {"batch_sampler": batches}


def _rebuild(loader: DataLoader[Any], dataset: Any, **order: Any) -> DataLoader[Any]:
    """Return a loader of the same class, with the same arguments except for those given here.

    Args:
        loader: The loader. The arguments are read from its attributes of the same names.
        dataset: The dataset of the new loader.
        order: The arguments that say which samples are in which batch: ``batch_sampler``, or
            ``sampler`` and ``batch_size``, or for an iterable dataset ``batch_size`` alone. With
            ``batch_size``, there may be ``drop_last``, too.
    """
    names = set(inspect.signature(DataLoader.__init__).parameters)
    names |= set(inspect.signature(type(loader).__init__).parameters)
    arguments = {
        name: getattr(loader, name)
        for name in sorted(names - {"self", "dataset", "args", "kwargs", *_OF_ORDER})
        if hasattr(loader, name)
    }
    if not arguments["num_workers"]:
        arguments["prefetch_factor"] = arguments["multiprocessing_context"] = None
    if isinstance(dataset, IterableDataset):
        arguments["seed"] = loader.seed
    return type(loader)(dataset, **arguments, **order)
