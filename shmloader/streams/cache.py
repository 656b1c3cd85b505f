"""Remote shards on the disk of this machine, shared by its processes, up to a number of bytes.

A folder has three kinds of files for a shard, whose names have a digest of its URL:

* ``<digest>-<name>``, the whole shard. A process that reads it holds a *lease*: a shared lock on
  its own descriptor of the file. The access time of the file is that of the last lease.
* ``.lock-<digest>``, exclusively locked by the process that downloads the shard. Others wait for
  the lock, and then find the shard. The file has no data, but the size that the shard will have.
* ``.part-<digest>``, what has come so far.

The kernel drops the locks of a process that ends, however it ends: no count can be left wrong, and
a ``.lock`` file that can be locked says that the part beside it is waste. To make room, a process
removes the shards whose last lease is the oldest, if it gets their exclusive locks at once. One
process at a time makes room.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shmloader.errors import ShardError
from shmloader.grammar import size
from shmloader.sampling.arguments import whole_number
from shmloader.streams.download import NO_SPACE, download
from shmloader.streams.files import local_path
from shmloader.streams.index import SUFFIX, cache_folder
from shmloader.streams.locks import Lease, exclusive, exclusive_if_free, shared
from shmloader.streams.prefetching import Prefetcher

_LOCK, _PART, _ROOM = ".lock-", ".part-", ".room"
_LONGEST_NAME = 100


class ShardCache:
    """Brings shards to this machine when they are opened, and keeps the last ones.

    All processes of a machine that name the same folder share the shards, and download each once.
    An object can be pickled, and used by any process and thread, also after a fork.

    Args:
        directory: The folder, on a disk of this machine; None for ``shmloader/shards`` in the
            user's cache folder.
        limit: The most bytes that shards take together. Shards that are open or being downloaded
            are not removed, so they may take more. A single shard may be larger than the limit.
        storage_options: Arguments for fsspec's file systems, such as credentials.
        threads: The most shards that :meth:`prefetch` downloads at a time in this process.

    Raises:
        ValueError: If the limit is negative, or there is no thread.
        TypeError: If the limit is no number.
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str] | None" = None,
        limit: int = 10 * 2**30,
        storage_options: Mapping[str, Any] | None = None,
        threads: int = 2,
    ) -> None:
        if not isinstance(limit, float | int):
            raise TypeError(f"limit should be a number of bytes, but is {limit!r}")
        if limit < 0:
            raise ValueError(f"limit should be a number of bytes, but is {limit}")
        self.directory = Path(directory or cache_folder() / "shards").absolute()
        self.limit, self.storage_options = limit, dict(storage_options or {})
        self._prefetcher = Prefetcher(whole_number(threads, "threads", minimum=1))

    def __repr__(self) -> str:
        return f"ShardCache({str(self.directory)!r}, limit={self.limit})"

    def open(self, url: str) -> Lease:
        """Return a lease of a shard, which is downloaded if it is not here.

        Waits for another process that downloads the same shard. A path, or a URL of the scheme
        ``file``, is taken as it is: nothing is copied or looked at.

        Raises:
            ShardError: If the shard is not there, if the network fails several times in a row, or
                if the disk is full.
            ImportError: If fsspec is not installed, or what it needs for such a URL.
        """
        if (local := local_path(url)) is not None:
            return Lease(local)
        place = self._place(url)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if (lease := shared(place)) is not None:
                return lease
            with exclusive(self._beside(place, _LOCK)) as lock:
                try:
                    # Another process may have downloaded it while this one waited.
                    return shared(place) or self._download(url, place, lock)
                finally:
                    lock.remove()
        except OSError as error:
            raise self._unusable(url, error) from error

    def prefetch(self, url: str) -> None:
        """Begin to download a shard on a thread of this process, and return.

        Does nothing if many are waiting already. An error is not raised here: :meth:`open` tries
        again.
        """
        if local_path(url) is None and not self._place(url).exists():
            self._prefetcher.add(url, lambda url: self.open(url).close())

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

    def _place(self, url: str) -> Path:
        """Return where a shard lies. The name ends as the URL's, which names its format."""
        digest = hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
        name = re.sub(r"[^\w.-]", "_", urlsplit(url).path.rpartition("/")[2])
        return self.directory / f"{digest}-{name[-_LONGEST_NAME:]}"

    def _beside(self, place: Path, kind: str) -> Path:
        return self.directory / (kind + place.name.partition("-")[0])

    def _download(self, url: str, place: Path, lock: Lease) -> Lease:
        part = self._beside(place, _PART)

        def reserve(size: int | None) -> None:
            try:
                self._make_room(size or 0, lock)
            except OSError as error:
                raise self._unusable(url, error) from error

        try:
            download(url, part, self.storage_options, reserve)
            lease = shared(part)  # before another process can find it
            assert lease is not None
            part.replace(place)
            lease.path = str(place)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._make_room(0, lock)  # the size may not have been known
        return lease

    # Room -----------------------------------------------------------------------------------

    def _make_room(self, size: int, lock: Lease) -> None:
        """Remove shards until so many bytes more are allowed, and reserve these with the lock."""
        with exclusive(self.directory / _ROOM):
            lock.reserve(size)
            files = list(self._files())
            total = sum(status.st_size for _, status in files)
            for path, status in sorted(files, key=lambda file: file[1].st_atime_ns):
                if total <= self.limit:
                    break
                if _is_shard(path.name) and (lease := exclusive_if_free(path)) is not None:
                    with lease:
                        lease.remove()
                        total -= status.st_size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield what takes or reserves room. Removes what killed processes have left."""
        for path in list(self.directory.iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith(_LOCK):
                    if (lock := exclusive_if_free(path)) is None:
                        yield path, path.stat()
                        continue
                    with lock:
                        path.with_name(path.name.replace(_LOCK, _PART)).unlink(missing_ok=True)
                        lock.remove()
                elif _is_shard(path.name):
                    yield path, path.stat()
                elif path.name.endswith(SUFFIX) and not path.with_suffix("").exists():
                    path.unlink()


def _is_shard(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(SUFFIX)
