"""Finds the user's loader by name, copies it with changes, and runs a loader of any kind."""

import contextlib
import copy
import importlib
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Self

import torch.utils.data

from shmloader.grammar import described_type
from shmloader.insight.record import Record, Statistics
from shmloader.insight.stats import LoaderStats, Machine
from shmloader.insight.verdict import snapshot
from shmloader.loader.by_torch import samples_of
from shmloader.loader.dataloader import DataLoader
from shmloader.pools.cores import usable_cores
from shmloader.probing import probe

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
    with contextlib.suppress(OSError):  # the current directory may have been removed
        here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
        if here not in sys.path and not sys.flags.safe_path:
            sys.path.insert(0, here)
    try:
        return pkgutil.resolve_name(name)()
    except Exception as error:
        what = f"{name} raised {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        own = (__file__, importlib.__file__, pkgutil.__file__, "<frozen ")
        frames = traceback.extract_tb(error.__traceback__)
        for frame in [one for one in frames if not one.filename.startswith(own)][:1]:
            what += f" ({frame.filename}, line {frame.lineno})"
        raise UsageError(what) from error


def make_loader(name: str) -> Any:
    """Return the loader that the user's function makes.

    Raises:
        UsageError: If what it returns cannot be iterated, or the function raises.
    """
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


# Marks the end of an epoch.
_END = object()


class Run:
    """Takes batches of a loader, epoch after epoch. Used as a context manager.

    Attributes:
        taken: Number of batches that were taken.
        epochs: Number of epochs that were begun.

    Args:
        loader: Any iterable of batches.
        step_s: Duration of a training step after each batch, in seconds.
    """

    def __init__(self, loader: Any, step_s: float = 0.0) -> None:
        self._loader = loader
        self._step_s = step_s
        self._statistics = Statistics()
        self.taken = 0
        self.epochs = 0

    def __enter__(self) -> Self:
        """Return the run itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the loader's workers."""
        close: Callable[[], None] | None = probe(self._loader, "close")
        if close is not None:
            close()
        elif probe(self._loader, "_iterator") is not None:
            self._loader._iterator = None  # torch's persistent workers

    def batches(self) -> Generator[None]:
        """Take batches endlessly.

        Ends only if the loader cannot be iterated again, such as a generator.

        Raises:
            UsageError: If the first epoch has no batch.
        """
        batch_size = probe(self._loader, "batch_size") or 1
        is_empty = False
        while not is_empty:
            self.epochs += 1
            record = Record(
                self.epochs,
                "other",
                probe(self._loader, "num_workers", 0),
                keeps_workers=probe(self._loader, "persistent_workers", False),
            )
            self._statistics.begin(record, self)
            iterator = iter(self._loader)
            record.begin()
            is_empty = True
            while _take(iterator, record, batch_size):
                is_empty = False
                self.taken += 1
                if self._step_s:
                    time.sleep(self._step_s)
                yield
            if not self.taken:
                raise UsageError("the loader returns no batch")

    def stats(self) -> LoaderStats:
        """Return the statistics of the loader itself if it is ours, and otherwise of the run."""
        if isinstance(self._loader, DataLoader) and self._loader.stats("total").batches:
            return self._loader.stats("total")
        record = self._statistics.total()
        return snapshot(record, self.epochs, Machine(usable_cores(Path("/"))))


def _take(iterator: Iterator[Any], record: Record, batch_size: int) -> bool:
    """Take the next batch, and record how long that took. Returns whether there was one."""
    began_ns = time.monotonic_ns()
    batch = next(iterator, _END)
    ended_ns = time.monotonic_ns()
    about = "other" if batch is _END else samples_of(batch, batch_size)
    record.add(began_ns, ended_ns, 0, None, about, 0)
    return batch is not _END
