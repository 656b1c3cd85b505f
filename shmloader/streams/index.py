"""The index of a shard: a small file that says where the records lie.

It is made when it is first needed, or by ``shmloader index``, and lies beside the shard, as
``<shard>.shmidx``. Where that folder cannot be written to, it lies in the user's cache folder. An
index belongs to the size and the modification time of its shard: for a changed shard it is made
anew. It is written under another name and then renamed, so that nobody reads half an index.

The file begins with a checksum of all else, as eight hexadecimal digits. The version and what the
index belongs to follow as a line of JSON, with the names, dtypes and lengths of the arrays; and
then the arrays, in the byte orders that the dtypes name.
"""

import contextlib
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

#: What the name of an index ends with.
SUFFIX = ".shmidx"

# The version of the format, and how many digits its checksum has.
_VERSION, _DIGITS = 3, 8
_attempts = itertools.count()

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


def arrays_of(path: str, kind: str, make: Callable[[str], Arrays]) -> Arrays:
    """Return the arrays of a shard's index, which is made and kept if there is none.

    Args:
        path: The shard.
        kind: Name of the format; an index of another format is not taken.
        make: Makes the arrays from the path.

    Raises:
        OSError: If there is no such shard.
        Exception: What ``make`` raises.
    """
    identity = _identity(path, kind)
    for file in _files(path):
        with contextlib.suppress(OSError, ValueError):
            return _decoded(file.read_bytes(), identity)
    arrays = make(path)
    data = _encoded(arrays, identity)
    for file in _files(path):
        with contextlib.suppress(OSError):
            _write(file, data)
            break
    return arrays


def _identity(path: str, kind: str) -> dict[str, Any]:
    status = os.stat(path)  # noqa: PTH116 - a path is a string here
    about = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {"version": _VERSION, "kind": kind, **about}


def _files(path: str) -> tuple[Path, Path]:
    """Return where an index may lie, the better one first."""
    absolute = Path(path).absolute()
    name = hashlib.blake2b(os.fsencode(absolute), digest_size=16).hexdigest()
    return Path(path + SUFFIX), cache_folder() / "indexes" / (name + SUFFIX)


def cache_folder() -> Path:
    """Return the folder for what can be made again: ``shmloader`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "shmloader"


def _encoded(arrays: Arrays, identity: dict[str, Any]) -> bytes:
    shapes = {name: [array.dtype.str, len(array)] for name, array in arrays.items()}
    head = json.dumps(identity | {"arrays": shapes}).encode()
    data = b"".join([head, b"\n", *map(np.ndarray.tobytes, arrays.values())])
    return b"%08x" % zlib.crc32(data) + data


def _decoded(data: bytes, identity: dict[str, Any]) -> Arrays:
    """Return the arrays, which cannot be written to.

    Raises:
        ValueError: If this is no index, or that of another shard.
    """
    if int(data[:_DIGITS], 16) != zlib.crc32(memoryview(data)[_DIGITS:]):
        raise ValueError("no index, or a damaged one")
    position = data.index(b"\n") + 1
    head = json.loads(data[_DIGITS:position])
    shapes = head.pop("arrays")
    if head != identity:
        raise ValueError("the index of another shard")
    arrays: Arrays = {}
    for name, (dtype, count) in shapes.items():
        arrays[name] = np.frombuffer(data, dtype, count, position)
        position += arrays[name].nbytes
    return arrays


def _write(file: Path, data: bytes) -> None:
    """Write an index as a whole. No other process or thread uses the same temporary name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{next(_attempts)}")
    try:
        temporary.write_bytes(data)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
