"""Finds what does not work in a loader's workers, and how much memory the loader takes."""

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.batch.collator import bytes_of
from shmloader.batch.explain import Unpicklable, find_unpicklable
from shmloader.batch.payload import Payload
from shmloader.cli.hazards import Part, find_hazard, type_name, walk
from shmloader.cli.target import UsageError, close, without_workers
from shmloader.grammar import counted, described_type, seconds, size
from shmloader.loader.dataloader import DataLoader
from shmloader.memory.limits import free_memory
from shmloader.memory.segment import address_of, find_segment
from shmloader.probing import probe
from shmloader.shared.counting import estimate_objects

#: How workers start, and what that means.
METHODS = {
    "fork": "Workers start in milliseconds and share loaded memory; nothing is pickled.",
    "forkserver": "Workers start in milliseconds after a server has imported torch. The dataset is "
    "pickled once for all of them.",
    "spawn": "As with forkserver, and each loader starts a server of its own.",
}
_PICKLED = ("forkserver", "spawn")
# What of a loader is sent to its workers.
_SENT = ("dataset", "collate_fn", "worker_init_fn", "on_error")
# From this many Python objects on, the report suggests sharing the dataset.
_MANY_OBJECTS = 100_000

#: A value, and what it means for a loader.
Row = tuple[str, str]


@dataclass
class Problem:
    """Something that does not work in the loader's workers, or would not with another start method.

    Attributes:
        path: The expression that leads to the part, such as ``dataset.connection``.
        kind: Name of the part's type.
        what: What goes wrong.
        remedy: What to do.
        methods: The start methods with which it goes wrong; empty for all of them.
    """

    path: str
    kind: str
    what: str
    remedy: str
    methods: tuple[str, ...] = ()


@dataclass
class Diagnosis:
    """What was found out about a loader.

    Attributes:
        kind: Name of the type of the loader or dataset that the function returned.
        method: How the workers start, or "threads".
        rows: The rows of the report.
        problems: What goes wrong with the loader as it is.
        notes: What would go wrong with another start method.
    """

    kind: str
    method: str
    rows: dict[str, Row]
    problems: list[Problem]
    notes: list[Problem]


def diagnose(target: object, name: str) -> Diagnosis:
    """Examine a loader or a dataset.

    Args:
        target: What the user's function returned.
        name: Name of the function, for error messages.

    Raises:
        UsageError: If ``target`` is neither a loader nor a dataset.
    """
    loader = _loader_of(target, name)
    workers = loader.num_workers or 2
    context = probe(loader, "multiprocessing_context") or multiprocessing.get_context()
    is_threaded = probe(loader, "thread_pool", False)
    method = "threads" if is_threaded else context.get_start_method()
    roots = [Part(name, value) for name in _SENT if (value := probe(loader, name)) is not None]
    objects, object_bytes = estimate_objects(loader.dataset)
    array_bytes, shared_bytes, found = _look_at_parts(roots)
    found += _look_at_process()
    rows = {"dataset": _describe_dataset(array_bytes, shared_bytes, objects, object_bytes)}
    if not is_threaded:
        rows["pickle"] = _pickle(roots, array_bytes + object_bytes, found)
    batch_bytes, rows["batch"] = _make_batch(loader, found)
    config = loader._config() if isinstance(loader, DataLoader) and loader.num_workers else None
    slots = config.most_window + config.lend_limit if config else 2 * workers + 4
    slot_bytes = 0 if is_threaded else slots * batch_bytes
    of_workers = 0 if is_threaded else workers * object_bytes
    of_rank = size(object_bytes + array_bytes + slot_bytes + of_workers)
    held = f"{size(slot_bytes)} for {counted(slots, 'batch', 'batches')}, up to {size(of_workers)} "
    held += f"for the Python objects that {counted(workers, 'worker')} use"
    meaning = f"Each further rank takes {of_rank} more, without interpreters. share_on_host(build) "
    meaning += "keeps one dataset for all ranks of a host, and "
    meaning += "ShardedDataLoader(worker_scope='host') one pool of workers."
    rows["memory"] = held, meaning
    bad = {each for problem in found for each in problem.methods}
    fitting = [each for each in METHODS if each not in bad]
    if not is_threaded:
        meaning = METHODS[fitting[0]] if fitting else "Solve the problems, or use num_workers=0."
        rows["start methods"] = ", ".join(fitting) or "none works", meaning
    is_problem = [not one.methods or method in one.methods for one in found]
    return Diagnosis(
        type(target).__name__,
        method,
        rows,
        [one for one, matters in zip(found, is_problem, strict=True) if matters],
        [one for one, matters in zip(found, is_problem, strict=True) if not matters],
    )


