"""``shmloader doctor``: what the machine offers, or what stands in the way of a loader."""

import argparse
import importlib.util
import json
import multiprocessing
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.batch.collator import bytes_of
from shmloader.batch.explain import Unpicklable, find_unpicklable
from shmloader.batch.payload import Payload
from shmloader.cli.hazards import Part, find_hazard, type_name, walk
from shmloader.cli.target import UsageError, call, close, without_workers
from shmloader.grammar import counted, described_type, seconds, size
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader
from shmloader.memory.limits import describe_address_space, free_memory, why_unsupported
from shmloader.memory.segment import address_of, find_segment
from shmloader.pools.cores import affinity, core_quota, usable_cores
from shmloader.shared.sharing import estimate_objects

# What of a loader is sent to its workers.
_SENT = ("dataset", "collate_fn", "worker_init_fn", "on_error")
_PICKLED = ("forkserver", "spawn")
# From this many Python objects on, the report suggests sharing the dataset.
_MANY_OBJECTS = 100_000

# A value, and what it means for a loader.
_Row = tuple[str, str]


class Problem(NamedTuple):
    """Something that does not work in workers.

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


def doctor(options: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 1 if the loader has a problem.

    Raises:
        UsageError: If the argument names no function that returns a loader or a dataset.
    """
    problems, notes = list[Problem](), list[Problem]()
    if options.target is None:
        system = f"{platform.system()} {platform.release()}, {platform.machine()}"
        title = f"Python {platform.python_version()}, torch {torch.__version__}, {system}"
        rows = _machine()
        about: dict[str, Any] = {**rows}
    else:
        target = call(options.target)
        loader, kind = _loader_of(target, options.target), type(target).__name__
        method, rows, found = _diagnose(loader)
        for one in found:
            (problems if not one.methods or method in one.methods else notes).append(one)
        title = f"{options.target}: {kind}; start method: {method}"
        about = {"target": options.target, "kind": kind, "method": method, "rows": rows}
        about["problems"] = [one._asdict() for one in problems]
        about["notes"] = [one._asdict() for one in notes]
    if options.json:
        print(json.dumps(about, indent=2))
        return bool(problems)
    print(f"{title}\n")
    for name, (value, meaning) in rows.items():
        print(f"  {name:<16}{value}" + f"\n{'':<18}{meaning}" * bool(meaning))
    for word, listed in (("problem", problems), ("note", notes)):
        for one in listed:
            where = f"With {' and '.join(one.methods)}: " if one.methods else ""
            print(f"\n  {word:<16}{one.path} ({one.kind})\n{'':<18}{where}{one.what}.")
            print(f"{'':<18}Remedy: {one.remedy}.")
    if options.target is not None:
        print("\nA problem was found." if problems else "\nNo problem was found.")
    return bool(problems)


def _machine() -> dict[str, _Row]:
    """Return what the machine offers to loaders, and what that means."""
    root = Path("/")
    quota, cores, free = core_quota(root), usable_cores(root), free_memory(root)
    by = "" if quota is None else f"; {quota:g} by the quota of the control group"
    why = why_unsupported()
    devices = "none that torch can use"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        devices = f"{torch.accelerator.device_count()} ({kind})"
    streaming = importlib.util.find_spec("shmloader.memory._streaming")
    without = "num_workers > 0 uses torch's own workers, with a warning; thread_pool=True works."
    return {
        "cores": (
            f"{cores} ({affinity()} by affinity{by})",
            f"If samples keep the CPU busy, up to {cores} workers help; if samples wait, more.",
        ),
        "memory": (
            f"{size(free.nbytes)} free ({free.limit})" if free else "unknown",
            "A batch that does not fit raises SharedMemoryError before it is made.",
        ),
        "shared memory": (why or "available", without if why else "Workers collate into it."),
        "address space": (
            describe_address_space(),
            "Each process maps the filled part of all its batches that are in flight or in use.",
        ),
        "start method": (multiprocessing.get_context().get_start_method(), ""),
        "devices": (
            devices,
            "device= brings batches to a GPU with one copy less than pin_memory=True.",
        ),
        "C function": (
            "not built" if streaming is None else "built",
            "Copies of large batches bypass the CPU's caches if it is built.",
        ),
    }


# A loader --------------------------------------------------------------------------------------


