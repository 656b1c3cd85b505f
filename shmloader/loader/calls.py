"""The base of iterators whose ``next()`` counts its batch as its last step, or not at all.

A signal handler may raise between any two instructions. If a batch or a ticket was in transit at
that point, continuing would silently leave it out. So the iterator is closed, and the count goes
back: the loader's state is that of the last batch that ``next()`` returned. If nothing was in
transit, the exception is raised and the next call continues.

Guarantees:
    * Counting the batch is the last thing that ``next()`` does before it returns.
    * An interrupted iterator delivers everything that is left, or raises ``ClosedLoaderError``.
    * If two threads call ``next()`` at once, the second raises RuntimeError; the first continues.
"""

import abc
import functools
import threading
import time
from typing import Any, NoReturn

from torch._C._autograd import _profiler_enabled
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.errors import ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.threads.uninterruptible import uninterruptible

#: Raised by an iterator that was made before a state was loaded.
REPLACED = (
    "load_state_dict() was called after this iterator was made: call iter() of the loader again, "
    "which continues from the loaded state"
)


def refuse(first: int, second: int) -> NoReturn:
    """Raise the error for a call that began before another call had ended.

    Args:
        first: The thread of the earlier call.
        second: The thread of the later call.

    Raises:
        RuntimeError: If these are different threads.
        ClosedLoaderError: If the earlier call runs on the same thread, or did not finish.
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
    """An iterator that counts batches as it delivers them."""

    _IterableDataset_len_called: int | None  # type: ignore[assignment]
    # The order of the iterator's epoch.
    _order: SeededOrder | SamplerOrder
    # The thread that is inside next(), or that was when an exception left next() unfinished.
    _caller = 0

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's methods iterate: the order's, which may add to the loader's."""
        return self._order.index_sampler

    @_index_sampler.setter
    def _index_sampler(self, _: object) -> None:
        """Ignore the loader's, which torch's constructor sets."""

    def __next__(self) -> Any:
        """Return the next batch."""
        began_ns = time.monotonic_ns()
        caller = threading.get_ident()
        # No other thread runs between this test and the assignment: Python switches threads only at
        # calls and backward jumps.
        if self._caller:
            refuse(self._caller, caller)
        mark = None
        try:
            self._caller = caller
            mark = self._mark()
            # torch's __next__ takes longer, so it is called only where it does more: it warns of an
            # iterable dataset that is longer than its length, and records for the profiler.
            if self._IterableDataset_len_called is None and not _profiler_enabled():
                batch = self._next_data()
                self._num_yielded += 1
            else:
                batch = super().__next__()
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
        """Handle an exception that ends a call."""
        try:
            if not self._loses(error):
                self._note_raised(error, began_ns)
                return
        except BaseException as another:
            uninterruptible(functools.partial(self._give_up, another, mark))
            raise
        uninterruptible(functools.partial(self._give_up, error, mark))

    @abc.abstractmethod
    def _next_data(self) -> Any:
        """Return the next batch; torch's ``__next__`` calls this, too."""

    @abc.abstractmethod
    def _mark(self) -> Any:
        """Return how far the epoch has come, for :meth:`_give_up`."""

    @abc.abstractmethod
    def _note_times(self, batch: Any, began_ns: int) -> None:
        """Note how long each step of a batch took."""

    @abc.abstractmethod
    def _note_done(self) -> None:
        """Count a delivered batch, or an exception in its place."""

    @abc.abstractmethod
    def _loses(self, error: BaseException) -> bool:
        """Return whether continuing after an exception would leave out a batch."""

    @abc.abstractmethod
    def _note_raised(self, error: BaseException, began_ns: int) -> None:
        """Note an exception after which the iterator may continue."""

    @abc.abstractmethod
    def _give_up(self, error: BaseException, mark: Any) -> None:
        """Close the iterator after an exception from outside, and go back to the mark."""
