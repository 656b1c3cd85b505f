"""``shmloader doctor``: what the machine offers, or what stands in the way of a loader.

An object that forked workers cannot share is known by the name of its type. No package is imported
for this: an object of a package exists only where it was imported already.
"""

import argparse
import collections
import contextlib
import importlib.util
import logging
import multiprocessing
import platform
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader.batch.collator import bytes_of
from shmloader.batch.explain import find_unpicklable
from shmloader.batch.payload import Payload
from shmloader.cli.target import UsageError, call, close, without_workers
from shmloader.grammar import described_type, size
from shmloader.interruptions import probe
from shmloader.loader.dataloader import DataLoader
from shmloader.memory.limits import (
    affinity,
    core_quota,
    describe_address_space,
    free_memory,
    usable_cores,
    why_unsupported,
)
from shmloader.shared.sharing import attributes_of

# What of a loader is sent to its workers.
_SENT = ("dataset", "collate_fn", "worker_init_fn", "on_error")
# The most parts of a loader's objects that are looked at.
_MOST_PARTS = 100_000

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None))
# A logger leads to all loggers of the process.
_OPAQUE = (*_ATOMS, type, types.ModuleType, types.CodeType, torch.dtype, logging.Logger)

# Names of types whose objects forked workers cannot share. The extension module of lmdb gives its
# classes no module.
_UNFORKABLE = re.compile(
    r"sqlite3\.(Connection|Cursor)"
    r"|h5py\._hl\.base\.HLObject|tables\.file\.File|netCDF4\._netCDF4\.Dataset"
    r"|(builtins|lmdb(\.\w+)?)\.(Environment|Transaction|Cursor|_Database)"
    r"|_io\.(FileIO|Buffered\w+|TextIOWrapper)|tempfile\._TemporaryFileWrapper"
    r"|zipfile(\._path)?\.ZipFile|tarfile\.TarFile"
    r"|_?socket\.socket|multiprocessing\.connection\._ConnectionBase"
    r"|psycopg2\.extensions\.connection|(psycopg|(pymysql|MySQLdb)\.connections)\.Connection"
    r"|pymongo(\.synchronous)?\.mongo_client\.MongoClient|requests\.sessions\.Session"
    r"|http\.client\.HTTPConnection|httpx\.Client|grpc\._channel\.Channel"
    r"|threading\.Thread|concurrent\.futures\.\w+\.(Thread|Process)PoolExecutor"
)

# An expression that leads to an object, such as "dataset.files[3]", and the object.
_Part = tuple[str, Any]


def doctor(options: argparse.Namespace) -> int:
    """Run the command. With ``--json``, the result is left in ``options.result``.

    Returns:
        The exit code: 1 if the loader has a problem.

    Raises:
        UsageError: If the argument names no function that returns a loader or a dataset.
    """
    if options.target is None:
        system = f"{platform.system()} {platform.release()}, {platform.machine()}"
        title = f"Python {platform.python_version()}, torch {torch.__version__}, {system}"
        (rows, checks), problems = _machine(), list[dict[str, str]]()
    else:
        title, rows, checks, problems = _examine(options.target)
    if options.json:
        options.result = {"title": title, "rows": rows, "checks": checks, "problems": problems}
        return bool(problems)
    found = ("{path} ({kind})\n{what}.\nRemedy: {remedy}.".format(**one) for one in problems)
    print(f"{title}\n")
    for name, text in (*rows.items(), *(("problem", text) for text in found)):
        print(f"  {name:<16}" + text.replace("\n", f"\n{'':<18}"))
    if options.target is not None:
        print("\nA problem was found." if problems else "\nNo problem was found.")
    return bool(problems)


def _machine() -> tuple[dict[str, str], dict[str, str]]:
    """Return what the machine offers to loaders, and the verdicts: "ok" or "unavailable"."""
    root, devices = Path("/"), "none that torch can use"
    quota, cores, free = core_quota(root), usable_cores(root), free_memory(root)
    by = "" if quota is None else f"; {quota:g} by the quota of the control group"
    why = why_unsupported()
    without = "num_workers > 0 uses torch's own workers, with a warning; thread_pool=True works."
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        devices = f"{torch.accelerator.device_count()} ({kind})"
    is_built = importlib.util.find_spec("shmloader.memory._streaming") is not None
    offered = {
        "shared_memory": not why,
        "accelerator": torch.accelerator.is_available(),
        "c_function": is_built,
    }
    rows = {
        "cores": f"{cores} ({affinity()} by affinity{by})",
        "memory": f"{size(free.nbytes)} free ({free.limit})" if free else "unknown",
        "shared memory": f"{why}\n{without}" if why else "available",
        "address space": describe_address_space(),
        "start method": multiprocessing.get_context().get_start_method(),
        "devices": devices,
        "C function": "built" if is_built else "not built: large copies pass the CPU's caches",
    }
    return rows, {name: "ok" if has else "unavailable" for name, has in offered.items()}


