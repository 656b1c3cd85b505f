"""What the process tests share: datasets of functions, gates, programs in new interpreters."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import Dataset, IterableDataset

from shmloader import ClosedLoaderError, LoaderTimeoutError
from tests.template import environment_of_programs, shared_template

ROOT = Path(__file__).parents[2]

# A death is told within 2 s; tests allow more, since they run on busy machines.
TOLD_S = 5.0


class Calls(Dataset):
    """A map-style dataset whose samples a function makes of their indices."""

    def __init__(self, function: Callable[[Any], Any], length: int) -> None:
        self.function = function
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


class Streams(IterableDataset):
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __iter__(self) -> Any:
        return self.function()


class Bad(LookupError):  # noqa: N818 - as users name theirs
    """The exception that datasets of tests raise."""


class Numbers:
    """A dataset that returns each index as it is, and raises for bad ones."""

    def __init__(self, length: int, *bad: int) -> None:
        self.length = length
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise Bad(f"no {index}")
        return index


class ListsAlone:
    """The same by lists of samples alone, without ``__getitem__``."""

    __init__, __len__ = Numbers.__init__, Numbers.__len__

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [Numbers.__getitem__(self, index) for index in indices]


class Gate:
    """A pipe that forked workers wait at: each `open` lets one of them through. Closes itself."""

    def __init__(self) -> None:
        self._ends = [*os.pipe()]
        self._read, self._write = self._ends

    def pass_through(self) -> None:
        os.read(self._read, 1)

    def open(self, times: int = 1) -> None:
        os.write(self._write, b"x" * times)

    def wait_until_open(self, timeout_s: float = 30) -> None:
        """Wait, in the test, until a worker opens the gate; take one opening."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        assert ready, "nothing came through the gate"
        os.read(self._read, 1)

    def close(self) -> None:
        """Close it now, where a fixture keeps it. May be called again."""
        while self._ends:
            os.close(self._ends.pop())

    __del__ = close


class Switch:
    """A flag that forked workers and the test see alike."""

    def __init__(self, *, is_on: bool) -> None:
        self._value = multiprocessing.RawValue("b", is_on)

    def __bool__(self) -> bool:
        return bool(self._value.value)

    def turn(self, *, on: bool) -> None:
        self._value.value = on


class Deaths:
    """Ends the worker that comes to one of these places, as often as the place says.

    One worker at a time may come to a place.
    """

    def __init__(
        self, places: Mapping[Any, int] | int = 0, end: Callable[[], Any] | None = None
    ) -> None:
        counts = {None: places} if isinstance(places, int) else places
        self._left = {at: multiprocessing.RawValue("i", count) for at, count in counts.items()}
        self._end = end or (lambda: os._exit(3))

    def come(self, place: Any = None) -> None:
        left = self._left.get(place)
        if left is not None and left.value:
            left.value -= 1
            self._end()

    @property
    def left(self) -> int:
        return sum(left.value for left in self._left.values())


