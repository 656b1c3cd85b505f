"""One call of ``next()``: what it gives is counted at its very end, or not at all.

A signal handler may raise between any two instructions. Where a batch, or a ticket, was on its way
just then, to go on would be to leave it out in silence. So the iterator is closed, and what was
counted for it is taken back: the loader's state is that of the last batch that ``next()`` returned.
Where nothing was on its way, the exception comes out and the next call goes on.

Guarantees:
    * The last thing that ``next()`` does before it returns is to count the batch.
    * An interrupted iterator goes on with all that is left, or raises ``ClosedLoaderError``.
    * Two threads in one ``next()``: the second one raises RuntimeError, the first goes on.
"""

import abc
import functools
import threading
import time
from typing import Any, NoReturn

from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.loader.common import next_batch
from shmloader.threads.uninterruptible import uninterruptible


def refuse(first: int, second: int) -> NoReturn:
    """Raise that a call has begun before another one was over.

    Args:
        first: The thread of the one.
        second: The thread of the other.

    Raises:
        RuntimeError: If these are two threads.
        ClosedLoaderError: If the one is under way on the same thread, or was left undone.
    """
    if first in {thread.ident for thread in threading.enumerate()} - {second}:
        raise RuntimeError(
            "another thread is in next() of this iterator, which only one thread at a time may "
            "use: hold a lock around next(), or give each thread its own loader"
        )
    raise ClosedLoaderError(
        "the iterator cannot go on: a call of next() on this thread is still running, or did not "
        "finish because exceptions from outside interrupted it"
    )


class CountingIterator(_BaseDataLoaderIter):
    """An iterator whose batches are counted as they are handed over."""

    # The thread that is in next(), or was when an interruption left that undone.
    _caller = 0

    def __next__(self) -> Any:
        """The next batch."""
        began_ns = time.monotonic_ns()
        caller = threading.get_ident()
        # No other thread runs between this look and the assignment: Python changes threads at calls
        # and at backward jumps alone.
        if self._caller:
            refuse(self._caller, caller)
        mark = None
        try:
            self._caller = caller
            mark = self._mark()
            batch = next_batch(self, super().__next__)
            if FAULTS is not None:
                FAULTS.reach("main.return")
            self._note_times(batch, began_ns)
            self._note_done()
            self._caller = 0
            return batch
        except BaseException as error:
            try:
                if mark is not None:
                    self._leave(error, mark, began_ns)
            finally:
                self._caller = 0
            raise

    def _leave(self, error: BaseException, mark: Any, began_ns: int) -> None:
        """A call ends by an exception."""
        try:
            if not self._loses(error):
                self._note_raised(error, began_ns)
                return
        except BaseException as another:
            uninterruptible(functools.partial(self._give_up, another, mark))
            raise
        uninterruptible(functools.partial(self._give_up, error, mark))

    @abc.abstractmethod
    def _mark(self) -> Any:
        """What :meth:`_give_up` takes: how far the epoch has come."""

    @abc.abstractmethod
    def _note_times(self, batch: Any, began_ns: int) -> None:
        """Note where the time of a batch went."""

    @abc.abstractmethod
    def _note_done(self) -> None:
        """Count what is handed over: a batch, or an exception in its place."""

    @abc.abstractmethod
    def _loses(self, error: BaseException) -> bool:
        """Whether to go on after an exception would be to leave something out."""

    @abc.abstractmethod
    def _note_raised(self, error: BaseException, began_ns: int) -> None:
        """Note an exception after which the iterator may go on."""

    @abc.abstractmethod
    def _give_up(self, error: BaseException, mark: Any) -> None:
        """Close, since an exception came from outside, and take back what was counted."""
