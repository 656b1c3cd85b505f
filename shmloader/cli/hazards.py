"""Finds objects that do not work in a forked worker, or in several threads, by their types' names.

No package is imported for this: an object of a package exists only where it was imported already.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shmloader.probing import probe


class Hazard(NamedTuple):
    """Why an object does not work in workers.

    Attributes:
        kind: Name of the object's type.
        in_fork: What goes wrong in forked workers; empty if nothing does.
        in_threads: What goes wrong in several threads; empty if nothing does.
    """

    kind: str
    in_fork: str
    in_threads: str = ""


_SQLITE = (
    "SQLite forbids using a connection in a forked process: it may corrupt the database",
    "a connection works only in the thread that opened it (check_same_thread)",
)
_HDF5 = (
    "the forked workers share one file position and the library's locks: reads fail or hang",
    "",
)
_LMDB = ("LMDB forbids using an environment that was opened before a fork", "")
_CLIENT = (
    "the forked workers share one connection, and read each other's answers",
    "",
)
_POSITION = (
    "the forked workers share one file position: they read each other's data",
    "the threads share one file position: they read each other's data",
)
_ARCHIVE = (
    "the forked workers share one file position: reads return wrong data or fail",
    "",
)
_CUDA = ("CUDA does not work in a forked process", "")
_THREAD = ("the thread does not run in a forked process, so what waits for it hangs", "")

# Names of types, with the reasons. A type matches by itself or by a base class.
_RULES: tuple[tuple[tuple[str, ...], tuple[str, str]], ...] = (
    (("sqlite3.Connection", "sqlite3.Cursor", "sqlite3.Blob"), _SQLITE),
    (("h5py._hl.base.HLObject", "tables.file.File", "netCDF4._netCDF4.Dataset"), _HDF5),
    # The extension module of lmdb gives its classes no module.
    (tuple(f"{module}.{name}" for module in ("builtins", "lmdb", "lmdb.cpython", "lmdb.cffi")
           for name in ("Environment", "Transaction", "Cursor", "_Database")), _LMDB),
    (("zipfile.ZipFile", "zipfile._path.ZipFile", "tarfile.TarFile"), _ARCHIVE),
    (("_io.FileIO", "_io.BufferedReader", "_io.BufferedWriter", "_io.BufferedRandom",
      "_io.TextIOWrapper", "tempfile._TemporaryFileWrapper"), _POSITION),
    (("socket.socket", "_socket.socket", "multiprocessing.connection._ConnectionBase",
      "psycopg2.extensions.connection", "psycopg.Connection", "pymysql.connections.Connection",
      "MySQLdb.connections.Connection", "pymongo.mongo_client.MongoClient",
      "pymongo.synchronous.mongo_client.MongoClient", "requests.sessions.Session",
      "http.client.HTTPConnection", "httpx.Client", "grpc._channel.Channel"), _CLIENT),
    (("threading.Thread", "concurrent.futures.thread.ThreadPoolExecutor",
      "concurrent.futures.process.ProcessPoolExecutor"), _THREAD),
)  # fmt: skip


def find_hazard(value: Any) -> Hazard | None:
    """Return what goes wrong with an object in workers, or None."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return Hazard("CUDA tensor", *_CUDA) if value.is_cuda else None
    name = _name_of(kind)
    if name in ("_thread.lock", "_thread.RLock"):
        return _held_lock(value, name)
    for base in kind.__mro__:
        full = _name_of(base)
        for names, reasons in _RULES:
            if full in names:
                is_open = _IS_OPEN.get(full.partition(".")[0], _is_unclosed)
                return Hazard(name, *reasons) if is_open(value) else None
    return None


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _held_lock(lock: Any, name: str) -> Hazard | None:
    if isinstance(lock, type(threading.RLock())):
        is_held = "unlocked" not in repr(lock)
    else:
        is_held = lock.locked()
    return Hazard(name, "it is locked now, and stays so in a forked process") if is_held else None


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
