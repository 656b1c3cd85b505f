"""The base of our iterators: ``next()``, its one ``raise``, and what an interruption does.

A signal handler may raise between any two instructions. If a batch or a ticket was on its way at
that point, continuing would silently leave it out. So there is one rule: **an exception that leaves
``next()`` and is not an** :class:`~shmloader.engine.delivery.Instead` **closes the iterator, unless
the iterator only waited for a batch.** The loader's state stays that of the last batch that
``next()`` returned.

Guarantees:
    * Counting the batch is the last thing that ``next()`` does before it returns.
    * An interrupted iterator delivers everything that is left, or raises ``ClosedLoaderError``.
    * If two threads call ``next()`` at once, the second raises RuntimeError; the first continues.
"""

import abc
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.batch.seeds import base_seed
from shmloader.engine.dataset_checkpoints import DatasetCheckpoints
from shmloader.engine.delivery import Instead
from shmloader.errors import CLOSED_MEANWHILE, ClosedLoaderError
from shmloader.faults import FAULTS
from shmloader.loader.config import LoaderConfig, LoaderParts
from shmloader.sampling.plan import EpochPlan
from shmloader.sampling.progress import Progress
from shmloader.sampling.sampler_order import SamplerOrder
from shmloader.sampling.seeded_order import SeededOrder
from shmloader.threads.uninterruptible import uninterruptible
from shmloader.tracebacks import user_part, warn_user

if TYPE_CHECKING:  # which imports this module's users
    from shmloader.loader.local_checkpoint import LocalCheckpoint

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
    # The order of the iterator's epoch, and how far the user has come in it.
    _order: SeededOrder | SamplerOrder
    _progress: Progress
    # Checkpoints of the datasets after the last delivered batch; None if none are kept.
    _checkpoints: "DatasetCheckpoints | LocalCheckpoint | None"
    # The thread that is inside next(), or that was when an exception left next() unfinished.
    _caller = 0

    @property
    def _index_sampler(self) -> Any:
        """The sampler that torch's methods iterate: the order's, which may add to the loader's."""
        return self._order.index_sampler

    @_index_sampler.setter
    def _index_sampler(self, _: object) -> None:
        """Ignore the loader's, which torch's constructor sets."""

    def __next__(self) -> Any:  # noqa: PLR0912 - each call of a part would cost 0.1 µs a batch
        """Return the next batch."""
        began_ns = time.monotonic_ns()
        # No other thread runs between this test and the assignment: Python switches threads only at
        # calls and backward jumps.
        caller = threading.get_ident()
        if self._caller:
            refuse(self._caller, caller)
        mark = None
        try:
            self._caller = caller
            progress, checkpoints = self._progress, self._checkpoints
            mark = (
                progress.position if progress.is_plain else progress.mark(),
                None if checkpoints is None else checkpoints.mark(),
            )
            try:
                # torch's __next__ takes longer, so it is called only where it does more: it warns
                # of an iterable dataset that is longer than its length, and tells the profiler.
                if self._IterableDataset_len_called is None and not _profiler_enabled():
                    batch = self._next_data()
                    self._num_yielded += 1
                else:
                    batch = super().__next__()
            except (Instead, UserWarning) as instead:  # torch's warning may be made an error
                error = instead.error if isinstance(instead, Instead) else instead
                if self._was_closed_by_user:
                    error = _closed_meanwhile(error)
                self._count_error(error, began_ns)
            else:
                if FAULTS is not None:
                    FAULTS.reach("main.return")
                self._count(batch, began_ns)
                self._caller = 0
                return batch
            self._caller = 0
        except BaseException as interruption:
            try:
                self._leave(interruption, mark, began_ns)
            finally:
                self._caller = 0
            if isinstance(interruption, KeyboardInterrupt):
                # Hides the exception that was being handled, which does not concern the user.
                raise interruption from interruption.__cause__
            raise
        traceback, context = error.__traceback__, error.__context__
        try:
            raise error
        except BaseException:
            # The user sees no frame of ours around those of the user's code.
            error.with_traceback(user_part(traceback))  # which is never refused
            if context is not None:
                # If next() is called in an except block, ``raise`` has replaced the context by the
                # exception that is handled there, which is already the last in the user's chain.
                object.__setattr__(error, "__context__", context)
            raise
        finally:
            del error, traceback, context  # breaks a reference cycle, as they refer to this frame

    def _leave(self, error: BaseException, mark: Any, began_ns: int) -> None:
        """Handle an exception that has interrupted a call: close, unless that only waited."""
        if self._is_waiting:
            self._count_wait(began_ns)
            return
        was_closed = self._was_closed_by_user and isinstance(error, Exception)
        uninterruptible(functools.partial(self._go_back, error, mark))
        if was_closed:
            raise _closed_meanwhile(error)

    def _go_back(self, error: BaseException, mark: Any) -> None:
        """Close, with the state of the last batch that ``next()`` returned."""
        if mark is not None:
            self._progress.go_back(mark[0])
            if self._checkpoints is not None:
                self._checkpoints.go_back(mark[1])
        self._give_up(error)

    @property
    def _is_waiting(self) -> bool:
        """Whether the call only waited for a batch, and nothing is on its way."""
        return False

    @property
    @abc.abstractmethod
    def _was_closed_by_user(self) -> bool:
        """Whether ``close()`` was called, perhaps by another thread."""

    @abc.abstractmethod
    def _next_data(self) -> Any:
        """Return the next batch, or raise an ``Instead``; torch's ``__next__`` calls this, too."""

    @abc.abstractmethod
    def _count(self, batch: Any, began_ns: int) -> None:
        """Count a delivered batch, and note how long its steps took."""

    @abc.abstractmethod
    def _count_error(self, error: BaseException, began_ns: int) -> None:
        """Count an exception in place of a batch, or at the epoch's end."""

    def _count_wait(self, began_ns: int) -> None:
        """Count a wait that was interrupted, after which the iterator goes on."""

    @abc.abstractmethod
    def _give_up(self, error: BaseException) -> None:
        """Close the iterator after an interruption."""