def _loader_of(target: object, name: str) -> Any:
    """Return the loader that the user's function returned, or one of the dataset that it returned.

    Raises:
        UsageError: If it is neither a loader nor a dataset.
    """
    if isinstance(target, torch.utils.data.DataLoader):
        return target
    has_items = None not in (probe(target, "__getitem__"), probe(target, "__len__"))
    if (has_items or isinstance(target, Dataset)) and not isinstance(target, type):
        return DataLoader(target)  # type: ignore[arg-type]
    raise UsageError(
        f"{name}() returned {described_type(target)}, which is neither a DataLoader nor a dataset"
    )


def _diagnose(loader: Any) -> tuple[str, dict[str, _Row], list[Problem]]:
    """Return how a loader's workers start, the rows of the report, and what does not work."""
    is_threaded = probe(loader, "thread_pool", False)
    context = probe(loader, "multiprocessing_context") or multiprocessing.get_context()
    roots = [Part(name, value) for name in _SENT if (value := probe(loader, name)) is not None]
    objects, object_bytes = estimate_objects(loader.dataset)
    array_bytes, found = _look_at_parts(roots)
    if torch.cuda.is_initialized():
        what = "the function used CUDA in this process, and CUDA does not work in a forked one"
        remedy = 'multiprocessing_context="forkserver"; or use CUDA only after the workers started'
        found.append(Problem("torch.cuda", "CUDA", what, remedy, ("fork",)))
    value = f"{size(array_bytes)} of tensors and arrays that are not in shared memory, about "
    value += f"{objects:,} Python objects ({size(object_bytes)})"
    meaning = "dataset = shmloader.share(dataset) keeps the objects in memory only once; "
    meaning += "share_on_host(build) once for all ranks of a host."
    rows = {"dataset": (value, meaning if objects >= _MANY_OBJECTS else "")}
    if not is_threaded:
        rows["pickle"] = _pickle(roots, found)
    batch_bytes, rows["batch"] = _make_batch(loader, found)
    workers, methods = loader.num_workers or 2, multiprocessing.get_all_start_methods()
    config = loader._config() if isinstance(loader, DataLoader) and loader.num_workers else None
    slots = config.most_window + config.lend_limit if config else 2 * workers + 4
    taken = [0, 0] if is_threaded else [slots * batch_bytes, workers * object_bytes]
    value = (
        f"{size(taken[0])} for {counted(slots, 'batch', 'batches')}, up to {size(taken[1])} for "
    )
    value += f"the Python objects that {counted(workers, 'worker')} use"
    meaning = f"Each further rank takes {size(array_bytes + object_bytes + sum(taken))} more, "
    meaning += "without interpreters. share_on_host(build) keeps one dataset for all ranks of a "
    meaning += "host, and ShardedDataLoader(worker_scope='host') one pool of workers."
    rows["memory"] = value, meaning
    if is_threaded:
        return "threads", rows, found
    bad = {each for problem in found for each in problem.methods}
    fitting = ", ".join(each for each in methods if each not in bad)
    rows["start methods"] = fitting or "none works", ""
    return context.get_start_method(), rows, found


def _look_at_parts(roots: Sequence[Part]) -> tuple[int, list[Problem]]:
    """Return the bytes of arrays that are not in shared memory, and what must not be forked."""
    nbytes, storages, found = 0.0, set[int](), list[Problem]()
    remedy = (
        "open or create it in the worker: leave it None in __init__, and make it in __getitem__ "
        "when it is None, or in worker_init_fn"
    )
    for part in walk(*roots):
        hazard, (address, size_bytes) = find_hazard(part.value), _memory_of(part.value)
        if hazard is not None:
            found.append(Problem(part.path, *hazard, remedy, ("fork",)))
        if address not in storages:
            storages.add(address)
            nbytes += size_bytes * part.weight
    return round(nbytes), found


def _memory_of(value: Any) -> tuple[int, int]:
    """Return address and size of a tensor's or an array's memory; (0, 0) if it is shared."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_shared():
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        address, nbytes = address_of(value)
        return (0, 0) if find_segment(address, nbytes) else (address, nbytes)
    return 0, 0


def _pickle(roots: Sequence[Part], found: list[Problem]) -> _Row:
    """Pickle what workers get with "spawn". If that fails, find the part that cannot be pickled."""
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


def _make_batch(loader: Any, found: list[Problem]) -> tuple[int, _Row]:
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
