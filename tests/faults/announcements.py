"""Announces the processes of ranks in a pipe, and forks those that would be spawned.

A fork is there at once, while a new interpreter would import torch for seconds. It has the same
parent, the descriptors that are passed and no others, and runs the same program. What differs is
that torch and this package are imported already.
"""

import contextlib
import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing import util

# The variable that gives a new interpreter the descriptor of the pipe.
_VARIABLE = "SHMLOADER_TEST_ANNOUNCE"


class Announcements:
    """The processes that were announced, by kind. Made in the process that forks all others."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._pids: defaultdict[str, list[int]] = defaultdict(list)

    def tell(self, what: str, pid: int | None = None) -> None:
        """Announce a process, this one by default. Called in any process."""
        os.write(self._write, f"{what} {pid or os.getpid()}\n".encode())

    def pids(self, what: str) -> list[int]:
        """Return the announced processes of a kind that run."""
        with contextlib.suppress(BlockingIOError):
            while lines := os.read(self._read, select.PIPE_BUF):
                # Each line is written at once, and one read takes all that the pipe ever holds.
                for line in lines.decode().splitlines():
                    kind, pid = line.rsplit(" ", 1)
                    self._pids[kind].append(int(pid))
        return [pid for pid in self._pids[what] if is_running(pid)]

    def wait_for(self, what: str, timeout_s: float) -> list[int]:
        """Wait until a process of a kind has been announced; return those of them that run."""
        until_s = time.monotonic() + timeout_s
        while not (found := self.pids(what)) and not self._pids[what]:
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"no {what} was announced"
            select.select([self._read], [], [], left_s)
        return found

    def watch_spawned(self, *, forks: bool) -> None:
        """Announce what this process spawns, and what the spawned one forks.

        Args:
            forks: Whether a process that would be spawned is forked.
        """
        spawn = util.spawnv_passfds

        def announce(path: bytes, arguments: Sequence[str], fds: Sequence[int]) -> int:
            programs = [os.fsdecode(each) for each in arguments]
            (program,) = (each for each in programs if each.startswith("from multiprocessing"))
            if "spawn_main" not in program:  # the resource tracker
                return int(spawn(path, arguments, fds))
            if forks:
                pid = self._fork(program, fds)
            else:
                os.environ[_VARIABLE] = str(self._write)
                pid = int(spawn(path, arguments, [*fds, self._write]))
            self.tell("spawned", pid)
            return pid

        util.spawnv_passfds = announce

    def _fork(self, program: str, fds: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        code: object = 1
        try:
            kept = sorted({0, 1, 2, self._write, *map(int, fds)})
            for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(low + 1, high)
            _tell_forks(self._write)
            sys.argv[:] = ["-c", "--multiprocessing-fork"]
            exec(program, {})
        except SystemExit as error:
            code = error.code
        finally:
            os._exit(code if isinstance(code, int) else bool(code))


def tell_forks_of_spawned() -> None:
    """Announce what this process forks, if it is a new interpreter. Called by its main module."""
    if _VARIABLE in os.environ:
        _tell_forks(int(os.environ[_VARIABLE]))


def _tell_forks(fd: int) -> None:
    os.register_at_fork(after_in_child=lambda: os.write(fd, f"forked {os.getpid()}\n".encode()))


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - as it is much faster
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
