"""Finds the user's loader by name, and copies it with changes."""

import copy
import os
import pkgutil
import sys
from typing import Any

import torch.utils.data

from shmloader.grammar import described_type
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader

# Attributes of a loader and their values without workers.
_WITHOUT_WORKERS = {
    "num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0,
    "_DataLoader__multiprocessing_context": None, "thread_pool": False, "executor": None,
    "sample_timeout": None, "worker_restarts": 0,
}  # fmt: skip


class UsageError(Exception):
    """Wrong arguments. The text is one line for the user."""


def call(name: str) -> Any:
    """Return what the function returns that ``pkg.module:function`` names.

    Raises:
        UsageError: If there is no such function, or if it or its module raises.
    """
    if not all(name.partition(":")):
        raise UsageError(f"{name!r} is not of the form pkg.module:make_loader")
    here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, here)
    try:
        return pkgutil.resolve_name(name)()
    except Exception as error:
        text = f"{name} raised {type(error).__name__}: {error}"
        raise UsageError(text.splitlines()[0].rstrip(": ")) from error


def make_loader(name: str) -> Any:
    """Return the loader that the user's function makes."""
    loader = call(name)
    if probe(loader, "__iter__") is None:
        raise UsageError(f"{name}() returned {described_type(loader)}, which is not a loader")
    return loader


def without_workers(loader: Any) -> Any:
    """Return a loader like a ``DataLoader`` of torch's or of ours that loads in this process."""
    return _copied(loader, **_WITHOUT_WORKERS)


def on_torch(loader: DataLoader[Any]) -> Any:
    """Return a loader of torch's with the same samples and the arguments that torch's has, too."""
    # torch's loader has nothing nearer to device=.
    made = _copied(loader, pin_memory=loader.pin_memory or loader.device is not None)
    object.__setattr__(made, "__class__", torch.utils.data.DataLoader)
    return made


def _copied(loader: Any, **changes: object) -> Any:
    made = copy.copy(loader)
    for name, value in (changes | {"_iterator": None}).items():
        if name in vars(loader):
            object.__setattr__(made, name, value)
    return made


def close(loader: Any) -> None:
    """End the workers of a loader of any kind."""
    if (close_it := probe(loader, "close")) is not None:
        close_it()
    elif probe(loader, "_iterator") is not None:
        loader._iterator = None  # torch's persistent workers
