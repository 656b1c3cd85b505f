"""The numbers of a loader's epochs: which one is iterated, and which one comes next."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from shmloader.sampling.checks import whole_number
from shmloader.sampling.progress import Progress


def _no_iterator() -> None:
    """Stand for the reference to an iterator that is gone."""


class EpochCounter:
    """Numbers the epochs of one loader. The loader shares it with the samplers that it made.

    Used on the user's thread.

    Attributes:
        newest: Number of the newest epoch; None before the first.
        next: Number of the epoch that the next ``iter()`` begins.
        is_named: Whether ``set_epoch`` has set ``next`` since the newest epoch began.
        progress: How far the newest epoch has come.
        iterator: Function that returns the newest epoch's iterator, or None if it is gone.

    Args:
        first: Number of the first epoch.
    """

    def __init__(self, first: int = 0) -> None:
        self.newest: int | None = None
        self.next = first
        self.is_named = False
        self.progress = Progress()
        self.iterator: Callable[[], Any] = _no_iterator
        # Numbers of the epochs whose orders the loader's samplers yield while the loader draws from
        # a sampler that wraps them; None at any other time.
        self._passes: Iterator[int] | None = None
        # Whether it is the loader itself that calls ``set_epoch`` of its samplers.
        self._is_telling = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the number of the next epoch. In a copy, no epoch has begun."""
        return EpochCounter, (self.next,)

    @property
    def iterated(self) -> int | None:
        """Number of the newest epoch while its iterator can deliver a batch; otherwise None."""
        iterator = None if self.progress.is_ended else self.iterator()
        return None if iterator is None or iterator.is_closed else self.newest

    @property
    def of_samplers(self) -> int:
        """Number of the epoch that the loader's samplers yield.

        A number set by ``set_epoch`` takes precedence over that of the epoch that is iterated.
        """
        iterated = self.iterated
        return self.next if iterated is None or self.is_named else iterated

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Ignore what samplers are told in this block, in which the loader tells them."""
        self._is_telling = True
        try:
            yield
        finally:
            self._is_telling = False

    def count_passes(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return the items of a sampler that wraps the loader's, for the epoch that has begun.

        Where the wrapper iterates the loader's sampler again and again, each pass has an order of
        its own: those of this epoch and the following ones.
        """
        assert self.newest is not None
        passes = itertools.count(self.newest)
        return map(functools.partial(self._draw, passes), itertools.repeat(items))

    def _draw(self, passes: Iterator[int], items: Iterator[Any]) -> Any:
        self._passes = passes
        try:
            return next(items)
        finally:
            self._passes = None

    def begin_pass(self) -> int:
        """Return the number of the epoch whose order a sampler of the loader yields now."""
        return self.of_samplers if self._passes is None else next(self._passes)

    def name(self, epoch: object) -> None:
        """Set the number of the next epoch, unless it is the loader that calls its own sampler.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is negative.
        """
        if not self._is_telling:
            self.next = whole_number(epoch, "epoch", minimum=0)
            self.is_named = True

    def begin(self, epoch: int, progress: Progress) -> None:
        """Note that an epoch begins. Its iterator is set when there is one.

        Args:
            epoch: Number of the epoch.
            progress: How far the epoch has come.
        """
        self.newest, self.next, self.is_named = epoch, epoch + 1, False
        self.progress, self.iterator = progress, _Beginning

    def forget_iterator(self) -> None:
        """Note that the newest epoch got no iterator."""
        self.iterator = _no_iterator


class _Beginning:
    """Stands for the iterator of an epoch while the iterator is being made."""

    is_closed = False
