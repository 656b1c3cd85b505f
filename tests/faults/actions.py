"""The faults themselves: functions that ``SHMLOADER_FAULT`` names.

Each is taken once in a trial, by the first process that reaches the point. This process notes in
the trial's directory which process the fault hits, and when. This module imports nothing of
shmloader.
"""

import ctypes
import functools
import multiprocessing.process
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY = "SHMLOADER_TRIAL"
MAIN_PID = "SHMLOADER_TRIAL_MAIN"

GIL_S = 1.2

#: How the trial's consumer behaves from now on.
consumer = {"keeps": False, "slow": False}

_descriptors: list[int] = []


def taken() -> tuple[int, int] | None:
    """Return which process the fault has hit, and the ``time.monotonic_ns()``; None if none yet."""
    try:
        words = (Path(os.environ[DIRECTORY]) / "taken").read_text().split()
    except FileNotFoundError:
        return None
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def await_taken() -> None:
    """Wait until the fault has hit a process, but only 10 s, so that no trial hangs here."""
    deadline = time.monotonic() + 10
    while taken() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def _claim(victim: int) -> bool:
    """Note that the fault is taken; return False if it was taken before."""
    path = Path(os.environ[DIRECTORY])
    ours = path / f"taken-{os.getpid()}"
    ours.write_text(f"{victim} {time.monotonic_ns()}")
    try:
        os.link(ours, path / "taken")
    except FileExistsError:
        return False
    finally:
        ours.unlink()
    return True


def _once(action: Callable[[], Any]) -> Callable[[], None]:
    @functools.wraps(action)
    def take() -> None:
        if _claim(os.getpid()):
            action()

    return take


def _signal_self(number: int) -> None:
    os.kill(os.getpid(), number)
    if number != signal.SIGSTOP:
        signal.pause()  # another thread may receive it: do nothing until then


sigkill = _once(lambda: _signal_self(signal.SIGKILL))
sigsegv = _once(lambda: _signal_self(signal.SIGSEGV))
sigbus = _once(lambda: _signal_self(signal.SIGBUS))
sigterm = _once(lambda: _signal_self(signal.SIGTERM))
sigstop = _once(lambda: _signal_self(signal.SIGSTOP))
os_exit = _once(lambda: os._exit(3))


@_once
def fork_exit() -> None:
    """Exit, and leave a child that holds all that this process held until main ends."""
    main = os.pidfd_open(int(os.environ[MAIN_PID]))
    if os.fork() == 0:
        try:
            poll = select.poll()
            poll.register(main, select.POLLIN)
            poll.poll(120_000)
        finally:
            os._exit(0)
    os._exit(7)


def keep_interpreter(seconds: float) -> None:
    """Hold the interpreter's lock in a call that sleeps."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


gil = _once(lambda: keep_interpreter(GIL_S))


sigint = _once(lambda: os.killpg(0, signal.SIGINT))
ctrl_c = _once(lambda: os.killpg(0, signal.SIGINT))


class TwoArgumentsError(Exception):
    """Cannot be rebuilt from its text alone."""

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)


class UnpicklableError(Exception):
    """Cannot be pickled, though its class can."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class FailingStrError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


def _raise(error: BaseException) -> None:
    raise error


@_once
def local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("of the trial")


memory = _once(lambda: _raise(MemoryError("of the trial")))
plain = _once(lambda: _raise(ValueError("of the trial")))
two_arguments = _once(lambda: _raise(TwoArgumentsError("of", "the trial")))
unpicklable = _once(lambda: _raise(UnpicklableError("of the trial")))
failing_str = _once(lambda: _raise(FailingStrError("of the trial")))
long = _once(lambda: _raise(ValueError("of the trial" + "x" * 10_000_000)))
stop_iteration = _once(lambda: _raise(StopIteration("of the trial")))
keyboard_interrupt = _once(lambda: _raise(KeyboardInterrupt("of the trial")))
generator_exit = _once(lambda: _raise(GeneratorExit("of the trial")))
sys_exit = _once(lambda: sys.exit(4))


@_once
def emfile() -> None:
    """Open files until this process has no descriptor left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            _descriptors.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        pass


def relieve() -> None:
    """Close the files that :func:`emfile` has opened, and lift its limit."""
    while _descriptors:
        os.close(_descriptors.pop())
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _signal_worker(number: int) -> None:
    # Not by active_children(), which would reap dead workers.
    workers = [process.pid or 0 for process in multiprocessing.process._children]
    if workers and _claim(max(workers)):
        os.kill(max(workers), number)


def kill_worker() -> None:
    _signal_worker(signal.SIGKILL)


def stop_worker() -> None:
    _signal_worker(signal.SIGSTOP)


keeps = _once(lambda: consumer.update(keeps=True))
slow = _once(lambda: consumer.update(slow=True))


def __getattr__(name: str) -> Callable[[], threading.Thread]:
    """Return ``during_X``: fault X, taken by a new thread while the one at the point goes on.

    It returns the thread, which takes the fault before the point is reached again.
    """
    if not name.startswith("during_"):
        raise AttributeError(name)
    action = globals()[name.removeprefix("during_")]

    def start() -> threading.Thread:
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        return thread

    return start
