"""Finds and reads the files of shards, which may be compressed by gzip or zstd.

What decides is the end of a name: ``.gz`` and ``.tgz``, or ``.zst`` and ``.tzst``. A compressed
file can only be read forward, so a place that was passed costs reading the file again.
"""

import contextlib
import gzip
import io
import math
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

_GZIP = (".gz", ".tgz")
_ZSTD = (".zst", ".tzst")

# Classes of exceptions, by their modules, which need not be imported.
_ERRORS = {"zstandard": "ZstdError", "compression.zstd": "ZstdError", "pyarrow": "ArrowException"}

# So many bytes are on their way from the disk.
_AHEAD_BYTES = 8 << 20

# So many bytes of a file compressed by zstd are decompressed at a time: a few times as many come
# out.
_COMPRESSED_BYTES, _BUFFER_BYTES = 32 << 10, 64 << 10


def local_path(url: str) -> str | None:
    """Return the path that a URL stands for on this machine; None for a remote one."""
    if url.startswith(("file://", "local://")):
        # Programs write "#" and "?" into such a URL as they are.
        return unquote(url.partition("://")[2].removeprefix("localhost"))
    return None if "://" in url or "::" in url else url


def is_compressed(path: str) -> bool:
    """Return whether a shard is compressed, as its name says."""
    return path.lower().endswith(_GZIP + _ZSTD)


def uncompressed_name(path: str) -> str:
    """Return the name without compression, in lower case: ``a.tar`` for ``A.tgz``."""
    name = path.lower()
    for ending in (".tgz", ".tzst"):
        if name.endswith(ending):
            return name.removesuffix(ending) + ".tar"
    return name.removesuffix(".gz").removesuffix(".zst")


def open_file(path: str, buffer_bytes: int = _BUFFER_BYTES) -> IO[bytes]:
    """Open a shard for reading from its beginning, and decompress what is read.

    The file can seek. In a compressed one that is reading up to a place, so only go forward.

    Args:
        path: The shard.
        buffer_bytes: So many bytes are read from the disk at once, if less is asked for.

    Raises:
        OSError: If the file cannot be opened.
        EOFError: If it should be compressed, and is empty.
        ImportError: If zstd is needed, and its package is not installed.
    """
    if not is_compressed(path):
        return Path(path).open("rb", buffer_bytes)
    if not Path(path).stat().st_size:
        raise EOFError("it is empty, which no compressed file is")
    is_gzip = path.lower().endswith(_GZIP)
    return io.BufferedReader(gzip.open(path, "rb") if is_gzip else _open_zstd(path), _BUFFER_BYTES)


def _open_zstd(path: str) -> Any:
    with contextlib.suppress(ImportError):
        from compression import zstd  # noqa: PLC0415 - of Python 3.14

        return zstd.open(path, "rb")
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(f"{path} is compressed by zstd: pip install zstandard") from error
    file = Path(path).open("rb")  # noqa: SIM115 - the reader closes it
    return _ZstdFile(file, zstandard.ZstdDecompressor)


class _ZstdFile(io.RawIOBase):
    """Decompresses a file by zstandard, whose own reader takes a file that was cut for a whole one.

    Args:
        file: The compressed file, which is closed with this.
        make: Makes a decompressor.
    """

    def __init__(self, file: IO[bytes], make: Callable[[], Any]) -> None:
        self._file, self._make = file, make
        # The present frame; None between two. What was read of the next one, and what is left of
        # what was decompressed.
        self._frame: Any = None
        self._following, self._left, self._position = b"", memoryview(b""), 0

    def readable(self) -> bool:
        """Return True."""
        return True

    seekable = readable

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read up to an offset, which is not before the present one."""
        assert whence == io.SEEK_SET
        assert offset >= self._position
        while count := min(offset - self._position, _BUFFER_BYTES):
            if not self.readinto(bytearray(count)):
                break
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, at least in part; return 0 at the end.

        Raises:
            EOFError: If the file ends within a frame.
        """
        while not self._left:
            data = self._following or self._file.read(_COMPRESSED_BYTES)
            if not data:
                if self._frame is None:
                    return 0
                raise EOFError("it ends in the middle of what zstd has compressed")
            self._frame = self._frame or self._make().decompressobj()
            self._left = memoryview(self._frame.decompress(data))
            self._following = b""
            if self._frame.eof:
                self._following, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        self._position += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


class ReadAhead:
    """Asks the system to read a file from the disk before the program gets there.

    Args:
        file: The file of a shard. Nothing is asked for a compressed one.
        path: Its path.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file, self._end = file, math.inf if is_compressed(path) else 0

    def reach(self, offset: int) -> None:
        """Say that the program reads on from an offset."""
        if offset + _AHEAD_BYTES // 2 >= self._end:
            begin = max(offset, int(self._end))
            os.posix_fadvise(self._file.fileno(), begin, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            self._end = begin + _AHEAD_BYTES


def read_errors() -> tuple[type[Exception], ...]:
    """Return what reading a missing or damaged file raises."""
    others = [
        getattr(sys.modules[name], error) for name, error in _ERRORS.items() if name in sys.modules
    ]
    return (OSError, EOFError, zlib.error, *others)
