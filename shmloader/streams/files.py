"""Finds and reads the files of shards, which may be compressed by gzip or zstd.

What decides is the end of a name: ``.gz`` and ``.tgz``, or ``.zst`` and ``.tzst``. A compressed
file can only be read forward, so a place that was passed costs reading the file again.
"""

import gzip
import importlib
import io
import os
import sys
import zlib
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

_GZIP = (".gz", ".tgz")
_ZSTD = (".zst", ".tzst")

# Classes of exceptions, by their modules, which need not be imported.
ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_ERRORS = {ZSTD_MODULE: "ZstdError", "pyarrow": "ArrowException"}

# So many bytes are read at once, if less is asked for.
_BUFFER_BYTES = 64 << 10


def local_path(url: str) -> str | None:
    """Return the path that a URL stands for on this machine; None for a remote one."""
    if url.startswith(("file://", "local://")):
        # Programs write "#" and "?" into such a URL as they are.
        return unquote(url.partition("://")[2].removeprefix("localhost"))
    return None if "://" in url or "::" in url else url


def is_compressed(path: str) -> bool:
    """Return whether a shard is compressed, as its name says."""
    return path.lower().endswith(_GZIP + _ZSTD)


def open_file(path: str) -> IO[bytes]:
    """Open a shard for reading from its beginning, and decompress what is read.

    The file can seek. In a compressed one that is reading up to a place, so only go forward.

    Raises:
        OSError: If the file cannot be opened.
        EOFError: If it should be compressed, and is empty.
        ImportError: If zstd is needed, and its package is not installed.
    """
    if not is_compressed(path):
        file = Path(path).open("rb", _BUFFER_BYTES)  # noqa: SIM115 - the caller closes it
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return file
    if not Path(path).stat().st_size:
        raise EOFError("it is empty, which no compressed file is")
    is_gzip = path.lower().endswith(_GZIP)
    return io.BufferedReader(gzip.open(path, "rb") if is_gzip else _open_zstd(path), _BUFFER_BYTES)


def _open_zstd(path: str) -> Any:
    try:
        return importlib.import_module(ZSTD_MODULE).open(path, "rb")
    except ImportError as error:
        raise ImportError(f"{path} is compressed by zstd: pip install backports.zstd") from error


def read_errors() -> tuple[type[Exception], ...]:
    """Return what reading a missing or damaged file raises."""
    others = [
        getattr(sys.modules[name], error) for name, error in _ERRORS.items() if name in sys.modules
    ]
    return (OSError, EOFError, zlib.error, *others)
