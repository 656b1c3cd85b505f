"""Limits how many fresh interpreters start up at a time. Their garbage collector is off meanwhile.

Importing torch makes a quarter of a million objects, all of which stay. The garbage collector looks
through them again and again, which takes one twelfth of the time, so it is off until the worker has
loaded its dataset.

Under spawn a worker imports torch and unpickles the dataset, which takes seconds of a core's time.
If all workers do so at once on fewer cores, the first is ready only when the last is. In five
rounds in turns on two cores, with a dataset of many strings (row G of the benchmark), the first
batch came 1.7 times as late without the semaphore with four workers (1.5–2.2), and 3.2 times as
late with eight (2.5–4.4).

All workers are started at once. The interpreter waits before it imports anything::

    main process                worker                       a pipe, empty at first
    ────────────                ──────                       ──────────────────────
    starts the worker ────────▶ interpreter is up
    sends name, path, main      reads its name ◀──────────── waits for a token, unless it is one of
                                                             the first workers, whose batches are
                                                             wanted first
                                imports main, torch, shmloader
                                loads the dataset ─────────▶ writes a token
                                worker_init_fn, batches
    sees it dead ──────────────────────────────────────────▶ writes a token

The process's name is the first thing that the worker unpickles, before it imports the main module
and before any module of ours could be imported. So all of this is part of the pickled name, which
refers to functions of the standard library only: ``gc.disable``, ``signal.pthread_sigmask``,
``os.read``, and ``operator.itemgetter``, which drops what the others return.

**Guarantees.** A token is written when a dataset is loaded, when loading it failed, and when a
worker is dead: in that case by the main process, which learns of it in ``next()``. One token too
many does no harm.
"""

import contextlib
import gc
import io
import operator
import os
import signal
from multiprocessing import reduction
from typing import Any

_TOKEN = b"."


class _Call:
    """An object whose unpickling makes a call, and gives the result of the call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class _CallingName(str):
    """A process's name that makes calls when it is unpickled. Only its first pickle has them."""

    __slots__ = ("_calls",)
    _calls: list[_Call]

    def __reduce__(self) -> tuple[Any, ...]:
        calls, self._calls = self._calls, []
        return operator.itemgetter(-1), ((*calls, str(self)),)


def set_startup(process: Any, startup: "StartupSemaphore | None") -> None:
    """Define what a process does before all else, until it calls :func:`end_startup`.

    Args:
        process: A process that was not started yet, which will be a fresh interpreter.
        startup: The semaphore that the process acquires first; None if the number is not limited.
    """
    # A fork server that the user started does not block SIGINT.
    block = _Call(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGINT])
    calls = [_Call(gc.disable), block]
    read = None if startup is None else startup.admit()
    if read is not None:
        calls.append(_Call(os.read, read, len(_TOKEN)))
    name = _CallingName(process.name)
    name._calls = calls
    process.name = name


def end_startup(startup: Any) -> None:
    """Enable the garbage collector, and let another worker start up. Called once, in the worker.

    Args:
        startup: The worker's end of the semaphore; None if the number is not limited.
    """
    gc.enable()
    if isinstance(startup, WorkerStartupSemaphore):
        startup.release()


class StartupSemaphore:
    """The main process's end of the semaphore, owned by the pool. It pickles as the worker's end.

    Args:
        at_once: How many workers may start up at the same time.

    Raises:
        OSError: If there are no descriptors left.
    """

    def __init__(self, at_once: int) -> None:
        read, write = os.pipe()
        self._read, self._write = io.FileIO(read), io.FileIO(write, "w")
        self._free = at_once

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the worker's end. Under spawn its descriptors have the same numbers."""
        ends = (self._read.fileno(), self._write.fileno())
        return WorkerStartupSemaphore, tuple(map(reduction.DupFd, ends))

    def admit(self) -> int | None:
        """Admit a further process.

        Returns:
            The descriptor from which the process first reads a token; None if it need not wait.
        """
        if self._free:
            self._free -= 1
            return None
        return self._read.fileno()

    def release(self) -> None:
        """Write a token for a dead worker, which may not have written one."""
        with contextlib.suppress(ValueError):  # another thread has closed it
            self._write.write(_TOKEN)

    def close(self) -> None:
        """Close the pipe. May be called again."""
        self._read.close()
        self._write.close()


class WorkerStartupSemaphore:
    """The worker's end of the semaphore."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read.detach(), write.detach()

    def release(self) -> None:
        """Write a token, and close the pipe. Called once."""
        os.close(self._read)
        with contextlib.suppress(BrokenPipeError):  # no worker waits, and the main process is gone
            os.write(self._write, _TOKEN)
        os.close(self._write)
