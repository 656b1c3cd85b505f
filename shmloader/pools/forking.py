"""Forks processes for multiprocessing, here or in the nursery; guards their start and end.

**Ctrl-C** is for the main process. It is blocked in a process that starts, until that ignores it.

**The end of the main process** ends the workers, however it ends and whatever they are doing. Only
the main process holds the writing end of a pipe, and it never writes. When it ends, the kernel
closes that end and sends each worker the signal that the worker has registered at its reading end.
The signal is SIGKILL, which also ends a stopped worker and a worker inside a call that holds the
interpreter lock. ``PR_SET_PDEATHSIG`` would not do: its signal comes when the *thread* that started
the worker ends, or, for a worker that the nursery has forked, when the nursery ends.
"""

import atexit
import contextlib
import fcntl
import itertools
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import popen_fork, reduction, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from shmloader.process_state import PROCESS


class Descriptors(list[Any]):
    """Descriptors that this object owns. It closes them when it is garbage, if not before.

    A signal handler may raise between the call that opens a descriptor and the one that stores its
    number. So a single call opens and stores it: ``Descriptors(map(os.pidfd_open, [pid]))``. The
    items are numbers, or messages of ``recvmsg`` with numbers in them.
    """

    def numbers(self) -> list[int]:
        """Return the numbers of the descriptors that are open."""
        found: list[int] = []
        for item in self:
            if isinstance(item, int):
                found.append(item)
            else:
                for _, _, data in item[1]:
                    found.extend(memoryview(data).cast("i"))
        return found

    # When the interpreter exits, this may be called after the module's names are gone.
    def close_all(self, close: Callable[[int], None] = os.close) -> None:
        """Close them. May be called again."""
        numbers = self.numbers()
        # Forgotten first: after an interruption, a second close might close another file.
        self.clear()
        any(map(close, numbers))

    def __del__(self) -> None:
        self.close_all()


class Waker:
    """A descriptor, ``fd``, that gets a thread out of its ``poll``.

    It is closed when the last reference to this object is gone, so never while it is in use.
    """

    def __init__(self) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self._owned = Descriptors(itertools.starmap(os.eventfd, [(0, flags)]))
        (self.fd,) = self._owned

    def wake(self) -> None:
        """Wake the thread. Called from any thread."""
        with contextlib.suppress(BlockingIOError):  # the counter is full, so it can be read
            os.eventfd_write(self.fd, 1)

    def reset(self) -> None:
        """Reset the descriptor, which is readable. Called on the polling thread."""
        os.eventfd_read(self.fd)


def is_readable(fd: int, wait_s: float | None = 0.0, events: int = select.POLLIN) -> bool:
    """Wait until a descriptor can be read, or a process has ended. A limit of None is none.

    With ``events=0``, until the other end has hung up, which is always reported.
    """
    poll = select.poll()  # select.select() takes no descriptor above 1023
    poll.register(fd, events)
    return bool(poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000))


def name_of(worker_id: int | str) -> str:
    """Return the process name of a worker, or of another process that the pool starts."""
    return f"shmloader worker {worker_id}"


@contextlib.contextmanager
def sigint_blocked(*, is_fresh: bool) -> Iterator[None]:
    """Block SIGINT on this thread, and in processes that are started in this block.

    ``is_fresh``: whether multiprocessing starts an interpreter, and so a resource tracker.
    """
    if is_fresh:
        # Otherwise multiprocessing starts it within the block, and unblocks SIGINT afterwards.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sigint() -> None:
    """Ignore Ctrl-C in this process, which was started with SIGINT blocked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def fork(run: Callable[[], NoReturn]) -> tuple[int, Descriptors]:
    """Fork a child that runs a function. Returns its process id, and a descriptor of it."""
    pids: list[int] = []
    try:
        pids.extend(itertools.starmap(os.fork, [()]))  # in one call, as for descriptors
        if pids == [0]:
            try:
                run()
            finally:
                os._exit(1)
        return pids[0], Descriptors(map(os.pidfd_open, pids))
    except BaseException:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise


def exit_code_of_child(pid: int) -> int | None:
    """Reap a child that has ended. Returns its exit code; None if that cannot be known."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as error:
        if error.errno is None:  # a signal handler's
            raise
        return None  # other code has reaped it, or a sandbox forbids the call


def run_process(load: Callable[[], Any]) -> NoReturn:
    """Run a process of multiprocessing's in this process, which was forked for it, and end."""
    code = 1
    try:
        process = load()
        code = process._bootstrap(parent_sentinel=os.pidfd_open(process._parent_pid))
        if process._start_method != "fork":  # a fork inherits the exit functions of its parent
            atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(code)


class ForkedProcess(popen_fork.Popen):
    """What multiprocessing needs of a process that is forked here or in the nursery.

    Attributes:
        owned: A descriptor of the process.
        sentinel: Its number.
    """

    def __init__(self, process: BaseProcess, nursery: Any = None) -> None:
        self._nursery = nursery
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        del process._Popen  # which is not for the process itself
        if self._nursery is None:
            self.pid, self.owned = fork(lambda: run_process(lambda: process))
        else:
            self.pid, self.owned = self._nursery.fork(process)
        (self.sentinel,) = self.owned.numbers()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None while the process runs, and if its code is not known."""
        is_open = self.returncode is None and bool(self.owned)
        if is_open and is_readable(self.sentinel, 0.0 if flag else None):
            reap = exit_code_of_child if self._nursery is None else self._nursery.exit_code
            self.returncode = reap(self.pid)
        return self.returncode

    def _send_signal(self, number: int) -> None:
        if self.returncode is None and self.owned:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, number)

    def close(self) -> None:
        """Close the descriptor. May be called again."""
        self.owned.close_all()


class ParentDeathPipe:
    """The pipe, owned by the pool. In a process that gets it pickled, it has a reading end only.

    Attributes:
        read: The reading end. Once it is closed, no worker may be started any more.
        write: The writing end, which only the main process has.
    """

    def __init__(self) -> None:
        self.main_pid = os.getpid()
        self.read, self.write = (Descriptors([fd]) for fd in os.pipe())
        PROCESS.parent_death_pipes.add(self)

    def __getstate__(self) -> tuple[int, Any]:
        """Pickle for a process that is being started."""
        return self.main_pid, reduction.DupFd(self.read[0])

    def __setstate__(self, state: tuple[int, Any]) -> None:
        self.main_pid, duplicate = state
        self.read, self.write = Descriptors([duplicate.detach()]), Descriptors()

    def hold(self) -> None:
        """Make this process end with the main process: at once if that has ended already."""
        self.write.close_all()
        # Opened again, since the signal and its receiver belong to the open file, not to the pipe.
        # Where that cannot be, as without /proc, only the newest worker gets the signal: the others
        # end when they next look for a task.
        (read,) = self.read
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            read = os.open(f"/proc/self/fd/{read}", flags)
            self.read.close_all()
        self.read.clear()  # what is open stays open for the life of this process
        fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
        with contextlib.suppress(OSError):  # a sandbox may forbid it: then SIGIO ends this process
            fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
        if is_readable(read, events=0):
            os._exit(1)

    def close(self) -> None:
        """Close both ends, which ends every running worker. May be called again."""
        self.read.close_all()
        self.write.close_all()
