"""Locks on files, which the kernel drops when their process ends.

A lock belongs to a descriptor: threads of one process exclude each other as processes do. A forked
child closes its copies of the descriptors, so that it does not keep its parent's locks.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from shmloader.process_state import PROCESS


class Lease:
    """A shard that stays on the disk until this is closed. Use it in a with block.

    Attributes:
        path: The path of the shard on this machine. It ends as the URL does.
    """

    def __init__(self, path: str, descriptor: int = -1) -> None:
        # The descriptor holds a lock of the file, which is shared or exclusive.
        self.path, self._descriptor = path, descriptor
        if descriptor >= 0:
            PROCESS.file_locks.add(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the shard be removed. It may be called more than once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close

    def remove(self) -> None:
        """Remove the file. A process that waits for its lock finds that it is gone."""
        Path(self.path).unlink(missing_ok=True)

    def reserve(self, size: int) -> None:
        """Give the file a size, without data."""
        os.truncate(self._descriptor, size)


def shared(path: Path) -> Lease | None:
    """Return a shared lock of a file, which was used now; None if there is no such file."""
    lock = _locked(path, os.O_RDONLY, fcntl.LOCK_SH)
    if lock is not None:
        with contextlib.suppress(PermissionError):  # another user's
            modified_ns = os.fstat(lock._descriptor).st_mtime_ns
            os.utime(lock._descriptor, ns=(time.time_ns(), modified_ns))
    return lock


def exclusive(path: Path) -> Lease:
    """Return the exclusive lock of a file, which is made. Waits for other processes' locks."""
    lock = _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
    assert lock is not None
    return lock


def exclusive_if_free(path: Path) -> Lease | None:
    """Return the exclusive lock of a file; None if another lock is held, or there is no file."""
    return _locked(path, os.O_RDONLY, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _locked(path: Path, flags: int, kind: int) -> Lease | None:
    while True:
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        lock = Lease(str(path), descriptor)
        try:
            fcntl.flock(descriptor, kind)
            # The file may have been removed, or another one made, before it was locked.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return lock
        except BlockingIOError:
            lock.close()
            return None
        except BaseException:
            lock.close()
            raise
        lock.close()
