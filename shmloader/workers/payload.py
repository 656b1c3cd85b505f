"""Dataset and functions on their way to the workers: pickled once, loaded by each.

Under fork nothing is pickled: the child has the objects. Under spawn and forkserver torch
pickles everything once a worker, one after the other, through a pipe that each child reads when
it is ready. Here the bytes lie in shared memory; a worker gets a descriptor, and all of them
load side by side.
"""

import contextlib
import io
import mmap
import multiprocessing.context
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterator
from multiprocessing import popen_forkserver, popen_spawn_posix, reduction
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from shmloader.memory.slot import MEMFD_NAME

#: What pickling raises for an object that cannot be pickled.
PICKLE_ERRORS = (TypeError, AttributeError, pickle.PicklingError)


class _DescriptorRecorder:
    """Poses as the child that multiprocessing pickles for, and notes which descriptors it needs.

    A lock, queue or tensor that is shared with the workers pickles to a descriptor: under spawn
    its number, which the child inherits; under forkserver its place in the list that the child
    is sent. Both are the same for every worker if each is given the same list, first of all.
    """

    def __init__(self, start_method: str) -> None:
        self.descriptors: list[int] = []
        self._by_place = start_method == "forkserver"
        self.DupFd: Any = (popen_forkserver if self._by_place else popen_spawn_posix)._DupFd

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return len(self.descriptors) - 1 if self._by_place else fd


@contextlib.contextmanager
def _spawning(popen: Any) -> Iterator[None]:
    """Let multiprocessing's reducers see that something is pickled for a child."""
    before = multiprocessing.context.get_spawning_popen()
    multiprocessing.context.set_spawning_popen(popen)
    try:
        yield
    finally:
        multiprocessing.context.set_spawning_popen(before)


class _ClosurePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle, with multiprocessing's reducers for what is shared with a child."""

    # On the class: the pickler reads it while it is made.
    dispatch_table: ClassVar[Any] = ChainMap(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )


def main_is_importable() -> bool:
    """Whether a child started afresh can import ``__main__``: not so in a notebook or ``-c``."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:
        return True
    file = getattr(main, "__file__", None)
    return file is not None and Path(file).exists()


@contextlib.contextmanager
def unimportable_main_hidden() -> Iterator[None]:
    """Keep a child from running a ``__main__`` that is no file, as that of ``python < program``.

    multiprocessing hands the name on, "<stdin>", and every child would fail to find it.
    """
    main: Any = sys.modules.get("__main__")
    if main_is_importable() or not hasattr(main, "__file__"):
        yield
        return
    file = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class Payload:
    """What all workers of a pool get, in shared memory. The pool owns it.

    Standard pickle comes first: it knows objects by their names, as a spawned child does.
    cloudpickle takes over where pickle cannot (lambdas, closures), and comes first where
    ``__main__`` has no file.

    Attributes:
        by_value: Whether cloudpickle did it; answers may then need it, too.
    """

    def __init__(self, objects: object, start_method: str) -> None:
        """Pickle ``objects``.

        Raises:
            TypeError, AttributeError, pickle.PicklingError: If neither way can.
        """
        self._recorder = _DescriptorRecorder(start_method)
        with _spawning(self._recorder):
            data, self.by_value = self._dump(objects)
        self._nbytes = len(data)
        self._fd = os.memfd_create(f"{MEMFD_NAME}-payload", os.MFD_CLOEXEC)
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.write(data)
        except BaseException:
            self.close()
            raise

    def _dump(self, objects: object) -> tuple[memoryview, bool]:
        first_error: Exception | None = None
        if main_is_importable():
            try:
                return ForkingPickler.dumps(objects), False
            except PICKLE_ERRORS as error:
                first_error = error
                self._recorder.descriptors.clear()
        file = io.BytesIO()
        try:
            _ClosurePickler(file).dump(objects)
        except PICKLE_ERRORS as error:
            raise (first_error or error) from error
        return file.getbuffer(), True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a handle: multiprocessing calls this once for each worker it starts."""
        popen: Any = multiprocessing.context.get_spawning_popen()
        for fd in self._recorder.descriptors:
            popen.duplicate_for_child(fd)
        return ReceivedPayload, (reduction.DupFd(self._fd), self._nbytes, self.by_value)

    def close(self) -> None:
        """Close the descriptor; may be called again. Workers that started keep theirs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ForkedPayload:
    """The objects themselves, for a forked worker."""

    by_value = False

    def __init__(self, objects: object) -> None:
        self._objects = objects

    def load(self) -> Any:
        """The objects."""
        return self._objects

    def close(self) -> None:
        """Nothing to do."""


class ReceivedPayload:
    """A payload in a worker, not read yet."""

    def __init__(self, duplicate: Any, nbytes: int, by_value: bool) -> None:
        self._duplicate = duplicate
        self._nbytes = nbytes
        self.by_value = by_value

    def load(self) -> Any:
        """Unpickle the objects. Once, in the worker.

        Raises:
            Exception: Whatever unpickling the user's objects raises.
        """
        fd = self._duplicate.detach()
        try:
            with mmap.mmap(fd, self._nbytes, prot=mmap.PROT_READ) as mapping:
                return pickle.loads(memoryview(mapping))
        finally:
            os.close(fd)
