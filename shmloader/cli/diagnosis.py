"""Finds what does not work in a loader's workers, and how much memory the loader takes."""

import itertools
import multiprocessing
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.batch.payload import Payload
from shmloader.batch.timer import bytes_of
from shmloader.batch.unpicklable import Unpicklable, find_unpicklable
from shmloader.cli.parts import Part, Parts, find_hazard
from shmloader.cli.target import Run, UsageError, like
from shmloader.grammar import described_type
from shmloader.loader.dataloader import DataLoader
from shmloader.memory.limits import control_groups, free_memory
from shmloader.probing import probe
from shmloader.shared.arrays import SharedArray
from shmloader.shared.counting import estimate_objects

#: From this many Python objects on, the report suggests sharing the dataset.
_MANY_OBJECTS = 100_000

_METHODS = ("fork", "forkserver", "spawn")
# The longest search for the part that cannot be pickled.
_SEARCH_S = 10.0
_PICKLED = ("forkserver", "spawn")
_ROOT = Path("/")


@dataclass
class Problem:
    """Something that does not work in the loader's workers, or would not with another start method.

    Attributes:
        path: The expression that leads to the part, such as ``dataset.connection``.
        kind: Name of the part's type.
        what: What goes wrong.
        remedy: What to do.
        methods: The start methods with which it goes wrong; "threads" stands for
            ``thread_pool=True``. Empty if it goes wrong with all of them.
        is_certain: True if it does go wrong; False if it only may.
        matters: Whether it does go wrong with the loader's own start method or threads.
    """

    path: str
    kind: str
    what: str
    remedy: str
    methods: tuple[str, ...]
    is_certain: bool = True
    matters: bool = False


@dataclass
class Diagnosis:
    """What was found out about a loader. All sizes are in bytes; None stands for unknown.

    Attributes:
        kind: Name of the type of the loader or dataset that the function returned.
        workers: The loader's number of workers, or 2 if it has none.
        method: How the workers start, or "threads".
        problems: What goes wrong.
        objects: How many Python objects the dataset holds, estimated.
        object_bytes: Memory of these objects. Each worker gets its own copy of those that it uses.
        array_bytes: Memory of the tensors and arrays of the dataset and of the loader's functions,
            which the workers share.
        shared_bytes: Memory of those that lie in shared memory already, or are mapped from files.
        is_complete: Whether all parts of the dataset and of the functions were looked at.
        pickle_bytes: Size of what is sent to the workers with "spawn" and "forkserver".
        pickle_s: How long pickling took, in seconds.
        by_value: Whether cloudpickle was needed.
        batch_bytes: Size of the tensors and arrays of one batch.
        batch_s: How long the first batch took, in seconds, without workers if the loader could be
            made again.
        slots: Number of batches for which shared memory may be taken.
    """

    kind: str
    workers: int
    method: str
    problems: list[Problem] = field(default_factory=list)
    objects: int = 0
    object_bytes: int = 0
    array_bytes: int = 0
    shared_bytes: int = 0
    is_complete: bool = True
    pickle_bytes: int | None = None
    pickle_s: float | None = None
    by_value: bool = False
    batch_bytes: int | None = None
    batch_s: float | None = None
    slots: int = 0

    @property
    def fitting(self) -> list[str]:
        """The start methods with which nothing goes wrong."""
        certain = [problem for problem in self.problems if problem.is_certain]
        bad = {method for problem in certain for method in problem.methods}
        return [method for method in _METHODS if method not in bad]

    @property
    def wants_sharing(self) -> bool:
        """Whether ``shmloader.share(dataset)`` would save memory."""
        return self.objects >= _MANY_OBJECTS

    @property
    def worker_bytes(self) -> int | None:
        """Memory of one worker without the interpreter: objects, and its share of the slots."""
        if self.batch_bytes is None:
            return None
        return self.object_bytes + self.slot_bytes // max(1, self.workers)

    @property
    def slot_bytes(self) -> int:
        """Shared memory for the batches of one rank."""
        if self.method == "threads":
            return 0
        return self.slots * (self.batch_bytes or 0)

    @property
    def rank_bytes(self) -> int:
        """Memory that each further rank of a host takes, for its dataset and its workers.

        The interpreters, and what lies in shared memory or mapped files already, are left out.
        Ranks that share the dataset and the workers take only ``slot_bytes`` each.
        """
        dataset = self.object_bytes + self.array_bytes
        if self.method == "threads":
            return dataset
        objects = 0 if self.batch_bytes is None else self.object_bytes
        return dataset + self.workers * objects + self.slot_bytes

    @property
    def is_healthy(self) -> bool:
        """Whether nothing goes wrong with the loader as it is."""
        return not any(problem.matters for problem in self.problems)


