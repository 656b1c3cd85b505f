"""Forks processes for multiprocessing, here or in the nursery, and guards how they start.

**Main guard.** A fresh interpreter imports the program's main file. If that file starts workers as
soon as it is imported, each interpreter would start further ones. Those that shmloader has started
end silently instead, with an exit code that tells the main process the reason.

**Ctrl-C** is for the main process. It is blocked in a process that starts, until that ignores it.
"""

import atexit
import contextlib
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import popen_fork, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

#: Exit code of a process that would have started workers while it imported the main file.
NO_GUARD_EXIT = 73

#: What happened, in Python's words, and what to do.
NO_GUARD_TEXT = """\
An attempt has been made to start a new process before the current process has finished its \
bootstrapping phase. A process that is started by 'spawn' or 'forkserver' imports the program's \
main file, and this file starts workers as soon as it is imported. Put that part of it under a \
main guard:

if __name__ == "__main__":
    for batch in loader:
        ...
"""

_NAME = "shmloader worker "


def name_of(worker_id: int | str) -> str:
    """Return the process name of a worker, or of another process that the pool starts."""
    return f"{_NAME}{worker_id}"


def refuse_during_import() -> None:
    """Refuse to start workers in a process that is importing the main file.

    Does not return in a process that shmloader has started: it ends with :data:`NO_GUARD_EXIT`.

    Raises:
        RuntimeError: In a process that other code has started.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(_NAME):
        os._exit(NO_GUARD_EXIT)
    raise RuntimeError(NO_GUARD_TEXT)


@contextlib.contextmanager
def sigint_blocked(*, is_fresh: bool) -> Iterator[None]:
    """Block SIGINT on this thread, and in processes that are started in this block.

    Args:
        is_fresh: Whether multiprocessing starts an interpreter, and so a resource tracker.
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


def is_readable(fd: int, wait_s: float | None = 0.0) -> bool:
    """Wait until a descriptor can be read. Of a process's descriptor: until the process has ended.

    Args:
        fd: The descriptor.
        wait_s: Longest wait in seconds; None waits without a limit.
    """
    poll = select.poll()  # select.select() takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000))


def fork(run: Callable[[], NoReturn]) -> tuple[int, int]:
    """Fork a child that runs a function. Returns its process id, and a descriptor of it.

    Raises:
        OSError: If there are no descriptors or processes left.
    """
    pid = os.fork()
    if pid == 0:
        run()
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def exit_code_of_child(pid: int) -> int | None:
    """Reap a child that has ended. Returns its exit code; None if other code has reaped it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def run_process(load: Callable[[], Any]) -> NoReturn:
    """Run a process of multiprocessing's in this process, which was forked for it, and end.

    Args:
        load: Returns the process.
    """
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
        sentinel: A descriptor of the process.

    Args:
        process: The process of multiprocessing's.
        nursery: The nursery that forks it; None to fork it here.
    """

    finalizer: "util.Finalize[Any]"

    def __init__(self, process: BaseProcess, nursery: Any = None) -> None:
        self._nursery = nursery
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        del process._Popen  # which is not for the process itself
        if self._nursery is None:
            self.pid, self.sentinel = fork(lambda: run_process(lambda: process))
        else:
            self.pid, self.sentinel = self._nursery.fork(process)
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None while the process runs, and if its code is not known."""
        is_open = self.returncode is None and self.finalizer.still_active()
        if is_open and is_readable(self.sentinel, 0.0 if flag else None):
            reap = exit_code_of_child if self._nursery is None else self._nursery.exit_code
            self.returncode = reap(self.pid)
        return self.returncode

    def _send_signal(self, number: int) -> None:
        if self.returncode is None and self.finalizer.still_active():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, number)
