"""Fresh interpreters get ready: without the garbage collector, and in turns, as there are cores.

Importing torch makes a quarter of a million objects, all of which stay. The collector looks through
them again and again meanwhile, one twelfth of the time, so it is off until the worker is ready.

Under spawn a worker imports torch and unpickles the dataset, seconds of a core's time. Where all do
so at once on fewer cores, the first is ready when the last is. In five rounds in turns on two
cores, with a dataset of many strings (row G of the benchmark), the first batch came 1.7 times as
late without the semaphore with four workers (1.5–2.2), and 3.2 times with eight (2.5–4.4).

All workers are started at once; what waits is the interpreter, before it imports anything::

    main                        worker                       a pipe, empty at first
    ────                        ──────                       ──────────────────────
    starts it ────────────────▶ interpreter is up
    sends name, path, main      reads its name ◀──────────── waits for a token, unless it is
                                                             one of the first, whose batches are
                                                             wanted first
                                imports main, torch, us
                                loads the dataset ─────────▶ puts one there
                                worker_init_fn, batches
    sees it dead ──────────────────────────────────────────▶ puts one there

The name of its process is the first thing that it unpickles, before the main module is imported
and before any module of ours could be. So all this is part of the pickled name: it is made of
functions of the standard library, ``gc.disable``, ``signal.pthread_sigmask``, ``os.read`` and one
that passes over what these give.

**Guarantees.** A token comes when a dataset is loaded, when that failed, and when a worker is dead:
then from the main process, which is told of it in ``next()``. One too many does no harm.
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


class _Later:
    """Unpickles as what a function gives then."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class _FirstWord(str):
    """A process's name. To unpickle it does what is to be done first, but only the first time."""

    __slots__ = ("_to_do",)
    _to_do: list[_Later]

    def __reduce__(self) -> tuple[Any, ...]:
        to_do, self._to_do = self._to_do, []
        return operator.itemgetter(-1), ((*to_do, str(self)),)


def get_ready(process: Any, startup: "StartupSemaphore | None") -> None:
    """Define what a process does first, before it is started.

    Args:
        process: The process: a fresh interpreter, which calls :func:`is_ready` later.
        startup: The semaphore that it acquires first; None if it need not wait.
    """
    # A fork server that the user started lets Ctrl-C through.
    block = _Later(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGINT])
    to_do = [_Later(gc.disable), block]
    read = None if startup is None else startup.admit()
    if read is not None:
        to_do.append(_Later(os.read, read, len(_TOKEN)))
    name = _FirstWord(process.name)
    name._to_do = to_do
    process.name = name


def is_ready(turn: Any) -> None:
    """In the worker: go on as any process; and it is somebody else's turn. Once.

    Args:
        turn: The worker's; None where there were none.
    """
    gc.enable()
    if isinstance(turn, WorkerTurn):
        turn.end()


class StartupSemaphore:
    """The main process's end of the semaphore. Owns the pipe; the pool owns the semaphore."""

    def __init__(self, at_once: int) -> None:
        """Create the pipe.

        Args:
            at_once: How many workers may start up at the same time.

        Raises:
            OSError: If there are no descriptors left.
        """
        read, write = os.pipe()
        self._read, self._write = io.FileIO(read), io.FileIO(write, "w")
        self._free = at_once

    def __reduce__(self) -> tuple[Any, ...]:
        """Become the worker's turn; under spawn its descriptors have the numbers of ours."""
        ends = (self._read.fileno(), self._write.fileno())
        return WorkerTurn, tuple(map(reduction.DupFd, ends))

    def admit(self) -> int | None:
        """Another process. Gives the descriptor of which it waits for a token; None: its turn."""
        if self._free:
            self._free -= 1
            return None
        return self._read.fileno()

    def go_on(self) -> None:
        """A worker is dead, whose turn it may have been."""
        with contextlib.suppress(ValueError):  # closed, by another thread
            self._write.write(_TOKEN)

    def close(self) -> None:
        """Close the pipe. May be called again."""
        self._read.close()
        self._write.close()


class WorkerTurn:
    """A worker's side: its turn has come."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read.detach(), write.detach()

    def end(self) -> None:
        """It is ready: somebody else's turn. Once."""
        os.close(self._read)
        with contextlib.suppress(BrokenPipeError):  # nobody waits, nor does the main process live
            os.write(self._write, _TOKEN)
        os.close(self._write)
