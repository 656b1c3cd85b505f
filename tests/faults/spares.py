"""Spawns multiprocessing's processes without the seconds in which they would import torch.

A spare is forked while its parent has done nothing yet. When the parent spawns a process, a spare
becomes it: it has the same parent, the descriptors that were passed and no others, and runs the
same program. What differs is that torch and this package are imported already.

The processes that are spawned, and those that they fork, are announced in a pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing import util

# The variable that gives a new interpreter the descriptor of the pipe.
_VARIABLE = "SHMLOADER_TEST_ANNOUNCE"
# Passed descriptors keep their numbers, so ours are moved above them.
_LOWEST_FD, _LOWEST_PASSED_FD = 700, 800
_TEXT_BYTES = 4096


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
        self._take()
        return [pid for pid in self._pids[what] if is_running(pid)]

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while lines := os.read(self._read, select.PIPE_BUF):
                # Each line is written at once, and one read takes all that the pipe ever holds.
                for line in lines.decode().splitlines():
                    kind, pid = line.rsplit(" ", 1)
                    self._pids[kind].append(int(pid))

    def wait_for(self, what: str, timeout_s: float) -> list[int]:
        """Wait until a process of a kind has been announced; return those of them that run."""
        until_s = time.monotonic() + timeout_s
        while not (found := self.pids(what)) and not self._pids[what]:
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"no {what} was announced"
            select.select([self._read], [], [], left_s)
        return found

    def spawn_from_spares(self, count: int) -> None:
        """Have this process spawn its first ``count`` processes from forks that it makes now."""
        spares: list[_Spare] = []
        for _ in range(count):
            spares.append(_Spare(self, spares))
        spawn = util.spawnv_passfds

        def spawn_from_spare(path: bytes, arguments: Sequence[str], fds: Sequence[int]) -> int:
            programs = [os.fsdecode(each) for each in arguments]
            (program,) = (each for each in programs if each.startswith("from multiprocessing"))
            if "spawn_main" not in program:  # the resource tracker
                return int(spawn(path, arguments, fds))
            if spares:
                pid = spares.pop(0).become(program, fds)
            else:
                os.environ[_VARIABLE] = str(self._write)
                pid = int(spawn(path, arguments, [*fds, self._write]))
            self.tell("spawned", pid)
            return pid

        util.spawnv_passfds = spawn_from_spare

    def tell_forks(self) -> None:
        """Announce each process that this process forks from now on."""
        _tell_forks(self._write)

    def keep_only(self, *others: int) -> None:
        """Close all descriptors of this process but the pipe, the standard ones, and these."""
        kept = sorted({0, 1, 2, self._write, *others})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)


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


class _Spare:
    """A forked child that waits until it becomes another process, or until its parent ends."""

    def __init__(self, announcements: Announcements, others: list[_Spare]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid:
                return
            code = 1
            try:
                self._socket.close()
                for other in others:
                    other._socket.close()
                code = _wait_and_become(theirs, announcements)
            finally:
                os._exit(code)

    def become(self, program: str, fds: Sequence[int]) -> int:
        """Run a program with these descriptors. Returns the process id."""
        passed = sorted({int(fd) for fd in fds})
        text = "\n".join([program, *map(str, passed)])
        with self._socket:
            socket.send_fds(self._socket, [text.encode()], passed)
        return self._pid


def _wait_and_become(channel: socket.socket, announcements: Announcements) -> int:
    data, received, _, _ = socket.recv_fds(channel, _TEXT_BYTES, 250)
    if not data:
        return 0
    program, *numbers = data.decode().splitlines()
    assert len(received) == len(numbers)
    above = [_move_up(fd, _LOWEST_PASSED_FD) for fd in received]
    announcements._write = _move_up(announcements._write, _LOWEST_FD)
    announcements.keep_only(*above)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, int(number))
        os.close(fd)
    announcements.tell_forks()
    sys.argv[:] = ["-c", "--multiprocessing-fork"]
    try:
        exec(program, {})
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else bool(error.code)
    return 0


def _move_up(fd: int, lowest: int) -> int:
    """Give a descriptor a number from ``lowest`` on."""
    found = fcntl.fcntl(fd, fcntl.F_DUPFD, lowest)
    os.close(fd)
    return found