def _closed_meanwhile(error: BaseException) -> BaseException:
    """Return what to raise instead of an error that arose since another thread has closed."""
    if isinstance(error, ClosedLoaderError | StopIteration):
        return error
    closed = ClosedLoaderError(CLOSED_MEANWHILE)
    closed.__cause__ = error
    return closed


# What the constructors of iterators use --------------------------------------------------------


def begin_by_torch(iterator: Any, loader: Any, plan: EpochPlan) -> None:
    """Initialize an iterator by torch's base class, which reads the loader and draws a seed.

    The seed of a resumed epoch was drawn when the epoch first began. So torch's global generator is
    set back afterwards: a user may have restored its state, and that must not change.
    """
    iterator._order = plan.newest
    before = torch.get_rng_state() if plan.is_continued and plan.generator is None else None
    _BaseDataLoaderIter.__init__(iterator, loader.as_torch_sees_it)
    if before is not None:
        torch.set_rng_state(before)


def seed_of_workers(config: LoaderConfig, plan: EpochPlan, drawn: float) -> float:
    """Return the base seed of an iterator's workers: from ``seed=``, or else torch's ``drawn``."""
    if config.fetch.seed is None:
        return drawn
    assert plan.epoch is not None
    return base_seed(config.fetch.seed, plan.epoch)


def warn_of_many_objects(config: LoaderConfig, parts: LoaderParts) -> None:
    """Warn once of the memory that a dataset of very many Python objects takes in workers."""
    if parts.has_counted_objects:
        return
    parts.has_counted_objects = True
    from shmloader.shared.counting import describe_many, estimate_objects  # noqa: PLC0415

    text = None
    with contextlib.suppress(Exception):  # for example if another thread changes the objects
        text = describe_many(estimate_objects(config.dataset), config.num_workers)
    if text is not None:
        warn_user(text)


def no_transform(batch: object) -> object:
    """Return the batch unchanged."""
    return batch


def cpu_transform(config: LoaderConfig) -> Callable[[Any], Any]:
    """Return the function that transforms a batch on the CPU, on the user's thread.

    A StopIteration of the user's transform must not silently end the epoch.
    """
    transform, has_steps = config.device_transform, config.has_steps
    if transform is None:
        return no_transform

    def transformed(batch: Any) -> Any:
        try:
            return [transform(each) for each in batch] if has_steps else transform(batch)
        except StopIteration as error:
            raise RuntimeError("the device_transform raised StopIteration") from error

    return transformed
