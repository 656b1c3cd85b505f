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

from shmloader.batch.explain import Unpicklable, find_unpicklable
from shmloader.batch.payload import Payload
from shmloader.batch.timer import bytes_of
from shmloader.cli.parts import Part, Parts, find_hazard, type_name
from shmloader.cli.target import Run, UsageError, without_workers
from shmloader.grammar import described_type
from shmloader.loader.dataloader import DataLoader
from shmloader.memory.limits import free_memory
from shmloader.probing import probe
from shmloader.shared.arrays import SharedArray
from shmloader.shared.counting import estimate_objects

_METHODS = ("fork", "forkserver", "spawn")
_PICKLED = ("forkserver", "spawn")
# What of a loader is sent to its workers.
_SENT = ("dataset", "collate_fn", "worker_init_fn", "on_error")
_ROOT = Path("/")

_OPEN_THERE = (
    "open it in the worker: leave it None in __init__, and open it in __getitem__ when it is None, "
    "or in worker_init_fn"
)
_FORKSERVER = 'multiprocessing_context="forkserver"'


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
        is_healthy: Whether nothing goes wrong with the loader as it is.
        fitting: The start methods with which nothing goes wrong.
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
        batch_s: How long the first batch took, in seconds, without workers.
        slots: Number of batches for which shared memory may be taken.
        slot_bytes: Shared memory for the batches of one rank.
        worker_bytes: Memory of one worker without the interpreter: objects, and its share of the
            slots.
        rank_bytes: Memory that each further rank of a host takes, for its dataset and its workers,
            without the interpreters, and what lies in shared memory or mapped files already.
    """

    kind: str
    workers: int
    method: str
    problems: list[Problem] = field(default_factory=list)
    is_healthy: bool = True
    fitting: list[str] = field(default_factory=list)
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
    slot_bytes: int = 0
    worker_bytes: int | None = None
    rank_bytes: int = 0


def diagnose(target: object, name: str) -> Diagnosis:
    """Examine a loader or a dataset.

    Args:
        target: What the user's function returned.
        name: Name of the function, for error messages.

    Raises:
        UsageError: If ``target`` is neither a loader nor a dataset.
    """
    loader = _loader_of(target, name)
    context = probe(loader, "multiprocessing_context") or multiprocessing.get_context()
    is_threaded = probe(loader, "thread_pool", False)
    method = "threads" if is_threaded else context.get_start_method()
    found = Diagnosis(type(target).__name__, loader.num_workers or 2, method)
    roots = [Part(name, probe(loader, name)) for name in _SENT]
    _look_at_parts(found, [root for root in roots if root.value is not None])
    _look_at_process(found)
    _pickle(found, roots)
    _make_batch(found, loader)
    for problem in found.problems:
        is_concerned = not problem.methods or method in problem.methods
        problem.matters = problem.is_certain and is_concerned
    found.is_healthy = not any(problem.matters for problem in found.problems)
    bad = {each for problem in found.problems if problem.is_certain for each in problem.methods}
    found.fitting = [each for each in _METHODS if each not in bad]
    _add_up(found)
    return found


def _loader_of(target: object, name: str) -> Any:
    if isinstance(target, torch.utils.data.DataLoader):
        return target
    has_items = None not in (probe(target, "__getitem__"), probe(target, "__len__"))
    if (has_items or isinstance(target, Dataset)) and not isinstance(target, type):
        return DataLoader(target)  # type: ignore[arg-type]
    raise UsageError(
        f"{name}() returned {described_type(target)}, which is neither a DataLoader nor a dataset"
    )


def _add_up(found: Diagnosis) -> None:
    """Compute the memory of slots, workers and ranks."""
    is_threaded = found.method == "threads"
    found.rank_bytes = found.object_bytes + found.array_bytes
    if found.batch_bytes is not None:
        found.slot_bytes = 0 if is_threaded else found.slots * found.batch_bytes
        found.worker_bytes = found.object_bytes + found.slot_bytes // max(1, found.workers)
        if not is_threaded:
            found.rank_bytes += found.workers * found.object_bytes + found.slot_bytes


def _look_at_parts(found: Diagnosis, roots: list[Part]) -> None:
    """Find what does not work in workers, and measure objects, tensors and arrays."""
    parts, storages = Parts(), set[int]()
    walks = (parts.walk(root, lambda value: find_hazard(value) is not None) for root in roots)
    for part in itertools.chain.from_iterable(walks):
        kind, *reasons = find_hazard(part.value) or ("",)
        for method, what in zip(("fork", "threads"), reasons, strict=False):
            if what:
                remedy = _remedy(kind, method)
                found.problems.append(Problem(part.path, kind, what, remedy, (method,)))
        _add_size(found, part, storages)
    found.is_complete = parts.is_complete
    found.objects, found.object_bytes = estimate_objects(roots[0].value)


def _remedy(kind: str, method: str) -> str:
    if kind.startswith("_thread."):
        return "release it before iter(loader)"
    if kind == "CUDA tensor":
        return "keep it on the CPU, and let device= move the batches"
    if method == "threads":
        return "open one for each thread (threading.local()), or use processes"
    return _OPEN_THERE


def _add_size(found: Diagnosis, part: Part, storages: set[int]) -> None:
    """Add the size of a tensor or an array, unless its memory was counted before."""
    value = part.value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        storage = value.untyped_storage()
        key, nbytes, is_shared = storage.data_ptr(), storage.nbytes(), value.is_shared()
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        key, nbytes = value.__array_interface__["data"][0], value.nbytes
        is_shared = isinstance(value, np.memmap | SharedArray)
    else:
        return
    if key not in storages:
        storages.add(key)
        if is_shared:
            found.shared_bytes += round(nbytes * part.weight)
        else:
            found.array_bytes += round(nbytes * part.weight)


def _look_at_process(found: Diagnosis) -> None:
    """Find what stands in the way of forking this process: CUDA, and other threads."""
    known = (threading.main_thread(), threading.current_thread())
    others = [thread.name for thread in threading.enumerate() if thread not in known]
    if others:
        what = (
            f"it has {len(others)} more threads ({', '.join(others[:3])}); a lock that one of "
            "them holds when a worker is forked stays locked in the worker"
        )
        remedy = f"{_FORKSERVER}; or start them after iter(loader)"
        note = Problem("this process", "threading.Thread", what, remedy, ("fork",), False)
        found.problems.append(note)
    if torch.cuda.is_initialized():
        what = "the function used CUDA in this process, and CUDA does not work in a forked one"
        remedy = f"{_FORKSERVER}; or use CUDA only after the workers started"
        found.problems.append(Problem("torch.cuda", "CUDA", what, remedy, ("fork",)))


def _pickle(found: Diagnosis, roots: list[Part]) -> None:
    """Pickle what workers get with "spawn". If that fails, find the part that cannot be pickled."""
    free = free_memory(_ROOT)
    needed = found.array_bytes + found.object_bytes
    if free is not None and needed > free.nbytes // 2:
        return  # the pickle would take as much memory again
    values = tuple(root.value for root in roots)
    began_s = time.monotonic()
    try:
        payload = Payload(values)
    except Exception as error:  # noqa: BLE001 - a method of the user's may raise anything
        part = find_unpicklable(values, _SENT)
        path, value = part or Unpicklable("the arguments of the loader", values)
        what = f"it cannot be pickled ({_first_line(error)})"
        remedy = (
            "open or create it in the worker; or leave it out in __getstate__, and create it again "
            "in __setstate__"
        )
        found.problems.append(Problem(path, type_name(type(value)), what, remedy, _PICKLED))
    else:
        found.pickle_s = time.monotonic() - began_s
        found.pickle_bytes, found.by_value = payload.nbytes, payload.by_value
        payload.close()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _make_batch(found: Diagnosis, loader: Any) -> None:
    """Make one batch, without workers, and measure it."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        config = loader._config()
        found.slots = config.most_window + config.lend_limit
    # The number of slots that a DataLoader with this number of workers has.
    found.slots = found.slots or 2 * found.workers + 4
    alone = without_workers(loader)
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
        what = f"making it raises {_first_line(error)}"
        remedy = "iterate the loader with num_workers=0 to see the traceback"
        found.problems.append(Problem("the first batch", type(error).__name__, what, remedy, ()))