def _loader_of(target: object, name: str) -> Any:
    if isinstance(target, torch.utils.data.DataLoader):
        return target
    has_items = None not in (probe(target, "__getitem__"), probe(target, "__len__"))
    if (has_items or isinstance(target, Dataset)) and not isinstance(target, type):
        return DataLoader(target)  # type: ignore[arg-type]
    raise UsageError(
        f"{name}() returned {described_type(target)}, which is neither a DataLoader nor a dataset"
    )


def _look_at_parts(roots: list[Part]) -> tuple[int, int, list[Problem]]:
    """Return the bytes of arrays, those of them in shared memory, and what must not be forked."""
    sizes = {False: 0.0, True: 0.0}
    storages, found = set[int](), list[Problem]()
    for part in walk(*roots):
        hazard = find_hazard(part.value)
        if hazard is not None:
            remedy = (
                "open or create it in the worker: leave it None in __init__, and make it in "
                "__getitem__ when it is None, or in worker_init_fn"
            )
            found.append(Problem(part.path, *hazard, remedy, ("fork",)))
        for key, nbytes, is_shared in _memory_of(part.value):
            if key not in storages:
                storages.add(key)
                sizes[is_shared] += nbytes * part.weight
    return round(sizes[False]), round(sizes[True]), found


def _memory_of(value: Any) -> Iterator[tuple[int, int, bool]]:
    """Yield the address and size of a tensor's or an array's memory, and whether it is shared."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        storage = value.untyped_storage()
        yield storage.data_ptr(), storage.nbytes(), value.is_shared()
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        is_shared = isinstance(value, np.memmap) or find_segment(*address_of(value)) is not None
        yield value.__array_interface__["data"][0], value.nbytes, is_shared


def _describe_dataset(arrays: int, shared: int, objects: int, object_bytes: int) -> Row:
    value = f"{size(arrays)} of tensors and arrays, {size(shared)} more in shared memory or mapped "
    value += f"files, about {objects:,} Python objects ({size(object_bytes)})"
    if objects < _MANY_OBJECTS:
        return value, ""
    return value, (
        "dataset = shmloader.share(dataset) keeps the objects in memory only once; "
        "share_on_host(build) once for all ranks of a host."
    )


def _look_at_process() -> list[Problem]:
    """Find what stands in the way of forking this process: CUDA."""
    if not torch.cuda.is_initialized():
        return []
    what = "the function used CUDA in this process, and CUDA does not work in a forked one"
    remedy = 'multiprocessing_context="forkserver"; or use CUDA only after the workers started'
    return [Problem("torch.cuda", "CUDA", what, remedy, ("fork",))]


def _pickle(roots: list[Part], nbytes: int, found: list[Problem]) -> Row:
    """Pickle what workers get with "spawn". If that fails, find the part that cannot be pickled."""
    free = free_memory(Path("/"))
    if free is not None and nbytes > free.nbytes // 2:  # the pickle would take as much again
        return "not tried: there is too little free memory for a copy of the dataset", ""
    values = tuple(root.value for root in roots)
    began_s = time.monotonic()
    try:
        payload = Payload(values)
    except Exception as error:  # noqa: BLE001 - a method of the user's may raise anything
        part = find_unpicklable(values, [root.path for root in roots])
        path, value = part or Unpicklable("the arguments of the loader", values)
        what = f"it cannot be pickled ({_first_line(error)})"
        remedy = (
            "open or create it in the worker; or leave it out in __getstate__, and create it again "
            "in __setstate__"
        )
        found.append(Problem(path, type_name(type(value)), what, remedy, _PICKLED))
        return "not possible, see below", ""
    took_s, nbytes = time.monotonic() - began_s, payload.nbytes
    payload.close()
    how = ", by cloudpickle" if payload.by_value else ""
    meaning = "With spawn and forkserver, sent once for all workers; not sent with fork."
    return f"{size(nbytes)} in {seconds(took_s)}{how}", meaning


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _make_batch(loader: Any, found: list[Problem]) -> tuple[int, Row]:
    """Make one batch, without workers, and return its size and the row about it."""
    alone, began_s = without_workers(loader), time.monotonic()
    try:
        nbytes = bytes_of(next(iter(alone)))
    except StopIteration:
        return 0, ("none", "")
    except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
        what = f"making it raises {_first_line(error)}"
        remedy = "iterate the loader with num_workers=0 to see the traceback"
        found.append(Problem("the first batch", type(error).__name__, what, remedy))
        return 0, ("none", "")
    finally:
        close(alone)
    return nbytes, (f"{size(nbytes)}; the first one took {seconds(time.monotonic() - began_s)}", "")