class WatchedLock:
    """A lock that tells when a thread has to wait for it.

    Attributes:
        is_waited_for: Set once a thread has come while another one held the lock.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def only(samples: list[Any]) -> Any:
    """Return the one sample of a batch as it is. A collate function."""
    assert len(samples) == 1
    return samples[0]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [one for one in caplog.records if one.name == "shmloader"]
    return [one.getMessage() for one in records if one.levelno == logging.WARNING]


def wait_for_end(pid: int, timeout_s: float = 30) -> None:
    """Wait until a process has ended, reaped or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"process {pid} has not ended in {timeout_s} s"
    finally:
        os.close(pidfd)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def wait_until(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    """Check a condition again and again until it holds, if no event tells of it."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.005)


def however_late(batches: Iterator[Any], timeout_s: float = 20) -> Iterator[Any]:
    """Yield the rest of an epoch, however often a batch is late."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            batch = next(batches)
        except LoaderTimeoutError:
            assert time.monotonic() < deadline, f"the next batch has not come in {timeout_s} s"
        except StopIteration:
            return
        else:
            yield batch


@contextlib.contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run a function on another thread meanwhile."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(20)
        assert not thread.is_alive()


def stack_of(ident: int | None) -> list[str]:
    frame = sys._current_frames().get(ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


class Slots:
    """shmloader's memfds in this process and others, except those that existed before."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._before = {*(inode for inode, _ in self.maps()), *self.files()}

    def maps(self, pid: int | str = "self") -> dict[tuple[int, str], int]:
        """Return the mapped bytes of each slot in a process, by the inode and place of the slot."""
        found: dict[tuple[int, str], int] = {}
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:shmloader " in line:
                span, _flags, offset, _device, inode, _name = line.split(maxsplit=5)
                first, last = (int(part, 16) for part in span.split("-"))
                if int(inode) not in self._before:
                    slot = int(inode), offset
                    found[slot] = found.get(slot, 0) + last - first
        return found

    def files(self) -> dict[int, int]:
        """Return the allocated bytes of each of the files that this process has open, by inode."""
        found: dict[int, int] = {}
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
            try:
                target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - may be no path
                status = os.fstat(int(number))
            except OSError:
                continue
            if "memfd:shmloader " in target and status.st_ino not in self._before:
                found[status.st_ino] = status.st_blocks * 512
        return found


def mapping_at(address: int) -> str:
    """Return the line of ``/proc/self/maps`` of what is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            return line
    raise AssertionError("nothing is mapped there")


def outcomes(batches: Any, most: int = 200) -> list[Any]:
    """Return what comes out of an iterator until it ends or is closed, exceptions as themselves."""
    batches, found = iter(batches), []
    while len(found) < most:
        try:
            found.append(next(batches))
        except (StopIteration, ClosedLoaderError):
            return found
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            found.append(error)
    raise AssertionError(f"no end: {found}")


def last_line(error: BaseException) -> str:
    """Return an exception's class and the last line of its text."""
    return f"{type(error).__name__} {str(error).strip().splitlines()[-1]}"


@contextlib.contextmanager
def few_descriptors(left: int = 0) -> Iterator[None]:
    """At most so many files can be opened: the limit is that far above the lowest free number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths


@dataclass
class Done:
    code: int
    out: str
    err: str
    left: list[str]

    def assert_quiet(self, code: int = 0) -> None:
        """Check that it ended with this code, wrote nothing to stderr, and left no process."""
        assert self.left == [], self.left
        assert self.err == "", self.err
        assert self.code == code, (self.code, self.out)


def session_of(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


class Program:
    """A Python program in a session of its own, in an interpreter as if it were new."""

    def __init__(
        self, source: str, path: Path | None = None, *, stdin: bool = False, is_fresh: bool = False
    ) -> None:
        """Start the program.

        Args:
            source: Its text.
            path: File to write the text to. None: it is passed by ``-c``, or by standard input.
            stdin: Whether the text is passed by standard input.
            is_fresh: Whether the interpreter is really new, rather than forked from one that has
                imported torch (:mod:`tests.template`). For tests of how a program starts.
        """
        source = textwrap.dedent(source)
        if path is not None:
            path.write_text(source)
            command = [str(path)]
        else:
            command = ["-"] if stdin else ["-c", source]
        directory = ROOT if path is None else path.parent
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self._out, self._err = open(out), open(err)  # noqa: SIM115, PTH123 - _rest() closes
        try:
            if stdin or is_fresh:
                self._start_fresh(command, directory, out_end, err_end, source if stdin else "")
            else:
                with open(os.devnull) as null:  # noqa: PTH123 - by its descriptor
                    started = shared_template().start(
                        command,
                        environment=environment_of_programs(),
                        directory=directory,
                        files=(null.fileno(), out_end, err_end),
                    )
                self.pid, self._wait = started.pid, started.wait
        finally:
            os.close(out_end)
            os.close(err_end)

    def _start_fresh(
        self, command: list[str], directory: Path, out: int, err: int, text: str
    ) -> None:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            text=True,
            env=environment_of_programs(),
            cwd=directory,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()

        def wait(timeout_s: float) -> int | None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout_s)
            return None

        self.pid, self._wait = process.pid, wait

    def read_line(self, timeout_s: float = 40) -> str:
        """Return the next line that the program prints. The program must flush it."""
        ready, _, _ = select.select([self._out], [], [], timeout_s)
        if not ready:
            self.kill()
            raise AssertionError(f"no line in {timeout_s} s: {self._rest()}")
        return self._out.readline().strip()

    def kill(self) -> None:
        for process in session_of(self.pid):
            process.kill()

    def finish(self, timeout_s: float = 40, left_s: float = TOLD_S) -> Done:
        """Wait until the program, and all that it started, has ended; kill what is left."""
        code = self._wait(timeout_s)
        if code is None:
            self.kill()
            self._wait(10)
            out, err = self._rest()
            raise AssertionError(f"still running after {timeout_s} s\n{out}\n{err}") from None
        deadline = time.monotonic() + left_s
        while (left := session_of(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        names = [f"{process.pid}: {process.cmdline()} ({process.status()})" for process in left]
        self.kill()
        return Done(code, *self._rest(), names)

    def _rest(self) -> tuple[str, str]:
        """Return its output that is not read yet, when all its processes have ended."""
        with self._out, self._err:
            return self._out.read(), self._err.read()


def run_program(
    source: str,
    path: Path | None = None,
    *,
    stdin: bool = False,
    is_fresh: bool = False,
    timeout_s: float = 40,
) -> Done:
    return Program(source, path, stdin=stdin, is_fresh=is_fresh).finish(timeout_s)