def diagnose(target: object, name: str) -> Diagnosis:
    """Examine a loader or a dataset.

    Args:
        target: What the user's function returned.
        name: Name of the function, for error messages.

    Raises:
        UsageError: If ``target`` is neither a loader nor a dataset.
    """
    loader = _loader_of(target, name)
    is_threaded = probe(loader, "thread_pool", False)
    found = Diagnosis(
        type(target).__name__,
        loader.num_workers or 2,
        "threads" if is_threaded else _start_method(loader),
    )
    roots = _roots_of(loader)
    _look_at_parts(found, roots)
    _pickle(found, loader, roots)
    _make_batch(found, loader)
    for problem in found.problems:
        is_concerned = not problem.methods or found.method in problem.methods
        problem.matters = problem.is_certain and is_concerned
    return found


def _loader_of(target: object, name: str) -> Any:
    if isinstance(target, torch.utils.data.DataLoader):
        return target
    is_dataset = isinstance(target, Dataset) or (
        probe(target, "__getitem__") is not None and probe(target, "__len__") is not None
    )
    if is_dataset and not isinstance(target, type):
        return DataLoader(target)  # type: ignore[arg-type]
    raise UsageError(
        f"{name}() returned {described_type(target)}, which is neither a DataLoader nor a dataset"
    )


def _start_method(loader: Any) -> str:
    context = loader.multiprocessing_context or multiprocessing.get_context()
    method: str = context.get_start_method()
    return method


def _roots_of(loader: Any) -> list[Part]:
    names = ("dataset", "collate_fn", "worker_init_fn", "on_error")
    parts = [Part(name, probe(loader, name)) for name in names]
    return [part for part in parts if part.value is not None]


# What goes wrong ---------------------------------------------------------------------------


def _look_at_parts(found: Diagnosis, roots: list[Part]) -> None:
    """Find what does not work in workers, and measure tensors and arrays."""
    parts, storages = Parts(), set[int]()
    walks = (parts.walk(root, lambda value: find_hazard(value) is not None) for root in roots)
    for part in itertools.chain.from_iterable(walks):
        hazard = find_hazard(part.value)
        if hazard is not None:
            if hazard.in_fork:
                found.problems.append(_problem(part, hazard.kind, hazard.in_fork, "fork"))
            if hazard.in_threads:
                found.problems.append(_problem(part, hazard.kind, hazard.in_threads, "threads"))
        _add_size(found, part, storages)
    found.is_complete = parts.is_complete
    _note_threads(found)
    dataset = roots[0].value
    found.objects, found.object_bytes = estimate_objects(dataset)
    if torch.cuda.is_initialized():
        found.problems.append(
            Problem(
                "torch.cuda",
                "CUDA",
                "the function used CUDA in this process, and CUDA does not work in a forked one",
                'multiprocessing_context="forkserver"; or use CUDA only after the workers started',
                ("fork",),
            )
        )


