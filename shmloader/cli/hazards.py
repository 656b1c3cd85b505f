"""Finds the parts of a user's object that do not work in forked workers.

:func:`walk` yields each part with the expression that leads to it. :func:`find_hazard` says what
goes wrong with a part, by the name of its type. No package is imported for this: an object of a
package exists only where it was imported already.
"""

import collections
import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.interruptions import probe
from shmloader.shared.sharing import attributes_of

# The most parts that are looked at, and the most items of one container.
_PARTS = 100_000
_ITEMS = 1_000

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None))
# A logger leads to all loggers of the process.
_OPAQUE = (*_ATOMS, type, types.ModuleType, types.CodeType, torch.dtype, logging.Logger)

# Methods of a dataset that load samples, whose variables are looked at, unless they belong to a
# class of these packages.
_KNOWN = ("builtins", "torch", "numpy", "shmloader")
_LOADING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")


class Part(NamedTuple):
    """A part of an object.

    Attributes:
        path: The expression that leads to it, such as ``dataset.files[3]``.
        value: The part.
        weight: How many parts it stands for, where only some items of a container are looked at.
    """

    path: str
    value: Any
    weight: float = 1.0


def walk(*roots: Part) -> Iterator[Part]:
    """Yield objects and all of their parts, each once, without running the user's code.

    The parts of a part with a hazard are left out.
    """
    # By id(); the value keeps the object alive.
    seen: dict[int, object] = {}
    waiting = collections.deque(roots)
    while waiting and len(seen) < _PARTS:
        part = waiting.popleft()
        if isinstance(part.value, _OPAQUE) or id(part.value) in seen:
            continue
        seen[id(part.value)] = part.value
        yield part
        if find_hazard(part.value) is None:
            inner = list(_children_of(part.value))
            step = max(1.0, len(inner) / _ITEMS)
            some = (inner[int(step * at)] for at in range(round(len(inner) / step)))
            waiting.extend(Part(part.path + end, one, part.weight * step) for end, one in some)


def _children_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, each with the end of the expression that leads to it."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return
    if isinstance(value, dict):
        if not set(map(type, value.values())) <= set(_ATOMS):
            named = ((repr(key) if type(key) in _ATOMS else "…", one) for key, one in value.items())
            yield from ((f"[{name}]", one) for name, one in named)
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        if not set(map(type, value)) <= set(_ATOMS):  # of plain values there may be millions
            yield from ((f"[{at}]", one) for at, one in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    yield from ((f".{name}", one) for name, one in attributes_of(value).items())
    ours = [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in _KNOWN]
    for function in [value, *(vars(kind).get(name) for kind in ours for name in _LOADING)]:
        if isinstance(function, types.FunctionType):
            with contextlib.suppress(ValueError):  # a variable may have no value yet
                names = inspect.getclosurevars(function)
                variables = {**names.globals, **names.nonlocals}
                yield from ((f" (variable {name!r})", one) for name, one in variables.items())


_SQLITE = "SQLite forbids using a connection in a forked process: it may corrupt the database"
_HDF5 = "the forked workers share one file position and the library's locks: reads fail or hang"
_LMDB = "LMDB forbids using an environment that was opened before a fork"
_CLIENT = "the forked workers share one connection, and read each other's answers"
_POSITION = "the forked workers share one file position: they read each other's data"
_THREAD = "the thread does not run in a forked process, so what waits for it hangs"

# Names of types, with the reason. A type matches by itself or by a base class.
_RULES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("sqlite3.Connection", "sqlite3.Cursor", "sqlite3.Blob"), _SQLITE),
    (("h5py._hl.base.HLObject", "tables.file.File", "netCDF4._netCDF4.Dataset"), _HDF5),
    # The extension module of lmdb gives its classes no module.
    (tuple(f"{module}.{name}" for module in ("builtins", "lmdb", "lmdb.cpython", "lmdb.cffi")
           for name in ("Environment", "Transaction", "Cursor", "_Database")), _LMDB),
    (("zipfile.ZipFile", "zipfile._path.ZipFile", "tarfile.TarFile",
      "_io.FileIO", "_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom",
      "_io.TextIOWrapper", "tempfile._TemporaryFileWrapper"), _POSITION),
    (("socket.socket", "_socket.socket", "multiprocessing.connection._ConnectionBase",
      "psycopg2.extensions.connection", "psycopg.Connection", "pymysql.connections.Connection",
      "MySQLdb.connections.Connection", "pymongo.mongo_client.MongoClient",
      "pymongo.synchronous.mongo_client.MongoClient", "requests.sessions.Session",
      "http.client.HTTPConnection", "httpx.Client", "grpc._channel.Channel"), _CLIENT),
    (("threading.Thread", "concurrent.futures.thread.ThreadPoolExecutor",
      "concurrent.futures.process.ProcessPoolExecutor"), _THREAD),
)  # fmt: skip


def find_hazard(value: Any) -> tuple[str, str] | None:
    """Return the kind of an object and what goes wrong with it in forked workers, or None."""
    name = type_name(type(value))
    if isinstance(value, torch.Tensor):
        return ("CUDA tensor", "CUDA does not work in a forked process") if value.is_cuda else None
    for base in map(type_name, type(value).__mro__):
        for names, reason in _RULES:
            if base in names:
                is_open = _IS_OPEN.get(base.partition(".")[0], _is_unclosed)
                return (name, reason) if is_open(value) else None
    return None


def type_name(kind: type) -> str:
    """Return the name of a type with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_unclosed(value: Any) -> bool:
    return True not in (probe(value, "closed"), probe(value, "_closed"))


# Tells whether an object is in use. Keyed by the package of the type in the rule.
_IS_OPEN: dict[str, Callable[[Any], bool]] = {
    "sqlite3": lambda value: probe(probe(value, "connection", value), "total_changes") is not None,
    "zipfile": lambda value: probe(value, "fp") is not None,
    "h5py": lambda value: bool(probe(probe(value, "id"), "valid", True)),
    # A file that is only written, such as a log, has no data to mix up.
    "_io": lambda value: not value.closed and value.readable(),
    "threading": lambda value: value.is_alive(),
    # An executor starts its threads or processes only when they are needed.
    "concurrent": lambda value: bool(probe(value, "_threads") or probe(value, "_processes")),
}
