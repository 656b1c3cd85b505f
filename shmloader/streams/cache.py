"""Remote shards on the disk of this machine, shared by its processes, up to a number of bytes.

A folder has the shards, whose names begin with a digest of their URLs, and 64 locks. A shard
belongs to one of these, ``.lock-<number>``. The process that downloads the shard holds the lock,
and writes to ``.part-<number>``, which it renames in the end. Others wait for the lock, and then
find the shard.

The kernel drops the locks of a process that ends, however it ends. What a killed process has
downloaded is overwritten by the next one that takes its lock.

The access time of a shard is that of its last use. To make room, the shards whose last use is the
oldest are removed, but none that was used just now: its reader may not have opened it. A reader
that has a shard open can read it to the end.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shmloader.errors import ShardError
from shmloader.grammar import size
from shmloader.process_state import PROCESS
from shmloader.streams.download import NO_SPACE, download
from shmloader.streams.files import local_path
from shmloader.streams.index import SUFFIX, cache_folder
from shmloader.threads import BackgroundThread

_LOCK, _LOCK_COUNT = ".lock-", 64
_LONGEST_NAME = 100

# A shard is not removed for so long after its last use. Its reader opens it within milliseconds, or
# after it has made the index.
_KEPT_S = 60.0


class ShardCache:
    """Brings shards to this machine when they are read, and keeps the last ones.

    All processes of a machine that name the same folder share the shards, and download each once.
    An object can be pickled, and used by any process and thread, also after a fork.

    Args:
        directory: The folder, on a disk of this machine; None for ``shmloader/shards`` in the
            user's cache folder.
        limit: The most bytes that shards take together. Shards that are being downloaded, and those
            of the last minute, come on top. A single shard may be larger than the limit.
        storage_options: Arguments for fsspec's file systems, such as credentials.

    Raises:
        ValueError: If the limit is negative.
        TypeError: If the limit is no number.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str] | None" = None,
        limit: int = 10 * 2**30,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(limit, float | int):
            raise TypeError(f"limit should be a number of bytes, but is {limit!r}")
        if limit < 0:
            raise ValueError(f"limit should be a number of bytes, but is {limit}")
        self.directory = Path(directory or cache_folder() / "shards").absolute()
        self.limit, self.storage_options = limit, dict(storage_options or {})

    def __repr__(self) -> str:
        return f"ShardCache({str(self.directory)!r}, limit={self.limit})"

    def path(self, url: str) -> str:
        """Return the path of a shard, which is downloaded if it is not here.

        Open it within a minute: then it can be read for as long as that takes. Waits for another
        process that downloads the same shard. A path, or a URL of the scheme ``file``, is taken as
        it is: nothing is copied or looked at.

        Raises:
            ShardError: If the network fails several times in a row, or if the disk is full.
            ImportError: If fsspec is not installed, or what it needs for such a URL.
        """
        if (local := local_path(url)) is not None:
            return local
        path = self._path_of(url)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not _use(path):
                number = int(path.name[:8], 16) % _LOCK_COUNT
                with _locked(self.directory / f"{_LOCK}{number:02}"):
                    if not _use(path):  # another process may have downloaded it meanwhile
                        self._download(url, self.directory / f".part-{number:02}", path)
        except OSError as error:
            raise self._unusable(url, error) from error
        return str(path)

    def prefetch(self, url: str) -> None:
        """Begin to download a shard on a thread of this process, and return.

        A process downloads two shards ahead at a time. An error is not raised here: :meth:`path`
        tries again.
        """
        if local_path(url) is None and not self._path_of(url).exists():
            _Prefetch(self, url).start()

    def _unusable(self, url: str, error: OSError) -> ShardError:
        problem = (
            f"cannot be kept in {self.directory}: {error}. Choose a directory= on a disk of this "
            "machine, which you may write to"
        )
        if error.errno in NO_SPACE:
            problem = (
                f"does not fit on the disk of {self.directory}, where shards may take "
                f"{size(self.limit)}. Lower the cache's limit=, or choose another directory="
            )
        return ShardError(f"shard {url} {problem}", url)

    def _path_of(self, url: str) -> Path:
        """Return where a shard lies. The name ends as the URL's, which names its format."""
        digest = hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
        name = re.sub(r"[^\w.-]", "_", urlsplit(url).path.rpartition("/")[2])
        return self.directory / f"{digest}-{name[-_LONGEST_NAME:]}"

    def _download(self, url: str, part: Path, path: Path) -> None:
        try:
            download(url, part, self.storage_options)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._make_room()

    def _make_room(self) -> None:
        """Remove the shards that were not used for the longest time, and their indexes."""
        files = [
            (*_use_and_size(path), path)
            for path in self.directory.iterdir()
            if not path.name.startswith(_LOCK) and path.suffix != SUFFIX
        ]
        total = sum(nbytes for _, nbytes, _ in files)
        for used_s, nbytes, path in sorted(files):
            if total <= self.limit or used_s > time.time() - _KEPT_S:
                break
            # Looked at anew: another process may have asked for it meanwhile, or made room, too.
            now_s = _use_and_size(path)[0]
            if now_s == used_s:
                path.unlink(missing_ok=True)
                Path(f"{path}{SUFFIX}").unlink(missing_ok=True)
            if now_s in (used_s, 0):
                total -= nbytes


def _use_and_size(path: Path) -> tuple[float, int]:
    """Return the time of a file's last use and its bytes; zeros if it is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return max(status.st_atime, status.st_mtime), status.st_size


def _use(path: Path) -> bool:
    """Set the access time of a shard to now; return whether the shard is there."""
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's
        pass
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made. Waits for other threads and processes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # To close it is not enough: a child that was forked meanwhile has a copy.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class _Prefetch(BackgroundThread):
    """Downloads one shard."""

    def __init__(self, cache: ShardCache, url: str) -> None:
        super().__init__("shmloader-fetch")
        self._cache, self._url = cache, url

    def work(self) -> None:
        """Download it. What that raises is dropped."""
        # A fork does not wait for the network.
        with self.resting(), contextlib.suppress(Exception), PROCESS.threads.prefetching:
            self._cache.path(self._url)