def _note_threads(found: Diagnosis) -> None:
    """Note the other threads of this process, which would run while workers are forked."""
    known = (threading.main_thread(), threading.current_thread())
    others = [thread.name for thread in threading.enumerate() if thread not in known]
    if others:
        found.problems.append(
            Problem(
                "this process",
                "threading.Thread",
                f"it has {len(others)} more threads ({', '.join(others[:3])}); a lock that one of "
                "them holds when a worker is forked stays locked in the worker",
                'multiprocessing_context="forkserver"; or start them after iter(loader)',
                ("fork",),
                is_certain=False,
            )
        )


def _problem(part: Part, kind: str, what: str, method: str) -> Problem:
    remedy = (
        "open it in the worker: leave it None in __init__, and open it in __getitem__ when it is "
        "None, or in worker_init_fn"
    )
    if kind.startswith("_thread."):
        remedy = "release it before iter(loader)"
    elif kind == "CUDA tensor":
        remedy = "keep it on the CPU, and let device= move the batches"
    elif method == "threads":
        remedy = "open one for each thread (threading.local()), or use processes"
    return Problem(part.path, kind, what, remedy, (method,))


def _add_size(found: Diagnosis, part: Part, storages: set[int]) -> None:
    value = part.value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        key, nbytes, is_shared = storage.data_ptr(), storage.nbytes(), value.is_shared()
    elif isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        key, nbytes = base.__array_interface__["data"][0], base.nbytes
        is_shared = isinstance(base, np.memmap | SharedArray)
    else:
        return
    if key in storages:
        return
    storages.add(key)
    if is_shared:
        found.shared_bytes += round(nbytes * part.weight)
    else:
        found.array_bytes += round(nbytes * part.weight)


# Pickle ------------------------------------------------------------------------------------


def _pickle(found: Diagnosis, loader: Any, roots: list[Part]) -> None:
    """Pickle what workers get with "spawn". If that fails, find the part that cannot be pickled."""
    free = free_memory(_ROOT, control_groups(_ROOT))
    needed = found.array_bytes + found.object_bytes
    if free is not None and needed > free.nbytes // 2:
        return  # the pickle would take as much memory again
    names = ("dataset", "collate_fn", "worker_init_fn", "on_error")
    began_s = time.monotonic()
    try:
        payload = Payload(tuple(probe(loader, name) for name in names))
    except Exception as error:  # noqa: BLE001 - a method of the user's may raise anything
        values, paths = [root.value for root in roots], [root.path for root in roots]
        part = find_unpicklable(values, paths, _SEARCH_S) or Unpicklable(
            "the arguments of the loader", values
        )
        found.problems.append(
            Problem(
                part.path,
                f"{type(part.value).__module__}.{type(part.value).__qualname__}",
                f"it cannot be pickled ({_first_line(error)})",
                "open or create it in the worker; or leave it out in __getstate__, and create it "
                "again in __setstate__",
                _PICKLED,
            )
        )
        return
    found.pickle_s = time.monotonic() - began_s
    found.pickle_bytes, found.by_value = payload.nbytes, payload.by_value
    payload.close()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# Memory ------------------------------------------------------------------------------------


def _make_batch(found: Diagnosis, loader: Any) -> None:
    """Make one batch, without workers if the loader can be made again, and measure it."""
    if isinstance(loader, DataLoader):
        config = loader._config()
        found.slots = config.most_window + config.lend_limit
    if found.slots == 0 or not loader.num_workers:
        # The number of slots that a DataLoader with this number of workers has.
        found.slots = 2 * found.workers + 4
    try:
        alone = like(loader, num_workers=0)
    except UsageError:
        alone = loader
    began_s = time.monotonic()
    try:
        with Run(alone):
            batch = next(iter(alone))
            found.batch_s = time.monotonic() - began_s
            found.batch_bytes = bytes_of(batch)
            del batch
    except StopIteration:
        return
    except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
        what = _first_line(error)
        found.problems.append(
            Problem(
                "the first batch",
                type(error).__name__,
                f"making it raises {what}",
                "iterate the loader with num_workers=0 to see the traceback",
                (),
            )
        )