def _examine(name: str) -> tuple[str, dict[str, str], dict[str, str], list[dict[str, str]]]:
    """Return a title, the rows about a loader, the verdicts, and what its workers cannot use."""
    target = call(name)
    loader, problems = _loader_of(target, name), list[dict[str, str]]()
    context = probe(loader, "multiprocessing_context") or multiprocessing.get_context()
    method = "none" if probe(loader, "thread_pool", False) else context.get_start_method()
    title = f"{name}: {type(target).__name__}; start method: {method}"

    def complain(check: str, path: str, kind: str, what: str, remedy: str) -> None:
        problems.append(
            {"check": check, "path": path, "kind": kind, "what": what, "remedy": remedy}
        )

    roots = {name: value for name in _SENT if (value := probe(loader, name)) is not None}
    rows = dict[str, str]()
    if method == "fork":
        for path, value in walk(roots):
            if not is_forkable(value):
                what = "forked workers share it: they disturb each other, or wait for ever"
                remedy = (
                    "open or create it in the worker: set it to None in __init__, and make it "
                    "when __getitem__ first needs it"
                )
                complain("fork", path, _name_of(type(value)), what, remedy)
        if torch.cuda.is_initialized():
            what = "the function used CUDA in this process, and CUDA does not work in a forked one"
            complain("cuda", "torch.cuda", "CUDA", what, 'multiprocessing_context="forkserver"')
    elif method != "none":
        try:
            with contextlib.closing(Payload(tuple(roots.values()))) as payload:
                rows["pickle"] = f"{size(payload.nbytes)}; sent once for all workers"
        except Exception as error:  # noqa: BLE001 - a method of the user's may raise anything
            part = find_unpicklable([*roots.values()], [*roots])
            path, value = part or ("the arguments of the loader", loader)
            remedy = "open or create it in the worker, and leave it out in __getstate__"
            what = f"it cannot be pickled ({_first_line(error)})"
            complain("pickle", path, _name_of(type(value)), what, remedy)
    try:
        rows["batch"] = size(_bytes_of_batch(loader))
    except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
        remedy = "iterate the loader with num_workers=0 to see the traceback"
        what = f"making it raises {_first_line(error)}"
        complain("batch", "the first batch", type(error).__name__, what, remedy)
    return title, rows, _verdicts(method, problems), problems


def _verdicts(method: str, problems: list[dict[str, str]]) -> dict[str, str]:
    """Return the verdict of each check: "ok", "problem", or "skipped" for other start methods'."""
    done = {"fork": ("fork", "cuda"), "none": ()}.get(method, ("pickle",))
    checks = dict.fromkeys(("fork", "cuda", "pickle", "batch"), "skipped")
    checks |= dict.fromkeys((*done, "batch"), "ok")
    return checks | {each["check"]: "problem" for each in problems}


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


def _bytes_of_batch(loader: Any) -> int:
    alone = without_workers(loader)
    try:
        return bytes_of(next(iter(alone), None))
    finally:
        close(alone)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def walk(roots: dict[str, Any]) -> Iterator[_Part]:
    """Yield named objects, their items and attributes, each once, without running the user's code.

    The parts of what cannot be forked are left out.
    """
    # By id(); the value keeps the object alive.
    seen: dict[int, object] = {}
    waiting = collections.deque(roots.items())
    while waiting and len(seen) < _MOST_PARTS:
        path, value = waiting.popleft()
        if not isinstance(value, _OPAQUE) and id(value) not in seen:
            seen[id(value)] = value
            yield path, value
            if is_forkable(value) and not isinstance(value, torch.Tensor | np.ndarray):
                waiting.extend((path + end, part) for end, part in _parts_of(value))


def _parts_of(value: Any) -> Iterator[_Part]:
    """Yield what an object refers to, each with the end of the expression that leads to it."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        pairs = [(key, one) for key, one in value.items() if type(one) not in _ATOMS]
        items = [(repr(key) if type(key) in _ATOMS else "…", one) for key, one in pairs]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        items = [(str(at), one) for at, one in enumerate(list(value)) if type(one) not in _ATOMS]
    yield from ((f"[{name}]", one) for name, one in items)
    yield from ((f".{name}", one) for name, one in attributes_of(value).items())


def is_forkable(value: Any) -> bool:
    """Return whether forked workers can share an object, for instance since it is closed."""
    if isinstance(value, torch.Tensor):
        return not value.is_cuda
    names = [name for kind in type(value).__mro__ if _UNFORKABLE.fullmatch(name := _name_of(kind))]
    if names and names[0].startswith("sqlite3."):
        return probe(probe(value, "connection", value), "total_changes") is None
    return (
        not names
        or True in (probe(value, "closed"), probe(value, "_closed"))
        # An executor that has not started, a thread that has ended.
        or not (probe(value, "_threads", True) and probe(value, "_processes", True))
        or not probe(value, "is_alive", lambda: True)()
        # A file that is only written, such as a log, has no data to mix up.
        or not probe(value, "readable", lambda: True)()
    )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
