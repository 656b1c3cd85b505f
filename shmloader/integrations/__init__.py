"""Adapters for frameworks that make their own loaders, or drive ours in a way of their own.

Each adapter is a module. ``accelerate``, ``lightning`` and ``ray`` import their framework.
``transformers`` does not, and neither does ``seeding``, which adapts transforms of Albumentations
and MONAI. Where no adapter is needed, or :func:`shmloader.install` suffices, there is none:
``docs/howto/frameworks.md`` lists what each framework needs. ``prometheus`` is for no framework: it
exports metrics of loaders.

``accelerate`` and ``ray`` share the functions here. They make loaders with the class and the
arguments of another loader, but other samples.
"""

import inspect
from typing import Any

from torch.utils.data import IterableDataset

from shmloader.loader.dataloader import DataLoader
from shmloader.loader.sharded import ShardedDataLoader

# Arguments that say which samples are in which batch.
_OF_ORDER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "last_batch")


def check_loader(loader: object, caller: str) -> None:
    """Raise TypeError if a loader cannot be rebuilt for a rank.

    Args:
        loader: The loader.
        caller: Name of the function that got the loader, for the message.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{caller} needs a shmloader.DataLoader, but got {type(loader).__name__}")
    if isinstance(loader, ShardedDataLoader):
        raise TypeError(
            f"{caller} would divide the batches of a ShardedDataLoader again. Give a DataLoader, "
            "or use the ShardedDataLoader as it is."
        )


def rebuild(loader: DataLoader[Any], dataset: Any, **order: Any) -> DataLoader[Any]:
    """Return a loader of the same class, with the same arguments except for those given here.

    Args:
        loader: The loader. The arguments are read from its attributes of the same names.
        dataset: The dataset of the new loader.
        order: The arguments that say which samples are in which batch: ``batch_sampler``, or
            ``sampler`` and ``batch_size``, or for an iterable dataset ``batch_size`` alone. With
            ``batch_size``, there may be ``drop_last`` or ``last_batch``, too.
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
