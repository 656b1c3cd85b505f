"""Carry-over: samples that one epoch leaves over come first in the next one.

An epoch begins with the ``rest`` of the last *complete* epoch. Whether an epoch was complete is
known only when the user is done with all its batches, not when they have been drawn: workers run
ahead. So :meth:`CarryOver.commit` replaces the rest, and an epoch that the user leaves early
neither loses nor repeats what it began with.
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol

from shmloader.sampling.progress import is_all


class DrawnEpoch(Protocol):
    """An epoch that is being drawn.

    Attributes:
        drawn: Number of batches drawn so far.
        is_over: Whether all batches were drawn.
        rest: Samples that did not fill a batch; known once the epoch is over.
    """

    drawn: int
    is_over: bool
    rest: list[Any]


class CarryOver:
    """The samples that the next epoch begins with. Used on the user's thread.

    Attributes:
        rest: The samples.
    """

    def __init__(self, rest: Iterable[Any] = ()) -> None:
        self.rest: list[Any] = list(rest)
        self._epoch: DrawnEpoch | None = None
        self._drawing: Iterator[Any] = iter(())

    def begin(self, epoch: DrawnEpoch, drawing: Iterator[Any]) -> None:
        """Begin an epoch.

        Args:
            epoch: The epoch, which has taken the rest as it is now.
            drawing: The iterator that draws it.
        """
        self._epoch, self._drawing = epoch, drawing

    def replace(self, rest: Iterable[Any]) -> None:
        """Have the next epoch begin with ``rest``, whatever the running one leaves over."""
        self.rest, self._epoch = list(rest), None

    def commit(self, position: int, batches: Sized) -> None:
        """Take over what the running epoch leaves over, if the user is done with all of it.

        Args:
            position: Number of batches that the user is done with.
            batches: Has the number of batches in the epoch as its length, if that is known.
        """
        epoch = self._epoch
        if epoch is None or position < epoch.drawn:
            return
        if not epoch.is_over and is_all(position, batches):
            next(self._drawing, None)  # without workers, nothing has asked for the end yet
        if epoch.is_over:
            self.rest, self._epoch = epoch.rest, None

    def copy(self) -> "CarryOver":
        """A copy without the running epoch, which stays with the original."""
        return CarryOver(self.rest)
