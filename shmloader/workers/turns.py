"""Fresh interpreters get ready in turns: as many at a time as there are cores.

Under spawn a worker imports torch and unpickles the dataset, seconds of a core's time. Where all do
so at once on fewer cores, the first is ready when the last is: with eight workers on two cores the
first batch came four times as late as it could.

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
and before any module of ours could be. So the wait is part of the pickled name: it is made of
functions of the standard library, ``os.read`` and one that passes over what that has read.

**Guarantees.** A token comes when a dataset is loaded, when that failed, and when a worker is dead:
then from the main process, which is told of it in ``next()``. One too many does no harm.
"""

import contextlib
import io
import operator
import os
from multiprocessing import reduction
from typing import Any

_TOKEN = b"."


class _Later:
    """Unpickles as what a function gives then."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


class _AwaitedName(str):
    """A process's name. The first to unpickle it waits for a token; whoever is next does not."""

    __slots__ = ("_read",)
    _read: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        read, self._read = self._read, None
        if read is None:
            return str, (str(self),)
        token = _Later(os.read, read, len(_TOKEN))
        return operator.itemgetter(1), ((token, str(self)),)


class Turns:
    """The main process's side. Owns the pipe; the pool owns it."""

    def __init__(self, at_once: int) -> None:
        """Nobody has begun.

        Args:
            at_once: How many workers get ready at a time.

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

    def admit(self, process: Any) -> None:
        """Have a process that is about to be started wait for its turn, if it is not there yet."""
        if self._free:
            self._free -= 1
            return
        name = _AwaitedName(process.name)
        name._read = self._read.fileno()
        process.name = name

    def go_on(self) -> None:
        """A worker is dead, whose turn it may have been."""
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
